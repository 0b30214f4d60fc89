"""What a program's own loss can make of a configuration, and the error about a setting that it cannot."""

from __future__ import annotations

from megatron_rc.settings.config import RolloutCorrectionConfig, check_config
from megatron_rc.settings.criteria import CRITERIA
from megatron_rc.settings.criterion import Criterion

_IN_LOSS = ("bypass_mode", "proximal_interpolation")


def check_micro_batch_config(config: RolloutCorrectionConfig, program: str) -> None:
    """Raise ValueError for a setting that needs more than the tokens of one micro-batch.

    Args:
        config: what to correct.
        program: calls its function for one micro-batch after the other, inside the pipeline schedule.
    """
    check_config(config)
    refuse_in_loss(config, program)
    reasons = {
        "rollout_is_batch_normalize": "the mean of the weights runs over the global batch",
        "rollout_staleness_scale": "versions of the weights are no argument",
    }
    for name, reason in reasons.items():
        if getattr(config, name):
            raise ValueError(
                f"{name}={getattr(config, name)!r}: {program} asks for one micro-batch at a time, and {reason}: drop it"
            )
    refuse_criteria(config, program)
    if config.rejects and config.rejection_denominator != "original":
        raise ValueError(
            f"rejection_denominator={config.rejection_denominator!r}: {program} divides its loss by the tokens that "
            "trained before anything was rejected: set rejection_denominator='original'"
        )


def refuse_in_loss(config: RolloutCorrectionConfig, program: str) -> None:
    """Raise ValueError where the correction is made in the loss, which is the program's own."""
    for name in _IN_LOSS:
        if getattr(config, name):
            raise ValueError(f"{name}=True: {program} makes the ratio of its loss itself: leave {name} out")


def refuse_criteria(config: RolloutCorrectionConfig, program: str) -> None:
    """Raise ValueError for a criterion that looks at prompts or advantages, which the program does not hand over."""
    for criterion in config.criteria:
        if not _is_of_tokens_alone(criterion):
            what = "advantages" if criterion.only_negative else "prompts"
            own = ", ".join(name for name, one in CRITERIA.items() if _is_of_tokens_alone(one))
            raise ValueError(
                f"rollout_rs={criterion.name!r} looks at {what}, which {program} does not hand over: use one of {own}"
            )


def _is_of_tokens_alone(criterion: Criterion) -> bool:
    return criterion.unit != "prompt" and not criterion.only_negative
