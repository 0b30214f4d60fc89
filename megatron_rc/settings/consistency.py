"""Checks of settings, alone and together; each error names the field and the remedy."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from megatron_rc.loss.objectives import OBJECTIVES
from megatron_rc.parallel.arguments import one_of
from megatron_rc.settings.bounds import check_positive
from megatron_rc.settings.fields import DEFAULTS, SWITCHES, CorrectionFields
from megatron_rc.settings.levels import LEVELS

OF_WEIGHTS = ("rollout_is_threshold", "rollout_is_threshold_lower", "rollout_is_mode", "rollout_is_apply")
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "rollout_is": (None, *LEVELS),
    "rollout_is_mode": (None, "truncate", "clamp", "mask"),
    "rollout_is_batch_normalize_scope": ("all", "accepted"),
    "rejection_denominator": ("accepted", "original"),
    "bad_log_probs": ("error", "reject_token", "reject_sequence"),
}
_log = logging.getLogger("megatron_rc")
_NORMALIZE, _LOWER = "rollout_is_batch_normalize", "rollout_is_threshold_lower"


def idle(fields: Mapping[str, Any]) -> dict[str, str]:
    """The fields that do nothing beside the others, each with the words of an error."""
    found: dict[str, str] = {}
    if fields["rollout_is"] is None:
        remedy = f"set rollout_is to {', '.join(LEVELS)}, or drop it"
        found = dict.fromkeys((*OF_WEIGHTS, _NORMALIZE), f"does nothing without rollout_is: {remedy}")
    if not fields["rollout_is_apply"]:
        found.setdefault(_NORMALIZE, "does nothing with rollout_is_apply=False, which applies no weights: drop one")
    if fields["bypass_mode"]:
        found["proximal_interpolation"] = "contradicts bypass_mode=True, which uses π_rollout as π_old: set one of them"
        weighed = [name for name, objective in OBJECTIVES.items() if objective.weighed_in_bypass]
        if fields["loss_type"] not in weighed:
            loss, remedy = f"loss_type={fields['loss_type']!r}", f"loss_type={' or '.join(map(repr, weighed))}"
            words = f"does nothing with bypass_mode and {loss}, which applies no weights: drop it, or use {remedy}"
            found.setdefault(_NORMALIZE, words)
    else:
        found["loss_type"] = "names the objective of bypass mode: set bypass_mode=True, or drop it"
    if not fields[_NORMALIZE]:
        found[f"{_NORMALIZE}_scope"] = f"does nothing without {_NORMALIZE}: set that too, or drop it"
    if "_" in str(fields["rollout_is_threshold"]):
        pair = f"rollout_is_threshold={fields['rollout_is_threshold']!r}"
        found.setdefault(_LOWER, f"does nothing: {pair} has a lower bound already: drop one of them")
    elif fields["rollout_is_mode"] in (None, "truncate"):
        words = "does nothing with rollout_is_mode='truncate': set the mode to mask or clamp, or drop it"
        found.setdefault(_LOWER, words)
    return found


def check_idle(config: CorrectionFields) -> None:
    """Raise ValueError for a field that is given and does nothing beside the others."""
    fields = config.to_dict()
    for name, words in idle(fields).items():
        if fields[name] != DEFAULTS[name]:
            raise ValueError(f"{name}={fields[name]!r} {words}")


def check_values(config: CorrectionFields) -> None:
    """Raise ValueError for a value that its field does not take."""
    for name, allowed in _CHOICES.items():
        one_of(name, getattr(config, name), allowed)
    one_of("loss_type", config.loss_type, tuple(OBJECTIVES))
    for name in SWITCHES:
        if not isinstance(getattr(config, name), bool):
            raise ValueError(f"{name}={getattr(config, name)!r} must be true or false")
    if not isinstance(config.metric_prefix, str):
        raise ValueError(f"metric_prefix={config.metric_prefix!r} must be a text, for example 'rollout_corr/'")
    if config.rollout_token_veto_threshold is not None:
        check_positive("rollout_token_veto_threshold", config.rollout_token_veto_threshold)


def check_together(config: CorrectionFields) -> None:
    """Raise ValueError for fields that contradict each other, from fields and derived values."""
    _check_scale(config)
    criteria = config.criteria
    if criteria and all(one.follows_others for one in criteria) and not config.rejects_without_criteria:
        raise ValueError(
            f"rollout_rs={config.rollout_rs!r} tests the rejection by other criteria: name at least one more"
        )
    _check_mode(config)


def _check_scale(config: CorrectionFields) -> None:
    if config.staleness_scale is None:
        return
    given = f"rollout_staleness_scale={config.rollout_staleness_scale!r}"
    if config.rollout_is is None and not any(criterion.bounds.takes_threshold for criterion in config.criteria):
        raise ValueError(
            f"{given} does nothing without bounds: set rollout_is, or a criterion in rollout_rs that takes a bound"
        )
    if config.weighs_tokens and not config.weighs_single_tokens:
        raise ValueError(
            f"{given}: a weight of rollout_is={config.rollout_is!r} is of several tokens, which differ in staleness: "
            "use the levels token, sequence or geometric, or drop the scale"
        )
    parts = {"turn": "turns, whose tokens", "prompt": "all responses of a prompt, which"}
    for criterion in config.criteria:
        if criterion.unit in parts and criterion.bounds.takes_threshold:
            raise ValueError(
                f"{given}: {criterion.name} tests {parts[criterion.unit]} differ in staleness: use a criterion of "
                "tokens or sequences, or drop the scale"
            )


def check_prompts(config: CorrectionFields, mode: str) -> None:
    """Raise ValueError for criteria of prompts beside a setting that computes the correction inside the loss."""
    if config.needs_prompts:
        names = ", ".join(criterion.name for criterion in config.criteria if criterion.unit == "prompt")
        raise ValueError(
            f"rollout_rs={names} needs all responses of a prompt before the loss, which {mode} does not have: "
            f"use {mode}=False, or drop it"
        )


def _check_mode(config: CorrectionFields) -> None:
    if config.corrects_in_loss:
        check_prompts(config, "bypass_mode" if config.bypass_mode else "proximal_interpolation")
    if config.bypass_mode and config.rollout_is is not None and config.rollout_is_apply and not config.applies_weights:
        _log.warning(
            "rollout_is=%s with bypass_mode and loss_type=%s: the weights are measured, not applied; the ratio "
            "π_θ/π_rollout is the correction",
            config.rollout_is,
            config.loss_type,
        )
