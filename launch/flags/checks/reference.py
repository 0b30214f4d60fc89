"""Checks of the reference policy."""

from __future__ import annotations

from pathlib import Path

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.run_config import RunConfig, flag_options
from megatron_rc.launch.weights.architecture import read_architecture

# Settings of a directory that do not change the function of the model.
_NAMES_ALONE = ("hf-model-type", "max-position-embeddings", "sliding-window")


def check_reference(config: RunConfig) -> None:
    """Check that the reference policy exists, has the policy's architecture, and changes between rollout batches.

    Raises:
        ConfigurationError: names the flag.
    """
    reference, updates = config.reference, config.updates_per_rollout
    if reference.ref_load and not Path(reference.ref_load).is_dir():
        raise ConfigurationError(f"--ref-load {reference.ref_load}: no such folder")
    if reference.ref_load_hf:
        _check_architecture(config, reference.ref_load_hf)
    interval = reference.ref_update_interval
    if interval and interval % updates:
        raise ConfigurationError(
            f"--ref-update-interval {interval} must be a multiple of the {updates} optimizer steps of a rollout batch, "
            "which has one reference"
        )


def _check_architecture(config: RunConfig, folder: str) -> None:
    """Refuse a directory with other shapes or numbers than the policy's: it would be another function."""
    for name, word in read_architecture(folder, "--ref-load-hf").items():
        if name in _NAMES_ALONE or name not in flag_options():
            continue
        kind, value = flag_options()[name][1].kind, config.value_of(name)
        if kind is bool:
            value = bool(value)  # None if the section of the switch is absent
        if value != (word == "true" if kind is bool else kind(word)):
            raise ConfigurationError(
                f"--ref-load-hf {folder} is a model with --{name} {word}, but the policy has {value}: the reference "
                "must have the policy's architecture"
            )
