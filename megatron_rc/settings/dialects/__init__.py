"""Other programs' configurations of the same thing: what each setting becomes here, and what is dropped.

``verl`` is that of 2026, ``verl-2025-11`` that of November and December 2025, ``verl-2025-10`` the flat one before. A
setting that the program itself would have ignored is dropped with a note; an unknown one is an error. The table is in
``docs/presets.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_rc.settings.criteria import one_of
from megatron_rc.settings.dialects import others as dialect_others
from megatron_rc.settings.dialects import verl as dialect_verl
from megatron_rc.settings.dialects.reader import Settings

_READERS: dict[str, Callable[[Settings], dict[str, Any]]] = {
    "verl": dialect_verl.verl,
    "verl-2025-11": dialect_verl.verl_2025_11,
    "verl-2025-10": dialect_verl.verl_2025_10,
    "slime": dialect_others.slime,
    "nemo-rl": dialect_others.nemo_rl,
}
_DEFAULTS: dict[str, Mapping[str, Any]] = {**dialect_verl.DEFAULTS, **dialect_others.DEFAULTS}
_SECTIONS = {
    "verl": ("algorithm", "rollout_correction"),
    "verl-2025-11": ("algorithm", "rollout_correction"),
    "verl-2025-10": ("algorithm",),
    "slime": (),
    "nemo-rl": ("loss_fn",),
}
DIALECTS = tuple(_READERS)


def translate(fields: Mapping[str, Any], dialect: str) -> tuple[dict[str, Any], list[str]]:
    """Another program's settings as the fields of ours.

    Args:
        fields: the settings, alone or inside the sections that the program's configuration files have.
        dialect: whose they are, one of ``DIALECTS``.

    Returns:
        Our fields, and notes of a line each: first what the settings became, then what changed or was dropped.

    Raises:
        ValueError: an unknown dialect or setting, or a value that the program would refuse or that cannot work here.
    """
    one_of("dialect", dialect, DIALECTS)
    known = _DEFAULTS[dialect]
    inner, unread = _inside(fields, dialect)
    if dialect == "slime":
        inner = {name.lstrip("-").replace("-", "_"): value for name, value in inner.items()}
    settings = Settings(inner, known)
    own = _READERS[dialect](settings)
    became = ", ".join(f"{name}={value!r}" for name, value in own.items())
    notes = [f"read as {dialect}: {became}", *dict.fromkeys(settings.notes)]
    if unread:
        notes.append(f"not read, no part of the correction: {', '.join(unread)}")
    return own, notes


def _inside(fields: Mapping[str, Any], dialect: str) -> tuple[Mapping[str, Any], list[str]]:
    """The settings inside their sections, and the keys beside the sections."""
    unread: list[str] = []
    nested = False
    for section in _SECTIONS[dialect]:
        if section not in fields:
            continue
        nested = True
        unread += [name for name in fields if name != section]
        inner = fields[section]
        if inner is None:  # the section is switched off
            return _switched_off(dialect), unread
        if not isinstance(inner, Mapping):
            raise ValueError(f"{section}={inner!r} must hold settings, one `name: value` a line")
        fields = inner
    # These two sections hold the program's other settings too.
    if nested and _SECTIONS[dialect][-1:] in (("algorithm",), ("loss_fn",)):
        known = _DEFAULTS[dialect]
        unread += [name for name in fields if name not in known]
        fields = {name: value for name, value in fields.items() if name in known}
    return fields, unread


def _switched_off(dialect: str) -> dict[str, Any]:
    return {"rollout_is": None} if dialect in ("verl", "verl-2025-11") else {}
