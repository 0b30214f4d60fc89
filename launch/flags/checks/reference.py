"""The reference policy: whether anything is compared with it, and whether it can be what is asked for."""

from __future__ import annotations

from pathlib import Path

from megatron_rc.launch.errors import ConfigurationError, flag
from megatron_rc.launch.run_config import RunConfig, flag_options
from megatron_rc.launch.run_config.options import options_of
from megatron_rc.launch.run_config.reference import ReferenceSection
from megatron_rc.launch.weights.architecture import read_architecture

# What a directory says of itself, and not of the function that the model is.
_NAMES_ALONE = ("hf-model-type", "max-position-embeddings", "sliding-window")


def check_reference(config: RunConfig) -> None:
    """Raise ConfigurationError for a setting that would do nothing, or a model other than the policy's."""
    reference = config.reference
    for option in options_of(ReferenceSection):
        value = getattr(reference, option.field)
        if value is not None and not config.needs_reference:
            raise ConfigurationError(
                f"{flag(option.flag)} {value} does nothing without --grpo-kl-beta or --kl-in-reward: give one of them, "
                "or drop it"
            )
    if reference.ref_load and reference.ref_load_hf:
        raise ConfigurationError(
            f"--ref-load {reference.ref_load} and --ref-load-hf {reference.ref_load_hf} each name a reference policy: "
            "drop one of them"
        )
    if reference.ref_load and not Path(reference.ref_load).is_dir():
        raise ConfigurationError(f"--ref-load {reference.ref_load}: no such folder")
    if reference.ref_load_hf:
        _check_architecture(config, reference.ref_load_hf)
    interval, updates = reference.ref_update_interval, config.updates_per_rollout
    if interval and interval % updates:
        raise ConfigurationError(
            f"--ref-update-interval {interval} must be a multiple of the {updates} optimizer steps of one rollout "
            "batch, which is compared with one reference"
        )


def _check_architecture(config: RunConfig, folder: str) -> None:
    """Other shapes would not be read; other numbers would, into another function."""
    for name, word in read_architecture(folder, "--ref-load-hf").items():
        if name in _NAMES_ALONE or name not in flag_options():
            continue
        kind, value = flag_options()[name][1].kind, config.value_of(name)
        if kind is bool:
            value = bool(value)  # None where the section of the switch is absent
        if value != (word == "true" if kind is bool else kind(word)):
            raise ConfigurationError(
                f"--ref-load-hf {folder} is a model with --{name} {word}, and the policy has {value}: the reference "
                "must be of the policy's architecture"
            )
