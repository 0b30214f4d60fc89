"""Settings stored with a checkpoint, for a process that only reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.checks.megatron import model_flags
from megatron_rc.launch.flags.checks.weights import NO_BRIDGE
from megatron_rc.launch.flags.saved_settings import SETTINGS, checkpoint_settings
from megatron_rc.launch.run_config import RunConfig, flag_options, passed_through, sections_of
from megatron_rc.launch.run_config.megatron import MegatronSection, ParallelSection
from megatron_rc.launch.run_config.options import Section, as_typed, options_of
from megatron_rc.launch.weights.megatron_bridge import BRIDGE
from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.settings.config import RolloutCorrectionConfig

# Sections with the shape of a model. A value of an unknown field in these means another model; in other sections it can
# be ignored.
SECTIONS_OF_THE_MODEL = ("transformer", "latent", "yarn", "experts", "model")


def stored_config(folder: Path) -> RunConfig:
    """Return the settings of the run that wrote the checkpoint in a folder, for one process on a CPU.

    The correction and the loss are the defaults, not the run's.

    Raises:
        ValueError: the settings are missing or cannot be read.
        ConfigurationError: another version wrote them, or the model cannot be made here.
    """
    where = str(folder / SETTINGS)
    sections = checkpoint_settings(folder)
    if (sections.get("checkpoints") or {}).get("weights_bridge") == BRIDGE:
        raise ConfigurationError(f"{where}: Megatron-Bridge made this model: give --save-hf to a run that --loads it")
    made: dict[str, Any] = {}
    for name, section, is_optional in sections_of(RunConfig):
        stored = sections.get(name)
        if section is MegatronSection:
            fields = (stored or {}).get("given") or {}
            _refuse_moved_fields(fields, where)
            # Another version of Megatron-Core may have written fields that this one does not have.
            known_fields = {field: value for field, value in fields.items() if field in passed_through()}
            made[name] = MegatronSection(given=known_fields)
        elif stored is not None:
            made[name] = _section(section, stored, f"{where}: {name}", strict=name in SECTIONS_OF_THE_MODEL)
        elif is_optional:
            made[name] = None
        else:
            raise ConfigurationError(f"{where} has no section {name}: it was written by another version")
    config = RunConfig(**made, correction=RolloutCorrectionConfig.disabled(), loss=PolicyLossConfig())
    flags_without_architecture = model_flags(config)
    if flags_without_architecture:
        raise ConfigurationError(
            f"{where}: {flags_without_architecture[0]} is in no Hugging Face architecture here, so the model cannot be "
            "rebuilt from its stored settings"
        )
    return _on_one_process(config)


def _refuse_moved_fields(fields: Mapping[str, Any], where: str) -> None:
    """Refuse a field that changed the model's function, and that a section of this release has."""
    declared = {option.field: option for _, option in flag_options().values()}
    for name, value in fields.items():
        if name in declared and value != declared[name].default:
            raise ConfigurationError(
                f"{where}: {as_typed(declared[name].flag, value)} was stored with Megatron's other fields: it was "
                "written by another version"
            )


def _on_one_process(config: RunConfig) -> RunConfig:
    parallel = {option.field: option.default for option in options_of(ParallelSection)}
    return config.changed(
        megatron={"given": {}},
        launch={"on_cpu": True, "world_size": 1},
        parallel=parallel | {"virtual_pipeline_model_parallel_size": None},
        # Checkpoints of both kinds of models have one form, and GPTModel is in every version.
        model={"transformer_impl": "local", "kind": "gpt"},
        checkpoints={"weights_bridge": NO_BRIDGE},
    )


def _section(section: type[Section], stored: Mapping[str, Any], where: str, *, strict: bool) -> Section:
    """Make a section of stored values; a field that the file does not have gets its default."""
    hints = get_type_hints(section)
    defaults = {
        option.field: not option.default if option.inverted else option.default for option in options_of(section)
    }
    names = [field.name for field in dataclasses.fields(section)]  # type: ignore[arg-type]
    # A flag that an earlier release had, and that was not given, changes nothing.
    unknown = [name for name, value in stored.items() if name not in names and value is not None]
    if strict and unknown:
        raise ConfigurationError(f"{where} has an unknown field {unknown[0]!r}: another megatron_rc wrote it")
    values = {}
    for name in names:
        value = stored.get(name, defaults.get(name))
        if not _has_type(value, hints[name]):
            raise ConfigurationError(f"{where}: {name} is {value!r}: it was written by another version, or is broken")
        values[name] = tuple(value) if isinstance(value, list) else value
    try:
        return section(**values)
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from error


def _has_type(value: Any, hint: Any) -> bool:
    """Return whether a JSON value has the type of an annotation: ``int``, ``float | None``, ``Literal[...]``."""
    kinds = (hint,) if get_origin(hint) is tuple else get_args(hint) or (hint,)
    if value is None:
        return NoneType in kinds
    if isinstance(value, str):
        return str in kinds or value in kinds or any(value in get_args(kind) for kind in kinds)
    if isinstance(value, list):
        tuples = [kind for kind in kinds if get_origin(kind) is tuple]
        return any(all(_has_type(element, get_args(kind)[0]) for element in value) for kind in tuples)
    if isinstance(value, bool) or bool in kinds:
        return isinstance(value, bool) and bool in kinds
    if isinstance(value, int):
        return int in kinds or float in kinds
    return isinstance(value, float) and float in kinds
