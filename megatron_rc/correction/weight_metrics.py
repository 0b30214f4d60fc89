"""Metrics of the importance weights, from sums over the whole batch; see ``docs/metrics.md``."""

from __future__ import annotations

import math

from megatron_rc.correction.header_records import BatchHeader, SharedWeights, TokenWeights, WeightSums
from megatron_rc.correction.quotients import extreme, ratio, sample_std, spread
from megatron_rc.numerics import EXP_LIMIT, NORMALIZE_LIMIT
from megatron_rc.settings.config import RolloutCorrectionConfig

_WEIGHT_QUANTILES = (25, 50, 75)


def weight_metrics(
    header: BatchHeader, sums: TokenWeights | SharedWeights, config: RolloutCorrectionConfig
) -> dict[str, float]:
    """All of the batch's importance weights, before and after their bounds, and as applied."""
    policy = header.policy
    tokens, sequences = policy.valid, policy.sequences
    extremes = policy.log_ratio_max, policy.log_ratio_min
    if isinstance(sums, SharedWeights):
        extremes = sums.log_weight_max, sums.log_weight_min
        outside = sums.tokens_above, sums.tokens_below
        raw = _moments(sums.raw, sums.raw_excess_squared, sums.raw_squared, tokens)
        bounded = _moments(sums.weight, sums.weight_excess_squared, sums.weight_squared, tokens)
    else:
        outside = sums.above, sums.below
        raw = _moments(tokens + policy.excess, policy.excess_squared, None, tokens)
        bounded = _moments(sums.weight, sums.weight_excess_squared, None, tokens)
    raw_high, raw_low = (_safe_exp(value) for value in extremes)
    high, low = _bounded_extremes(raw_high, raw_low, sum(outside), header, config)
    factor = _normalization_factor(sums) if config.rollout_is_batch_normalize else 1.0
    counted = sequences if config.rollout_is == "sequence" else tokens
    above, below = (sums.above, sums.below) if config.rollout_is == "sequence" else outside
    raw, bounded = raw | {"max": raw_high, "min": raw_low}, bounded | {"max": high, "min": low}
    applied = {name: value if name == "eff_sample_size" else value * factor for name, value in bounded.items()}
    if isinstance(sums, SharedWeights):
        # verl's extremes of sequence weights are those before any bound.
        bounded |= {"max": raw_high, "min": raw_low}
    found = {f"raw_{name}": value for name, value in raw.items()} | bounded
    found |= {f"applied_{name}": value for name, value in applied.items()}
    found |= {"ratio_fraction_high": ratio(above, counted), "ratio_fraction_low": ratio(below, counted)}
    found |= _sequence_weight_metrics(sums, sequences) | _weight_quantiles(header, sums, config)
    if config.is_mode != "truncate":
        found["oob_ratio"] = ratio(sum(outside), tokens)
    if header.masked is not None:
        found["masked_fraction"] = found["oob_ratio"]
        found["seq_masked_fraction"] = ratio(header.masked.sequences, sequences)
    if config.rollout_is_batch_normalize:
        found["batch_norm_factor"] = 1 / factor
        found["batch_norm_skipped"] = float(_mean_weight(sums) <= NORMALIZE_LIMIT)
    return {f"rollout_is_{name}": value for name, value in found.items()}


def _sequence_weight_metrics(sums: WeightSums, sequences: float) -> dict[str, float]:
    """Metrics of each sequence's mean bounded weight over its tokens."""
    return {
        "seq_mean": 1 + ratio(sums.per_sequence_excess, sequences) if sequences else 0.0,
        "seq_std": sample_std(sums.per_sequence_excess, sums.per_sequence_excess_squared, sequences),
        "seq_max": extreme(sums.per_sequence_max),
        "seq_min": extreme(sums.per_sequence_min),
        "seq_max_deviation": max(abs(sums.per_sequence_max - 1), abs(sums.per_sequence_min - 1)) if sequences else 0.0,
        "seq_fraction_high": ratio(sums.per_sequence_high, sequences),
        "seq_fraction_low": ratio(sums.per_sequence_low, sequences),
    }


def _weight_quantiles(
    header: BatchHeader, sums: TokenWeights | SharedWeights, config: RolloutCorrectionConfig
) -> dict[str, float]:
    """Quantiles of the bounded weights over the tokens, and of their means over the sequences."""
    found = {}
    for percent in _WEIGHT_QUANTILES:
        share = percent / 100
        if isinstance(sums, SharedWeights):
            found[f"p{percent:02d}"] = _weight_of(header.weight_bins[1].quantile(share))
        elif config.staleness_scale is None:
            found[f"p{percent:02d}"] = _token_quantile(header, sums, config, share)
        found[f"seq_p{percent:02d}"] = _weight_of(header.weight_bins[0].quantile(share))
    return found if header.policy.valid else dict.fromkeys(found, 0.0)


def _token_quantile(header: BatchHeader, sums: TokenWeights, config: RolloutCorrectionConfig, share: float) -> float:
    """A bounded weight rises with its ρ, but for the zeros of ``mask``, which come first."""
    lower, upper = config.is_bounds
    rank = share * header.policy.valid
    if config.is_mode == "mask":
        zeros = sums.above + sums.below
        return 0.0 if rank < zeros else min(max(_safe_exp(header.bins.value_at(rank - sums.above)), lower), upper)
    weight = min(_safe_exp(header.bins.value_at(rank)), upper)
    return max(weight, lower) if config.is_mode == "clamp" else weight


def _weight_of(log: float) -> float:
    """A weight that is not 0 has a log of at least -20."""
    return math.exp(log) if log > -EXP_LIMIT - 1 else 0.0


def _normalization_factor(sums: TokenWeights | SharedWeights) -> float:
    """1 / w̄; 1 where w̄ is not to be divided by."""
    mean = _mean_weight(sums)
    return 1 / mean if mean > NORMALIZE_LIMIT else 1.0


def _mean_weight(sums: TokenWeights | SharedWeights) -> float:
    return ratio(sums.normalize_weight, sums.normalize_count)


def _safe_exp(log: float) -> float:
    return 0.0 if math.isinf(log) else math.exp(max(-EXP_LIMIT, min(EXP_LIMIT, log)))


def _bounded_extremes(
    raw_high: float, raw_low: float, outside: float, header: BatchHeader, config: RolloutCorrectionConfig
) -> tuple[float, float]:
    """Largest and smallest weight after the bounds, 0 without valid tokens."""
    lower, upper = config.is_bounds
    if not header.policy.valid:
        return 0.0, 0.0
    if header.extremes is not None:
        low = header.extremes.weight_min + 0.0
        # Where no weight was moved by a bound, the extremes of ρ say the same, and were rounded less.
        return header.extremes.weight_max, low if config.staleness_scale or outside else raw_low
    if config.is_mode == "truncate":
        return min(raw_high, upper), min(raw_low, upper)
    return min(max(raw_high, lower), upper), min(max(raw_low, lower), upper)


def _moments(total: float, excess_squared: float, squared: float | None, count: float) -> dict[str, float]:
    """Mean, deviation and effective sample size, from Σw, Σ(w - 1)² and Σw²; None: the last follows from the others."""
    mean = ratio(total, count)
    # About 1, so that a small variance is not the difference of two large numbers.
    variance = spread(mean - 1, ratio(excess_squared, count)) ** 2 if count else 0.0
    mean_square = variance + mean**2 if squared is None else ratio(squared, count)
    # ESS = (Σw)² / (n Σw²), a fraction of the tokens.
    return {"mean": mean, "std": math.sqrt(variance), "eff_sample_size": ratio(mean**2, mean_square)}
