"""The objective that a correction goes with: its algorithm filled in, and combinations that cannot be exact refused."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.consistency import check_prompts

ONE_STEP = (
    "with one_pass=True the first optimizer step moves π_θ away from π_old: make a plan for each optimizer step, or "
    "use one_pass=False and log π_old of a forward-only pass"
)


def resolve_objective(
    config: RolloutCorrectionConfig,
    loss: PolicyLossConfig,
    *,
    has_auxiliary_losses: bool = False,
    one_pass: bool = False,
) -> PolicyLossConfig:
    """The objective with its algorithm filled in: ``ppo_clip``, in bypass mode the correction's ``loss_type``.

    ValueError for settings that contradict each other, or cannot be exact together (``has_auxiliary_losses``: the model
    adds losses of its own to the gradients; ``one_pass``: the loss corrects, with π_θ as π_old).
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


def check_left_out(config: RolloutCorrectionConfig, one_pass: bool, given: Any, *names: str) -> None:
    """Raise ValueError for inputs, these and ``train_log_probs``, that the loss would find for itself and ignore."""
    mode, old = "proximal_interpolation", "interpolates log π_old from log π_θ and rollout_log_probs"
    if one_pass:
        mode, old = "one_pass", "takes log π_θ for log π_old"
    elif config.bypass_mode:
        mode, old = "bypass_mode", "takes rollout_log_probs for log π_old"
    for name in ("train_log_probs", *names):
        if getattr(given, name) is not None:
            why = old if name == "train_log_probs" else f"finds the {name} in the loss"
            raise ValueError(f"{name} would be ignored: {mode}=True {why}: pass {name}=None, or use decoupled mode")


def _check_one_pass(config: RolloutCorrectionConfig) -> None:
    if config.corrects_in_loss:
        name = "bypass_mode" if config.bypass_mode else "proximal_interpolation"
        raise ValueError(f"one_pass=True does nothing with {name}=True, which needs no pass either: drop one of them")
    check_prompts(config, "one_pass")


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
