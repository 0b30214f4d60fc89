"""Checks of the reference policy."""

from __future__ import annotations

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.run_config import RunConfig, flag_options
from megatron_rc.launch.weights.architecture import read_architecture

# Settings of a directory that do not change the function of the model.
_NAMES_ALONE = ("hf-model-type", "max-position-embeddings", "sliding-window")


def check_reference(config: RunConfig) -> None:
    """Refuse a directory whose shapes or numbers make another function than the policy's."""
    folder = config.reference.ref_load_hf
    if not folder:
        return
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
