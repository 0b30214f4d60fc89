"""The objective that a correction goes with: its algorithm filled in, and combinations that cannot be exact refused."""

from __future__ import annotations

import dataclasses

from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.settings.config import RolloutCorrectionConfig


def resolve_objective(
    config: RolloutCorrectionConfig,
    loss: PolicyLossConfig,
    *,
    has_auxiliary_losses: bool = False,
    one_pass: bool = False,
) -> PolicyLossConfig:
    """The objective with its algorithm filled in: ``ppo_clip``, in bypass mode the correction's ``loss_type``.

    Raises:
        ValueError: settings that contradict each other, or cannot be exact together (``has_auxiliary_losses``: the
            model adds losses of its own to the gradients; ``one_pass``: the loss corrects, with π_θ as π_old).
    """
    algorithm = config.loss_type if config.bypass_mode else "ppo_clip"
    if one_pass:
        _check_one_pass(config)
    if config.corrects_in_loss or one_pass:
        _check_in_loss(config, loss, has_auxiliary_losses, one_pass)
    return dataclasses.replace(loss, algorithm=loss.algorithm or algorithm)


def denominator_is_unknown(config: RolloutCorrectionConfig, loss: PolicyLossConfig, *, one_pass: bool = False) -> bool:
    """Whether the loss's denominator is known only after the schedule."""
    return (config.corrects_in_loss or one_pass) and (
        config.rollout_is_batch_normalize
        or (
            loss.aggregation != "token-sum"
            and config.rejects
            and (config.rejection_denominator == "accepted" or config.bad_log_probs == "reject_token")
        )
    )


def _check_one_pass(config: RolloutCorrectionConfig) -> None:
    if config.corrects_in_loss:
        name = "bypass_mode" if config.bypass_mode else "proximal_interpolation"
        raise ValueError(f"one_pass=True does nothing with {name}=True, which needs no pass either: drop one of them")
    if config.needs_prompts:
        names = ", ".join(criterion.name for criterion in config.criteria if criterion.unit == "prompt")
        raise ValueError(
            f"rollout_rs={names} needs all responses of a prompt before the loss, which one_pass does not have: use "
            "one_pass=False and log π_old of a forward-only pass, or drop it"
        )


def _check_in_loss(
    config: RolloutCorrectionConfig, loss: PolicyLossConfig, has_auxiliary_losses: bool, one_pass: bool
) -> None:
    mode = "one_pass" if one_pass else "bypass_mode" if config.bypass_mode else "proximal_interpolation"
    if config.bypass_mode and loss.algorithm not in (None, config.loss_type):
        named = f"loss_type={config.loss_type!r}, which names the objective in bypass_mode"
        raise ValueError(f"algorithm={loss.algorithm!r} contradicts {named}: set them alike, or leave algorithm out")
    if config.rollout_is_batch_normalize and (loss.entropy_coef or loss.kl_coef):
        raise ValueError(
            f"rollout_is_batch_normalize=True in {mode} scales all gradients by one factor, which must not scale "
            f"the terms of entropy_coef={loss.entropy_coef} and kl_coef={loss.kl_coef}: set them to 0, or use "
            "decoupled mode"
        )
    if denominator_is_unknown(config, loss, one_pass=one_pass) and has_auxiliary_losses:
        raise ValueError(
            f"the loss's denominator is known only after the schedule ({mode} with "
            "rejection_denominator=accepted or rollout_is_batch_normalize), and scaling the gradients then would "
            "scale the model's auxiliary losses too: use rejection_denominator=original without batch normalisation, "
            "or decoupled mode"
        )
