"""Checks of a correction's settings together with the settings of the loss, and the choice of the loss's algorithm."""

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
    """Return the loss's settings with an ``algorithm``, after checking that they go with those of the correction.

    An ``algorithm`` that is None becomes ``ppo_clip``; in bypass mode it becomes the correction's ``loss_type``.

    Args:
        config: the settings of the correction.
        loss: the settings of the loss.
        has_auxiliary_losses: the model adds losses of its own to the gradients, such as MoE balancing losses.
        one_pass: there is no forward-only pass: the loss computes the correction, and takes π_θ as π_old.

    Raises:
        ValueError: settings that contradict each other, or with which the loss would not be exact.
    """
    default_algorithm = config.loss_type if config.bypass_mode else "ppo_clip"
    if one_pass:
        _check_one_pass(config)
    if config.corrects_in_loss or one_pass:
        _check_in_loss(config, loss, has_auxiliary_losses, one_pass)
    return dataclasses.replace(loss, algorithm=loss.algorithm or default_algorithm)


def denominator_is_unknown(config: RolloutCorrectionConfig, loss: PolicyLossConfig, *, one_pass: bool = False) -> bool:
    """Return True if the loss's denominator is known only after the schedule has run all micro-batches.

    That is so if the correction is made in the loss, and the denominator depends on its weights or its rejection.
    """
    if not (config.corrects_in_loss or one_pass):
        return False
    if config.rollout_is_batch_normalize:
        return True
    if loss.aggregation == "token-sum":
        # Its divisor is a constant.
        return False
    # The tokens before rejection are counted before the schedule. But with reject_token those with a bad log-prob are
    # no longer among them, and log π_θ is not known yet.
    depends_on_rejection = config.rejection_denominator == "accepted" or config.bad_log_probs == "reject_token"
    return config.rejects and depends_on_rejection


def check_left_out(config: RolloutCorrectionConfig, one_pass: bool, inputs: Any, *names: str) -> None:
    """Raise ValueError if the inputs have a tensor that the loss computes itself, so that it would be ignored.

    Args:
        config: the settings of the correction, which is computed inside the loss.
        one_pass: the loss takes π_θ as π_old.
        inputs: the record of inputs of a rollout batch or a micro-batch.
        names: the fields of the record, besides ``train_log_probs``, that must be None.
    """
    mode = _mode_in_loss(config, one_pass)
    source_of_old_log_probs = {
        "one_pass": "takes log π_θ for log π_old",
        "bypass_mode": "takes rollout_log_probs for log π_old",
        "proximal_interpolation": "interpolates log π_old from log π_θ and rollout_log_probs",
    }
    for name in ("train_log_probs", *names):
        if getattr(inputs, name) is not None:
            reason = f"finds the {name} in the loss"
            if name == "train_log_probs":
                reason = source_of_old_log_probs[mode]
            raise ValueError(f"{name} would be ignored: {mode}=True {reason}: pass {name}=None, or use decoupled mode")


def _mode_in_loss(config: RolloutCorrectionConfig, one_pass: bool) -> str:
    """Return the name of the setting that makes the loss compute the correction."""
    if one_pass:
        return "one_pass"
    return "bypass_mode" if config.bypass_mode else "proximal_interpolation"


def _check_one_pass(config: RolloutCorrectionConfig) -> None:
    """Raise ValueError for settings of the correction that contradict ``one_pass``."""
    if config.corrects_in_loss:
        other_mode = _mode_in_loss(config, one_pass=False)
        raise ValueError(
            f"one_pass=True does nothing with {other_mode}=True, which needs no pass either: drop one of them"
        )
    check_prompts(config, "one_pass")


def _check_in_loss(
    config: RolloutCorrectionConfig, loss: PolicyLossConfig, has_auxiliary_losses: bool, one_pass: bool
) -> None:
    """Raise ValueError for settings that contradict a correction in the loss, or with which it would not be exact."""
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
