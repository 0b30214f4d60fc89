"""Checks of settings, alone and together; each error names the field and the remedy."""

from __future__ import annotations

import logging

from megatron_rc.loss.objectives import OBJECTIVES
from megatron_rc.settings.bounds import one_of, positive
from megatron_rc.settings.fields import DEFAULTS, SWITCHES, CorrectionFields
from megatron_rc.settings.overrides import OF_WEIGHTS

_CHOICES: dict[str, tuple[str | None, ...]] = {
    "rollout_is": (None, "token", "sequence", "geometric"),
    "rollout_is_mode": (None, "truncate", "clamp", "mask"),
    "rollout_is_batch_normalize_scope": ("all", "accepted"),
    "rejection_denominator": ("accepted", "original"),
    "bad_log_probs": ("error", "reject_token", "reject_sequence"),
}
_log = logging.getLogger("megatron_rc")


def check_values(config: CorrectionFields) -> None:
    """Raise ValueError for a value that its field does not take, and for settings of weights that do nothing."""
    for name, allowed in _CHOICES.items():
        one_of(name, getattr(config, name), allowed)
    one_of("loss_type", config.loss_type, tuple(OBJECTIVES))
    for name in SWITCHES:
        if not isinstance(getattr(config, name), bool):
            raise ValueError(f"{name}={getattr(config, name)!r} must be true or false")
    if not isinstance(config.metric_prefix, str):
        raise ValueError(f"metric_prefix={config.metric_prefix!r} must be a text, for example 'rollout_corr/'")
    if config.rollout_token_veto_threshold is not None:
        positive("rollout_token_veto_threshold", config.rollout_token_veto_threshold)
    _check_weights(config)


def check_together(config: CorrectionFields) -> None:
    """Raise ValueError for fields that contradict each other or do nothing, from fields and derived values."""
    _check_scale(config)
    criteria = config.criteria
    if criteria and all(one.follows_others for one in criteria) and not config.rejects_without_criteria:
        raise ValueError(
            f"rollout_rs={config.rollout_rs!r} tests the rejection by other criteria: name at least one more"
        )
    _check_mode(config)


def _check_weights(config: CorrectionFields) -> None:
    """Refuse settings of the weights that do nothing."""

    def refuse(name: str, reason: str, remedy: str) -> None:
        raise ValueError(f"{name}={getattr(config, name)!r} does nothing {reason}: {remedy}, or drop {name}")

    if config.rollout_is is None:
        for name in (*OF_WEIGHTS, "rollout_is_batch_normalize"):
            if getattr(config, name) != DEFAULTS[name]:
                refuse(name, "without rollout_is", "set rollout_is to token, sequence or geometric")
    if config.rollout_is_batch_normalize and not config.rollout_is_apply:
        remedy = "drop rollout_is_apply=False"
        refuse("rollout_is_batch_normalize", "with rollout_is_apply=False, which applies no weights", remedy)
    if config.rollout_is_batch_normalize_scope != "all" and not config.rollout_is_batch_normalize:
        refuse("rollout_is_batch_normalize_scope", "without rollout_is_batch_normalize", "set that too")


def _check_scale(config: CorrectionFields) -> None:
    if config.staleness_scale is None:
        return
    given = f"rollout_staleness_scale={config.rollout_staleness_scale!r}"
    if config.rollout_is is None and not any(criterion.bounds.takes_threshold for criterion in config.criteria):
        raise ValueError(
            f"{given} does nothing without bounds: set rollout_is, or a criterion in rollout_rs that takes a bound"
        )
    for criterion in config.criteria:
        if criterion.unit == "prompt" and criterion.bounds.takes_threshold:
            raise ValueError(
                f"{given}: {criterion.name} tests all responses of a prompt, which differ in staleness: use a "
                "criterion of tokens or sequences, or drop the scale"
            )


def _check_mode(config: CorrectionFields) -> None:
    if config.proximal_interpolation and config.bypass_mode:
        raise ValueError(
            "proximal_interpolation=True contradicts bypass_mode=True, which uses π_rollout as π_old: set one of them"
        )
    if config.corrects_in_loss and config.needs_prompts:
        names = ", ".join(criterion.name for criterion in config.criteria if criterion.unit == "prompt")
        mode = "bypass_mode" if config.bypass_mode else "proximal_interpolation"
        raise ValueError(
            f"rollout_rs={names} needs all responses of a prompt before the loss, which {mode} does not have: "
            f"use decoupled mode ({mode}=False), or drop it"
        )
    if not config.bypass_mode:
        if config.loss_type != "ppo_clip":
            raise ValueError(
                f"loss_type={config.loss_type!r} names the objective of bypass mode: set bypass_mode=True, or drop it"
            )
        return
    if config.rollout_is is not None and not config.applies_weights:
        if config.rollout_is_batch_normalize:
            raise ValueError(
                f"rollout_is_batch_normalize=True does nothing with bypass_mode and loss_type={config.loss_type!r}, "
                f"which applies no weights: drop it, or use {_weighed_objectives()}"
            )
        if not config.rollout_is_apply:
            return
        _log.warning(
            "rollout_is=%s with bypass_mode and loss_type=%s: the weights are measured, not applied; the ratio "
            "π_θ/π_rollout is the correction",
            config.rollout_is,
            config.loss_type,
        )


def _weighed_objectives() -> str:
    names = [repr(name) for name, objective in OBJECTIVES.items() if objective.weighed_in_bypass]
    return f"loss_type={' or '.join(names)}"
