"""The config in words and as flags."""

from __future__ import annotations

import shlex

from megatron_rc.loss.objectives import OBJECTIVES
from megatron_rc.numerics import UNTRUNCATED
from megatron_rc.settings.fields import DEFAULTS, CorrectionFields

_EFFECT_OF_BAD_LOG_PROBS = {
    "error": "an error",
    "reject_token": "the token is rejected and counted",
    "reject_sequence": "its sequence is rejected and counted",
}


def describe(config: CorrectionFields) -> str:
    """Return the config in words, one fact a line; then its flags and the notes of a translation."""
    lines = [_mode(config)]
    lines += _weights(config)
    lines += _rejection(config)
    lines += [
        f"a NaN, infinite or positive log-prob at a trained position: {_EFFECT_OF_BAD_LOG_PROBS[config.bad_log_probs]}",
        f"metrics are named {config.metric_prefix}…",
        f"flags: {flags_of(config)}",
    ]
    lines += [f"note: {note}" for note in config.notes]
    return "\n".join(lines)


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
    """Return the lines about the importance weights."""
    if config.level is None:
        return ["no importance weights"]

    bounds = config.weight_bounds
    interval = f"[{bounds.lower:.10g}, {bounds.upper:.10g}]"
    if bounds.mode == "clamp":
        treatment = f"clamped to {interval}"
    elif bounds.mode == "mask":
        treatment = f"0 outside {interval}"
    elif bounds.upper >= UNTRUNCATED:
        treatment = "not truncated"
    else:
        treatment = f"truncated at {bounds.upper:.10g}"
    lines = [f"{config.level.words}, {treatment}"]

    if config.rollout_is_batch_normalize:
        unit = "tokens" if config.weighs_tokens else "sequences"
        which = "valid" if config.rollout_is_batch_normalize_scope == "all" else "accepted"
        lines.append(f"the weights are divided by their mean over the {which} {unit} of the global batch")
    if not config.rollout_is_apply:
        lines.append("the weights are measured, not applied")
    elif not config.applies_weights:
        lines.append("the weights are measured, not applied: the ratio of the loss is the correction")
    return lines


def _rejection(config: CorrectionFields) -> list[str]:
    """Return the lines about the criteria, the veto, their bounds by staleness, and the denominator of the loss."""
    lines = [f"rejects {criterion.describe()}" for criterion in config.criteria]

    veto = config.rollout_token_veto_threshold
    if veto is not None:
        verb = "counts" if config.rejecting_veto is None else "rejects"
        lines.append(f"{verb} sequences with a token whose ρ_t is below {veto:.10g} (veto)")

    scale = config.staleness_scale
    if scale is not None:
        steps = [
            f"times {factor:.10g} from a staleness of {step} on"
            for step, factor in zip(scale.steps, scale.factors[1:], strict=True)
        ]
        lines.append(f"bounds of weights and rejection, in nats: {', '.join(steps)}")

    if not config.criteria and config.rejecting_veto is None:
        lines.append("no rejection by divergence")

    if config.rejection_denominator == "accepted":
        lines.append("the loss is averaged over the accepted tokens")
    else:
        lines.append("the loss is averaged over all trained tokens, rejected ones too")
    return lines


def flag_of(field: str) -> str:
    """Return the flag of a field: ``--rollout-is`` for ``rollout_is``."""
    return f"--{field.replace('_', '-')}"


def flags_of(config: CorrectionFields) -> str:
    """Return the flags that make this config: ``--rollout-is``, and each field that differs from its default."""
    flags: list[str] = []
    for name, value in config.to_dict().items():
        if value == DEFAULTS[name] and name != "rollout_is":
            continue
        if isinstance(value, bool):
            flags.append(flag_of(name) if value else flag_of(f"no_{name}"))
        else:
            flags.append(f"{flag_of(name)}={'none' if value is None else value}")
    return shlex.join(flags)
