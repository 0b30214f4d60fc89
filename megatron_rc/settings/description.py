"""The config in words and as flags."""

from __future__ import annotations

import shlex

from megatron_rc.loss.objectives import OBJECTIVES
from megatron_rc.numerics import UNTRUNCATED
from megatron_rc.settings.fields import DEFAULTS, CorrectionFields

_BAD = {
    "error": "an error",
    "reject_token": "the token is rejected and counted",
    "reject_sequence": "its sequence is rejected and counted",
}


def describe(config: CorrectionFields) -> str:
    """The config in words, one fact a line; then its flags and the notes of a translation."""
    lines = [_mode(config), *_weights(config), *(f"rejects {criterion.describe()}" for criterion in config.criteria)]
    if config.rollout_token_veto_threshold is not None:
        verb = "counts" if config.rejecting_veto is None else "rejects"
        lines.append(
            f"{verb} sequences with a token whose ρ_t is below {config.rollout_token_veto_threshold:.10g} (veto)"
        )
    if config.staleness_scale is not None:
        scale = zip(config.staleness_scale.steps, config.staleness_scale.factors[1:], strict=True)
        steps = ", ".join(f"times {factor:.10g} from a staleness of {step} on" for step, factor in scale)
        lines.append(f"bounds of weights and rejection, in nats: {steps}")
    if not config.criteria and config.rejecting_veto is None:
        lines.append("no rejection by divergence")
    which = (
        "the accepted tokens" if config.rejection_denominator == "accepted" else "all trained tokens, rejected ones too"
    )
    lines.append(f"the loss is averaged over {which}")
    lines.append(f"a NaN, infinite or positive log-prob at a trained position: {_BAD[config.bad_log_probs]}")
    lines += [f"metrics are named {config.metric_prefix}…", f"flags: {flags_of(config)}"]
    return "\n".join([*lines, *(f"note: {note}" for note in config.notes)])


def _mode(config: CorrectionFields) -> str:
    if config.proximal_interpolation:
        return (
            "decoupled without a forward-only pass: log π_old lies between log π_rollout and log π_θ by version, "
            "ρ = π_old / π_rollout, PPO's ratio is π_θ / π_old"
        )
    if not config.bypass_mode:
        return "decoupled: π_old is computed, ρ = π_old / π_rollout, PPO's ratio is π_θ / π_old"
    return f"bypass: π_old := π_rollout, ρ = π_θ / π_rollout; {OBJECTIVES[config.loss_type].words}"


def _weights(config: CorrectionFields) -> list[str]:
    if config.level is None:
        return ["no importance weights"]
    low, high = config.is_bounds
    bounded = {
        "truncate": "not truncated" if high >= UNTRUNCATED else f"truncated at {high:.10g}",
        "clamp": f"clamped to [{low:.10g}, {high:.10g}]",
        "mask": f"0 outside [{low:.10g}, {high:.10g}]",
    }[config.is_mode]
    lines = [f"{config.level.words}, {bounded}"]
    if config.rollout_is_batch_normalize:
        unit = "tokens" if config.weighs_tokens else "sequences"
        which = "valid" if config.rollout_is_batch_normalize_scope == "all" else "accepted"
        lines.append(f"the weights are divided by their mean over the {which} {unit} of the global batch")
    if not config.rollout_is_apply:
        lines.append("the weights are measured, not applied")
    elif not config.applies_weights:
        lines.append("the weights are measured, not applied: the ratio of the loss is the correction")
    return lines


def flag_of(field: str) -> str:
    """The flag of a field."""
    return f"--{field.replace('_', '-')}"


def flags_of(config: CorrectionFields) -> str:
    """The flags that make this config: ``--rollout-is``, and each field that differs from its default."""
    words: list[str] = []
    for name, value in config.to_dict().items():
        if value == DEFAULTS[name] and name != "rollout_is":
            continue
        if isinstance(value, bool):
            words.append(flag_of(name) if value else flag_of(f"no_{name}"))
        else:
            words.append(f"{flag_of(name)}={'none' if value is None else value}")
    return shlex.join(words)
