"""Checks of a configuration for programs that call the correction inside a loss of their own."""

from __future__ import annotations

from megatron_rc.settings.config import RolloutCorrectionConfig, check_config
from megatron_rc.settings.criteria import CRITERIA
from megatron_rc.settings.criterion import Criterion


def check_micro_batch_config(config: RolloutCorrectionConfig, program: str) -> None:
    """Raise ValueError for a setting that needs more than the tokens of one micro-batch; ``program`` is its caller."""
    check_config(config)
    for name in ("bypass_mode", "proximal_interpolation"):
        if getattr(config, name):
            raise ValueError(f"{name}=True: {program} computes its loss's ratio itself: leave {name} out")
    reasons = {
        "rollout_is_batch_normalize": "the mean of the weights needs the global batch",
        "rollout_staleness_scale": "it passes no weight versions",
    }
    for name, reason in reasons.items():
        if getattr(config, name):
            call = f"{program} calls for one micro-batch at a time"
            raise ValueError(f"{name}={getattr(config, name)!r}: {call}, and {reason}: drop it")
    refuse_criteria(config, program)
    if config.rejects and config.rejection_denominator != "original":
        raise ValueError(
            f"rejection_denominator={config.rejection_denominator!r}: {program} divides its loss by the tokens before "
            "rejection: set rejection_denominator='original'"
        )


def refuse_criteria(config: RolloutCorrectionConfig, program: str) -> None:
    """Raise ValueError for a criterion that needs prompts or advantages, which the program does not pass."""
    for criterion in config.criteria:
        if not _is_of_tokens_alone(criterion):
            needed = "advantages" if criterion.only_negative else "prompts"
            own = ", ".join(name for name, one in CRITERIA.items() if _is_of_tokens_alone(one))
            raise ValueError(
                f"rollout_rs={criterion.name!r} needs {needed}, which {program} does not pass: use one of {own}"
            )


def _is_of_tokens_alone(criterion: Criterion) -> bool:
    return criterion.unit != "prompt" and not criterion.only_negative
