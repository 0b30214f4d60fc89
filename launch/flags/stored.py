"""Settings stored with a checkpoint, for a process that only reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.checks.megatron import model_flags
from megatron_rc.launch.flags.checks.weights import NO_BRIDGE
from megatron_rc.launch.run_config import RunConfig, passed_through, sections_of
from megatron_rc.launch.run_config.megatron import MegatronSection, ParallelSection
from megatron_rc.launch.run_config.options import Section, options_of
from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.settings.config import RolloutCorrectionConfig

Sections = Mapping[str, Mapping[str, Any] | None]
# An unknown field in these sections means another model; in other sections it can be ignored.
_OF_THE_MODEL = ("transformer", "latent", "experts", "model")


def stored_config(sections: Sections, where: str) -> RunConfig:
    """Settings of the run that wrote a checkpoint, for one process on a CPU with the whole model.

    ``sections`` has the stored fields of each section; ``where`` is the name of the file, for errors.
    """
    found: dict[str, Any] = {}
    for name, kind, is_optional in sections_of(RunConfig):
        values = sections.get(name)
        if kind is MegatronSection:
            found[name] = MegatronSection(given=dict((values or {}).get("given") or {}))
        elif values is not None:
            found[name] = _section(kind, values, f"{where}: {name}", strict=name in _OF_THE_MODEL)
        elif is_optional:
            found[name] = None
        else:
            raise ConfigurationError(f"{where} has no section {name}: it was written by another version")
    config = RunConfig(**found, correction=RolloutCorrectionConfig.disabled(), loss=PolicyLossConfig())
    # Another version of Megatron-Core may have written fields that this one does not have.
    given = {name: value for name, value in config.megatron.given.items() if name in passed_through()}
    foreign = model_flags(config.changed(megatron={"given": given}))
    if foreign:
        raise ConfigurationError(f"{where}: {foreign[0]} is in no Hugging Face architecture here, and not rebuilt here")
    return _alone(config)


def _alone(config: RunConfig) -> RunConfig:
    parallel = {option.field: option.default for option in options_of(ParallelSection)}
    return config.changed(
        megatron={"given": {}},
        launch={"on_cpu": True, "world_size": 1},
        parallel=parallel | {"virtual_pipeline_model_parallel_size": None},
        # Checkpoints of both kinds of models have one form, and GPTModel is in every version.
        model={"transformer_impl": "local", "kind": "gpt"},
        checkpoints={"weights_bridge": NO_BRIDGE},
    )


def _section(kind: type[Section], values: Mapping[str, Any], where: str, *, strict: bool) -> Section:
    hints, defaults = get_type_hints(kind), {option.field: option.default for option in options_of(kind)}
    fields = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    # A flag that an earlier release had, and that was not given, changes nothing.
    unknown = [name for name, value in values.items() if name not in fields and value is not None]
    if strict and unknown:
        raise ConfigurationError(f"{where} has an unknown field {unknown[0]!r}: another megatron_rc wrote it")
    found = {}
    for name in fields:
        value = values.get(name, defaults.get(name))
        if not _is_of(value, hints[name]):
            raise ConfigurationError(f"{where}: {name} is {value!r}: it was written by another version, or is broken")
        found[name] = tuple(value) if isinstance(value, list) else value
    return kind(**found)


def _is_of(value: Any, hint: Any) -> bool:
    """Whether a JSON value has the type of an annotation such as ``int``, ``float | None`` or ``Literal[...]``."""
    kinds = (hint,) if get_origin(hint) is tuple else get_args(hint) or (hint,)
    if isinstance(value, list):
        return any(get_origin(kind) is tuple and all(_is_of(one, get_args(kind)[0]) for one in value) for kind in kinds)
    if value is None or isinstance(value, str):
        return (NoneType if value is None else str) in kinds or value in kinds
    if isinstance(value, bool) or bool in kinds:
        return isinstance(value, bool) and bool in kinds
    return isinstance(value, int | float) and (float in kinds or (int in kinds and isinstance(value, int)))
