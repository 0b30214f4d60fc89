"""Tables of sentences about settings that cannot work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.run_config import RunConfig, passed_through
from megatron_rc.launch.run_config.options import as_typed


def refuse(config: RunConfig, wrong: Mapping[str, object], **more: object) -> None:
    """Raise a ConfigurationError with the first sentence that is true.

    Args:
        config: settings of the run.
        wrong: whether each sentence is true. In a sentence ``{seq_length}`` stands for ``--seq-length 64``, and
            ``{bf16}`` for ``--bf16``: the flag with its value. ``{found}`` stands for the value that makes it true.
        more: values of names in the sentences that are no flags.
    """
    for sentence, found in wrong.items():
        if found:
            raise ConfigurationError(sentence.format_map(_Typed(config, {"found": found, **more})))


def typed(config: RunConfig, name: str) -> str:
    """Text of a flag with its value, as typed; ``name`` has underscores."""
    if name in passed_through():
        return passed_through()[name].as_flag(config.megatron.given[name])
    return as_typed(name, config.value_of(name.replace("_", "-")))


class _Typed(dict[str, Any]):
    """Texts of flags by name, as they are asked for."""

    def __init__(self, config: RunConfig, more: Mapping[str, object]) -> None:
        super().__init__(more)
        self.config = config

    def __missing__(self, name: str) -> str:
        return typed(self.config, name)
