"""Metrics of the importance weights, from sums over the whole batch; see ``docs/metrics.md``."""

from __future__ import annotations

import math

from megatron_rc.measures.header import BatchHeader, WeightMoments, WeightSums
from megatron_rc.numerics import EXP_LIMIT, NORMALIZE_LIMIT
from megatron_rc.settings.config import RolloutCorrectionConfig


def weight_metrics(
    header: BatchHeader[float], sums: WeightSums[float], config: RolloutCorrectionConfig
) -> dict[str, float]:
    """All of the batch's importance weights, before and after their bounds, and as applied."""
    tokens, sequences = header.policy.valid, header.policy.sequences
    mean = ratio(header.denominators.total_weight, header.denominators.weight_count)
    factor = 1.0 if not config.rollout_is_batch_normalize or mean <= NORMALIZE_LIMIT else 1 / mean
    extremes = {"max": _safe_exp(sums.raw.max), "min": _safe_exp(sums.raw.min)}
    raw = weight_moments(sums.raw, tokens) | extremes
    bounded = weight_moments(sums.bounded, tokens)
    bounded |= {"max": extreme(sums.bounded.max), "min": extreme(sums.bounded.min)}
    applied = {name: value if name == "eff_sample_size" else value * factor for name, value in bounded.items()}
    if not config.weighs_tokens:
        # verl's extremes of sequence weights are those before any bound.
        bounded |= extremes
    found = {f"raw_{name}": value for name, value in raw.items()} | bounded
    found |= {f"applied_{name}": value for name, value in applied.items()} | _mean_metrics(sums, sequences)
    above, below = ratio(sums.above, tokens), ratio(sums.below, tokens)
    if config.rollout_is == "sequence":
        above, below = ratio(sums.mean_above, sequences), ratio(sums.mean_below, sequences)
    found |= {"ratio_fraction_high": above, "ratio_fraction_low": below}
    outside = ratio(sums.above + sums.below, tokens)
    if config.is_mode != "truncate":
        found["oob_ratio"] = outside
    if config.is_mode == "mask":
        found |= {"masked_fraction": outside, "seq_masked_fraction": ratio(sums.outside, sequences)}
    if config.rollout_is_batch_normalize:
        found |= {"batch_norm_factor": 1 / factor, "batch_norm_skipped": float(mean <= NORMALIZE_LIMIT)}
    return {f"rollout_is_{name}": value for name, value in found.items()}


def _mean_metrics(sums: WeightSums[float], sequences: float) -> dict[str, float]:
    """Metrics of the mean weight of each sequence's tokens."""
    mean = sums.mean
    return {
        "seq_mean": ratio(mean.total, sequences),
        "seq_std": sample_std(mean.total - sequences, mean.excess_squared, sequences),
        "seq_max": extreme(mean.max),
        "seq_min": extreme(mean.min),
        "seq_max_deviation": max(abs(mean.max - 1), abs(mean.min - 1)) if sequences else 0.0,
        "seq_fraction_high": ratio(sums.mean_above, sequences),
        "seq_fraction_low": ratio(sums.mean_below, sequences),
    }


def _safe_exp(log: float) -> float:
    return 0.0 if math.isinf(log) else math.exp(max(-EXP_LIMIT, min(EXP_LIMIT, log)))


def ratio(numerator: float, denominator: float) -> float:
    """The quotient; 0 if nothing was counted."""
    # + 0.0 turns a negative zero into a positive one.
    return numerator / denominator + 0.0 if denominator else 0.0


def extreme(value: float) -> float:
    """A largest or smallest value; 0 of no values."""
    return 0.0 if math.isinf(value) else value + 0.0


def spread(mean: float, mean_square: float) -> float:
    """The standard deviation."""
    return math.sqrt(max(mean_square - mean * mean, 0.0))


def sample_std(total: float, total_square: float, count: float) -> float:
    """The standard deviation with n - 1, as verl's over sequences; 0 for fewer than two."""
    return math.sqrt(max(total_square - total * total / count, 0.0) / (count - 1)) if count > 1 else 0.0


def weight_moments(sums: WeightMoments[float], count: float) -> dict[str, float]:
    """Mean, standard deviation and effective sample size of so many weights."""
    mean = ratio(sums.total, count)
    # About 1, so that a small variance is not the difference of two large numbers.
    std = spread(mean - 1, ratio(sums.excess_squared, count)) if count else 0.0
    mean_square = std**2 + mean**2 if sums.squared is None else ratio(sums.squared, count)
    # ESS = (Σ w)² / (n Σ w²), a fraction of the tokens.
    return {"mean": mean, "std": std, "eff_sample_size": ratio(mean**2, mean_square)}
