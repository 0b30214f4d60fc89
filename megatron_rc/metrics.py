"""Metrics from sums over the whole batch: a mean is a quotient of two sums, never a mean of means."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megatron_rc.config import RolloutCorrectionConfig

PREFIX = "rollout_corr/"


def derive_metrics(
    sums: Mapping[str, float], maxima: Mapping[str, float], config: RolloutCorrectionConfig
) -> dict[str, float]:
    """Every metric of one rollout batch, under verl's names where it has one; see ``docs/metrics.md``.

    Args:
        sums: the global batch sums by name.
        maxima: the global maxima by name; a minimum is the largest negative.
        config: decides which metrics there are.

    Returns:
        ``rollout_corr/<name>`` to a float; 0 for a batch without counted tokens.
    """
    metrics = _policy_metrics(sums, maxima)
    if config.rollout_is is not None:
        metrics |= _weight_metrics("rollout_is_raw_", "raw", sums, maxima)
        metrics |= _weight_metrics("rollout_is_", "weight", sums, maxima)
        metrics["rollout_is_ratio_fraction_high"] = _ratio(sums["above"], sums["tokens"])
        metrics["rollout_is_ratio_fraction_low"] = _ratio(sums["below"], sums["tokens"])
    metrics |= _rejection_metrics(sums, config)
    return {PREFIX + name: value for name, value in metrics.items()}


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0


def _extreme(value: float) -> float:
    return 0.0 if math.isinf(value) else value


def _policy_metrics(sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
    tokens, sequences = sums["tokens"], sums["sequences"]
    return {
        "kl": -_ratio(sums["log_ratio"], tokens) or 0.0,
        "k3_kl": _ratio(sums["k3"], tokens),
        "training_ppl": _ratio(sums["train_ppl"], sequences),
        "training_log_ppl": _ratio(sums["train_log_ppl"], sequences),
        "rollout_ppl": _ratio(sums["rollout_ppl"], sequences),
        "rollout_log_ppl": _ratio(sums["rollout_log_ppl"], sequences),
        "log_ppl_diff": _ratio(sums["log_ppl_diff"], sequences),
        "log_ppl_abs_diff": _ratio(sums["log_ppl_abs_diff"], sequences),
        "log_ppl_diff_max": _extreme(maxima["log_ppl_diff"]),
        "log_ppl_diff_min": _extreme(-maxima["-log_ppl_diff"]),
        "ppl_ratio": _ratio(sums["ppl_ratio"], sequences),
        # E[ρ²] - 1 = E[(ρ - 1)²] + 2 E[ρ - 1]
        "chi2_token": _ratio(sums["excess_squared"] + 2 * sums["excess"], tokens),
        "chi2_seq": _ratio(sums["sequence_excess_squared"] + 2 * sums["sequence_excess"], sequences),
        "num_tokens": tokens,
        "num_sequences": sequences,
    }


def _weight_metrics(prefix: str, name: str, sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
    tokens = sums["tokens"]
    mean = _ratio(sums[name], tokens)
    excess_squared = _ratio(sums[f"{name}_excess_squared"], tokens)
    variance = max(excess_squared - (mean - 1) ** 2, 0.0)
    return {
        f"{prefix}mean": mean,
        f"{prefix}std": math.sqrt(variance),
        f"{prefix}min": _extreme(-maxima[f"-{name}"]),
        f"{prefix}max": _extreme(maxima[name]),
        # ESS = (Σw)² / (n Σw²) = mean² / (variance + mean²), a fraction of the tokens.
        f"{prefix}eff_sample_size": _ratio(mean**2, variance + mean**2),
    }


def _rejection_metrics(sums: Mapping[str, float], config: RolloutCorrectionConfig) -> dict[str, float]:
    tokens, sequences = sums["tokens"], sums["sequences"]
    metrics = {
        "rollout_rs_masked_fraction": _ratio(tokens - sums["accepted_tokens"], tokens),
        "rollout_rs_seq_masked_fraction": _ratio(sums["sequences_with_rejected"], sequences),
    }
    for criterion in config.criteria:
        rejected = tokens - sums[f"accepted_by_{criterion.name}"]
        metrics[f"rollout_rs_{criterion.name}_masked_fraction"] = _ratio(rejected, tokens)
    return metrics
