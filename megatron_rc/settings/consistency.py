"""Checks of a correction's settings, one by one and in combination; an error names field, value and remedy."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from megatron_rc.loss.objectives import OBJECTIVES
from megatron_rc.parallel.arguments import one_of
from megatron_rc.settings.bounds import check_positive
from megatron_rc.settings.fields import DEFAULTS, FIELDS, SWITCHES, CorrectionFields, choices_of
from megatron_rc.settings.levels import LEVELS

# Fields that describe the weights: without ``rollout_is`` there are none, and these fields do nothing.
OF_WEIGHTS = ("rollout_is_threshold", "rollout_is_threshold_lower", "rollout_is_mode", "rollout_is_apply")
_log = logging.getLogger("megatron_rc")


def check_values(config: CorrectionFields) -> None:
    """Raise ValueError for a value that its field never takes, whatever the other fields are.

    Thresholds that are texts, such as "0.5_2.0", are not parsed here: the config's properties parse them.
    """
    for name in FIELDS:
        choices = choices_of(name)
        if choices is not None:
            one_of(name, getattr(config, name), choices)
    for name in SWITCHES:
        if not isinstance(getattr(config, name), bool):
            raise ValueError(f"{name}={getattr(config, name)!r} must be true or false")

    if not isinstance(config.metric_prefix, str):
        raise ValueError(f"metric_prefix={config.metric_prefix!r} must be a text, for example 'rollout_corr/'")
    if config.rollout_token_veto_threshold is not None:
        check_positive("rollout_token_veto_threshold", config.rollout_token_veto_threshold)


def check_idle(config: CorrectionFields) -> None:
    """Raise ValueError for a field that is set (not its default) but has no effect with the other fields."""
    fields = config.to_dict()
    for name, reason in idle_fields(fields).items():
        if fields[name] != DEFAULTS[name]:
            raise ValueError(f"{name}={fields[name]!r} {reason}")


def idle_fields(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields that have no effect with the values of the others: by name, the reason and the remedy.

    Fields with their default value are returned too.

    Args:
        fields: the value of every field, by name.
    """
    idle: dict[str, str] = {}

    if fields["rollout_is"] is None:
        for name in (*OF_WEIGHTS, "rollout_is_batch_normalize"):
            idle[name] = f"does nothing without rollout_is: set rollout_is to {', '.join(LEVELS)}, or drop it"
    elif not fields["rollout_is_apply"]:
        idle["rollout_is_batch_normalize"] = (
            "does nothing with rollout_is_apply=False, which applies no weights: drop one"
        )

    if not fields["bypass_mode"]:
        idle["loss_type"] = "names the objective of bypass mode: set bypass_mode=True, or drop it"
    else:
        idle["proximal_interpolation"] = "contradicts bypass_mode=True, which uses π_rollout as π_old: set one of them"
        weighed = [name for name, objective in OBJECTIVES.items() if objective.weighed_in_bypass]
        if fields["loss_type"] not in weighed:
            idle.setdefault(
                "rollout_is_batch_normalize",
                f"does nothing with bypass_mode and loss_type={fields['loss_type']!r}, which applies no weights: drop "
                f"it, or use loss_type={' or '.join(map(repr, weighed))}",
            )

    if not fields["rollout_is_batch_normalize"]:
        idle["rollout_is_batch_normalize_scope"] = (
            "does nothing without rollout_is_batch_normalize: set that too, or drop it"
        )

    if "_" in str(fields["rollout_is_threshold"]):
        idle.setdefault(
            "rollout_is_threshold_lower",
            f"does nothing: rollout_is_threshold={fields['rollout_is_threshold']!r} has a lower bound already: drop "
            "one of them",
        )
    elif fields["rollout_is_mode"] in (None, "truncate"):
        idle.setdefault(
            "rollout_is_threshold_lower",
            "does nothing with rollout_is_mode='truncate': set the mode to mask or clamp, or drop it",
        )
    return idle


def check_together(config: CorrectionFields) -> None:
    """Raise ValueError for fields that contradict each other; log a warning if weights are measured, not applied."""
    _check_staleness_scale(config)
    _check_following_criteria(config)
    if config.corrects_in_loss:
        check_prompts(config, "bypass_mode" if config.bypass_mode else "proximal_interpolation")

    expects_weights = config.level is not None and config.rollout_is_apply
    if config.bypass_mode and expects_weights and not config.applies_weights:
        _log.warning(
            "rollout_is=%s with bypass_mode and loss_type=%s: the weights are measured, not applied; the ratio "
            "π_θ/π_rollout is the correction",
            config.rollout_is,
            config.loss_type,
        )


def check_prompts(config: CorrectionFields, mode: str) -> None:
    """Raise ValueError for criteria that test prompts if the correction is computed inside the loss.

    Args:
        config: the settings.
        mode: the setting that moves the correction into the loss, for the error message.
    """
    if config.needs_prompts:
        names = ", ".join(criterion.name for criterion in config.criteria if criterion.unit == "prompt")
        raise ValueError(
            f"rollout_rs={names} needs all responses of a prompt before the loss, which {mode} does not have: "
            f"use {mode}=False, or drop it"
        )


def _check_following_criteria(config: CorrectionFields) -> None:
    """Raise ValueError if nothing rejects except criteria that count the rejections of other criteria.

    A criterion with ``follows_others`` rejects all responses to a prompt because of how many of them the other criteria
    reject. Alone it would never reject anything.
    """
    if not config.criteria or config.rejects_without_criteria:
        return
    if all(criterion.follows_others for criterion in config.criteria):
        raise ValueError(
            f"rollout_rs={config.rollout_rs!r} tests the rejection by other criteria: name at least one more"
        )


def _check_staleness_scale(config: CorrectionFields) -> None:
    """Raise ValueError if ``rollout_staleness_scale`` has no bound to scale, or one that it cannot scale.

    The scale multiplies a bound by a factor for the staleness of a token, or of the oldest token of a sequence. A turn,
    a prompt, and a weight that combines several tokens have no such staleness.
    """
    if config.staleness_scale is None:
        return
    setting = f"rollout_staleness_scale={config.rollout_staleness_scale!r}"
    with_bound = [criterion for criterion in config.criteria if criterion.bounds.takes_threshold]

    if config.rollout_is is None and not with_bound:
        raise ValueError(
            f"{setting} does nothing without bounds: set rollout_is, or a criterion in rollout_rs that takes a bound"
        )
    if config.weighs_tokens and not config.weighs_single_tokens:
        raise ValueError(
            f"{setting}: rollout_is={config.rollout_is!r} combines tokens of different staleness in one weight: use "
            "the levels token, sequence or geometric, or drop the scale"
        )
    for criterion in with_bound:
        if criterion.unit in ("turn", "prompt"):
            raise ValueError(
                f"{setting}: {criterion.name} tests a {criterion.unit}, whose tokens differ in staleness: use a "
                "criterion of tokens or sequences, or drop the scale"
            )
