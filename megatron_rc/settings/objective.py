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
    """Return the objective with its algorithm filled in: ``ppo_clip``, in bypass mode the correction's ``loss_type``.

    Args:
        config: the settings of the correction.
        loss: the objective; its ``algorithm`` may be None.
        has_auxiliary_losses: the model adds losses of its own to the gradients.
        one_pass: the loss computes the correction, with π_θ as π_old.

    Raises:
        ValueError: settings that contradict each other, or cannot be exact together.
    """
    algorithm = config.loss_type if config.bypass_mode else "ppo_clip"
    if one_pass:
        _check_one_pass(config)
    if config.corrects_in_loss or one_pass:
        _check_in_loss(config, loss, has_auxiliary_losses, one_pass)
    return dataclasses.replace(loss, algorithm=loss.algorithm or algorithm)


def denominator_is_unknown(config: RolloutCorrectionConfig, loss: PolicyLossConfig, *, one_pass: bool = False) -> bool:
    """Return whether the loss's denominator is known only after the schedule, because the loss rejects or weighs."""
    if not (config.corrects_in_loss or one_pass):
        return False
    if config.rollout_is_batch_normalize:
        return True
    # A sum has a constant divisor, and original tokens are counted before the schedule, unless a bad log-prob takes
    # one out of them.
    counts_what_it_accepts = config.rejection_denominator == "accepted" or config.bad_log_probs == "reject_token"
    return loss.aggregation != "token-sum" and config.rejects and counts_what_it_accepts


def check_left_out(config: RolloutCorrectionConfig, one_pass: bool, given: Any, *names: str) -> None:
    """Raise ValueError for inputs that the loss would find for itself and ignore.

    Args:
        config: the settings of the correction, which is computed inside the loss.
        one_pass: the loss takes π_θ as π_old.
        given: the record of inputs.
        names: fields of the record that must be None; ``train_log_probs`` always is one of them.
    """
    mode = _mode_in_loss(config, one_pass)
    old_log_probs = {
        "one_pass": "takes log π_θ for log π_old",
        "bypass_mode": "takes rollout_log_probs for log π_old",
        "proximal_interpolation": "interpolates log π_old from log π_θ and rollout_log_probs",
    }
    for name in ("train_log_probs", *names):
        if getattr(given, name) is not None:
            reason = old_log_probs[mode] if name == "train_log_probs" else f"finds the {name} in the loss"
            raise ValueError(f"{name} would be ignored: {mode}=True {reason}: pass {name}=None, or use decoupled mode")


def _mode_in_loss(config: RolloutCorrectionConfig, one_pass: bool) -> str:
    """Return the name of the setting because of which the loss computes the correction."""
    if one_pass:
        return "one_pass"
    return "bypass_mode" if config.bypass_mode else "proximal_interpolation"


def _check_one_pass(config: RolloutCorrectionConfig) -> None:
    if config.corrects_in_loss:
        other = _mode_in_loss(config, one_pass=False)
        raise ValueError(f"one_pass=True does nothing with {other}=True, which needs no pass either: drop one of them")
    check_prompts(config, "one_pass")


def _check_in_loss(
    config: RolloutCorrectionConfig, loss: PolicyLossConfig, has_auxiliary_losses: bool, one_pass: bool
) -> None:
    mode = _mode_in_loss(config, one_pass)
    if config.bypass_mode and loss.algorithm not in (None, config.loss_type):
        raise ValueError(
            f"algorithm={loss.algorithm!r} contradicts loss_type={config.loss_type!r}, which names the objective in "
            "bypass_mode: set them alike, or leave algorithm out"
        )
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
