"""Spelling of the correction's fields on the command line."""

from __future__ import annotations

import shlex

from megatron_rc.settings.fields import DEFAULTS, CorrectionFields


def flag_of(field: str) -> str:
    """The flag of a field."""
    return f"--{field.replace('_', '-')}"


def flags_of(config: CorrectionFields) -> str:
    """The flags that make this config: ``--rollout-is``, and each field that differs from its default."""
    words: list[str] = []
    for name, value in config.to_dict().items():
        if value == DEFAULTS[name] and name != "rollout_is":
            continue
        if isinstance(value, bool):
            words.append(flag_of(name) if value else flag_of(f"no_{name}"))
        else:
            words.append(f"{flag_of(name)}={'none' if value is None else value}")
    return shlex.join(words)
