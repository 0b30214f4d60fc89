"""Metrics of the importance weights, from sums over the whole batch; see ``docs/metrics.md``."""

from __future__ import annotations

import math

from megatron_rc.measures.header import BatchHeader, MeanWeightSums, WeightSums
from megatron_rc.measures.histogram import Histogram
from megatron_rc.measures.quotients import extreme, ratio, sample_std, spread
from megatron_rc.numerics import EXP_LIMIT, NORMALIZE_LIMIT
from megatron_rc.settings.config import RolloutCorrectionConfig

_WEIGHT_QUANTILES = (25, 50, 75)


def weight_metrics(
    header: BatchHeader[float], sums: WeightSums[float], config: RolloutCorrectionConfig
) -> dict[str, float]:
    """All of the batch's importance weights, before and after their bounds, and as applied."""
    tokens, sequences = header.policy.valid, header.policy.sequences
    mean = ratio(header.denominators.total_weight, header.denominators.weight_count)
    factor = 1.0 if not config.rollout_is_batch_normalize or mean <= NORMALIZE_LIMIT else 1 / mean
    outside = sums.tokens_above + sums.tokens_below
    extremes = {"max": _safe_exp(sums.log_raw_max), "min": _safe_exp(sums.log_raw_min)}
    raw = _moments(sums.raw, sums.raw_excess_squared, sums.raw_squared, tokens) | extremes
    bounded = _moments(sums.bounded, sums.bounded_excess_squared, sums.bounded_squared, tokens)
    bounded |= {"max": extreme(sums.bounded_max), "min": extreme(sums.bounded_min)}
    applied = {name: value if name == "eff_sample_size" else value * factor for name, value in bounded.items()}
    if config.rollout_is != "token":
        # verl's extremes of sequence weights are those before any bound.
        bounded |= extremes
    found = {f"raw_{name}": value for name, value in raw.items()} | bounded
    found |= {f"applied_{name}": value for name, value in applied.items()}
    of_sequences = config.rollout_is == "sequence"
    above, below = (
        (sums.sequences_above, sums.sequences_below) if of_sequences else (sums.tokens_above, sums.tokens_below)
    )
    counted = sequences if of_sequences else tokens
    found |= {"ratio_fraction_high": ratio(above, counted), "ratio_fraction_low": ratio(below, counted)}
    found |= _mean_weight_metrics(sums.means, sequences) | _weight_quantiles(header, sums, config)
    if config.is_mode != "truncate":
        found["oob_ratio"] = ratio(outside, tokens)
    if config.is_mode == "mask":
        found["masked_fraction"] = found["oob_ratio"]
        found["seq_masked_fraction"] = ratio(sums.sequences_outside, sequences)
    if config.rollout_is_batch_normalize:
        found["batch_norm_factor"] = 1 / factor
        found["batch_norm_skipped"] = float(mean <= NORMALIZE_LIMIT)
    return {f"rollout_is_{name}": value for name, value in found.items()}


def _mean_weight_metrics(sums: MeanWeightSums[float], sequences: float) -> dict[str, float]:
    """Metrics of each sequence's mean bounded weight over its tokens."""
    return {
        "seq_mean": 1 + ratio(sums.excess, sequences) if sequences else 0.0,
        "seq_std": sample_std(sums.excess, sums.excess_squared, sequences),
        "seq_max": extreme(sums.max),
        "seq_min": extreme(sums.min),
        "seq_max_deviation": max(abs(sums.max - 1), abs(sums.min - 1)) if sequences else 0.0,
        "seq_fraction_high": ratio(sums.high, sequences),
        "seq_fraction_low": ratio(sums.low, sequences),
    }


def _weight_quantiles(
    header: BatchHeader[float], sums: WeightSums[float], config: RolloutCorrectionConfig
) -> dict[str, float]:
    """Quantiles of the bounded weights over the tokens, and of their means over the sequences."""
    found = {}
    per_sequence, *per_token = map(Histogram, sums.histograms)
    for percent in _WEIGHT_QUANTILES:
        share = percent / 100
        if per_token:
            found[f"p{percent:02d}"] = _weight_of(per_token[0].quantile(share))
        elif config.staleness_scale is None:
            found[f"p{percent:02d}"] = _token_quantile(header, sums, config, share)
        found[f"seq_p{percent:02d}"] = _weight_of(per_sequence.quantile(share))
    return found if header.policy.valid else dict.fromkeys(found, 0.0)


def _token_quantile(
    header: BatchHeader[float], sums: WeightSums[float], config: RolloutCorrectionConfig, share: float
) -> float:
    """A bounded weight rises with its ρ, except for the zeros of ``mask``, which come first."""
    lower, upper = config.is_bounds
    bins = Histogram(header.bins)
    rank = share * header.policy.valid
    if config.is_mode == "mask":
        zeros = sums.tokens_above + sums.tokens_below
        return 0.0 if rank < zeros else min(max(_safe_exp(bins.value_at(rank - sums.tokens_above)), lower), upper)
    weight = min(_safe_exp(bins.value_at(rank)), upper)
    return max(weight, lower) if config.is_mode == "clamp" else weight


def _weight_of(log: float) -> float:
    """A weight that is not 0 has a log of at least -20."""
    return math.exp(log) if log > -EXP_LIMIT - 1 else 0.0


def _safe_exp(log: float) -> float:
    return 0.0 if math.isinf(log) else math.exp(max(-EXP_LIMIT, min(EXP_LIMIT, log)))


def _moments(total: float, excess_squared: float, squared: float | None, count: float) -> dict[str, float]:
    """Mean, deviation and effective sample size, from Σ w, Σ (w - 1)² and Σ w²; None: it follows from the others."""
    mean = ratio(total, count)
    # About 1, so that a small variance is not the difference of two large numbers.
    variance = spread(mean - 1, ratio(excess_squared, count)) ** 2 if count else 0.0
    mean_square = variance + mean**2 if squared is None else ratio(squared, count)
    # ESS = (Σ w)² / (n Σ w²), a fraction of the tokens.
    return {"mean": mean, "std": math.sqrt(variance), "eff_sample_size": ratio(mean**2, mean_square)}
