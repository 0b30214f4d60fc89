"""Metrics from sums over the whole batch: a mean is a quotient of two sums, never a mean of means.

``docs/design.md`` begins with the words and symbols that are used here.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from megatron_rc.correction.header_fields import REWARD_SIGNS
from megatron_rc.correction.header_records import (
    BatchHeader,
    CriterionSums,
    OwnTokenTest,
    PolicySums,
    SequenceTest,
    SharedWeights,
    TokenTest,
    TokenWeights,
    WeightSums,
)
from megatron_rc.correction.histogram import quantiles
from megatron_rc.numerics import EXP_LIMIT, NORMALIZE_LIMIT
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.criterion import Criterion

# The oldest dashboards say the word twice: mismatch/mismatch_kl.
_OLDEST_PREFIX, _OLDEST_NAME = "mismatch/", "mismatch_"
_WEIGHT_QUANTILES = (25, 50, 75)


def derive_metrics(header: BatchHeader, config: RolloutCorrectionConfig) -> dict[str, float]:
    """Every metric of one rollout batch, under verl's names where it has one; see ``docs/metrics.md``.

    Returns:
        ``<metric_prefix><name>`` to a float; 0 for a batch without valid tokens (the normalisation factor is 1).
    """
    policy = _policy_metrics(header.policy)
    if config.metric_prefix == _OLDEST_PREFIX:
        policy = {_OLDEST_NAME + name: value for name, value in policy.items()}
    metrics = policy | quantiles(header.bins)
    if header.weights is not None:
        metrics |= _weight_metrics(header, header.weights, config)
    metrics |= _rejection_metrics(header, config)
    metrics |= _breakdowns(header)
    if config.bad_log_probs != "error":
        metrics["bad_log_probs"] = header.data.bad_tokens
    return {config.metric_prefix + name: value for name, value in metrics.items()}


def _ratio(numerator: float, denominator: float) -> float:
    # + 0.0 turns a negative zero into a positive one.
    return numerator / denominator + 0.0 if denominator else 0.0


def _extreme(value: float) -> float:
    return 0.0 if math.isinf(value) else value + 0.0


def _spread(mean: float, mean_square: float) -> float:
    return math.sqrt(max(mean_square - mean * mean, 0.0))


def _sample_std(total: float, total_square: float, count: float) -> float:
    """With n - 1, as verl's over sequences; 0 for fewer than two."""
    return math.sqrt(max(total_square - total * total / count, 0.0) / (count - 1)) if count > 1 else 0.0


def _policy_metrics(sums: PolicySums) -> dict[str, float]:
    tokens, sequences = sums.valid, sums.sequences
    return {
        "kl": _ratio(-sums.log_ratio, tokens),
        # E[ρ - 1 - log ρ] = E[ρ - 1] - E[log ρ]
        "k3_kl": _ratio(sums.excess - sums.log_ratio, tokens),
        "training_ppl": _ratio(sums.train_ppl, sequences),
        "training_log_ppl": _ratio(sums.train_log_ppl, sequences),
        "rollout_ppl": _ratio(sums.rollout_ppl, sequences),
        "rollout_log_ppl": _ratio(sums.rollout_log_ppl, sequences),
        "log_ppl_diff": _ratio(sums.log_ppl_diff, sequences),
        "log_ppl_abs_diff": _ratio(sums.log_ppl_abs_diff, sequences),
        "log_ppl_diff_max": _extreme(sums.log_ppl_diff_max),
        "log_ppl_diff_min": _extreme(sums.log_ppl_diff_min),
        "ppl_ratio": _ratio(sums.ppl_ratio, sequences),
        # E[ρ²] - 1 = E[(ρ - 1)²] + 2 E[ρ - 1]
        "chi2_token": _ratio(sums.excess_squared + 2 * sums.excess, tokens),
        "chi2_seq": _ratio(sums.sequence_excess_squared + 2 * sums.sequence_excess, sequences),
        "num_tokens": tokens,
        "num_sequences": sequences,
    }


def _weight_metrics(
    header: BatchHeader, sums: TokenWeights | SharedWeights, config: RolloutCorrectionConfig
) -> dict[str, float]:
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
    factor = normalization_factor(sums) if config.rollout_is_batch_normalize else 1.0
    counted = sequences if config.rollout_is == "sequence" else tokens
    above, below = (sums.above, sums.below) if config.rollout_is == "sequence" else outside
    raw, bounded = raw | {"max": raw_high, "min": raw_low}, bounded | {"max": high, "min": low}
    applied = {name: value if name == "eff_sample_size" else value * factor for name, value in bounded.items()}
    if isinstance(sums, SharedWeights):
        # verl's extremes of sequence weights are those before any bound.
        bounded |= {"max": raw_high, "min": raw_low}
    found = {f"raw_{name}": value for name, value in raw.items()} | bounded
    found |= {f"applied_{name}": value for name, value in applied.items()}
    found |= {"ratio_fraction_high": _ratio(above, counted), "ratio_fraction_low": _ratio(below, counted)}
    found |= _sequence_weight_metrics(sums, sequences) | _weight_quantiles(header, sums, config)
    if config.is_mode != "truncate":
        found["oob_ratio"] = _ratio(sum(outside), tokens)
    if header.masked is not None:
        found["masked_fraction"] = found["oob_ratio"]
        found["seq_masked_fraction"] = _ratio(header.masked.sequences, sequences)
    if config.rollout_is_batch_normalize:
        found["batch_norm_factor"] = 1 / factor
        found["batch_norm_skipped"] = float(_mean_weight(sums) <= NORMALIZE_LIMIT)
    return {f"rollout_is_{name}": value for name, value in found.items()}


def _sequence_weight_metrics(sums: WeightSums, sequences: float) -> dict[str, float]:
    """Metrics of each sequence's mean bounded weight over its tokens."""
    return {
        "seq_mean": 1 + _ratio(sums.per_sequence_excess, sequences) if sequences else 0.0,
        "seq_std": _sample_std(sums.per_sequence_excess, sums.per_sequence_excess_squared, sequences),
        "seq_max": _extreme(sums.per_sequence_max),
        "seq_min": _extreme(sums.per_sequence_min),
        "seq_max_deviation": max(abs(sums.per_sequence_max - 1), abs(sums.per_sequence_min - 1)) if sequences else 0.0,
        "seq_fraction_high": _ratio(sums.per_sequence_high, sequences),
        "seq_fraction_low": _ratio(sums.per_sequence_low, sequences),
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


def normalization_factor(sums: TokenWeights | SharedWeights) -> float:
    """1 / w̄; 1 where w̄ is not to be divided by."""
    mean = _mean_weight(sums)
    return 1 / mean if mean > NORMALIZE_LIMIT else 1.0


def _mean_weight(sums: TokenWeights | SharedWeights) -> float:
    return _ratio(sums.normalize_weight, sums.normalize_count)


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
    mean = _ratio(total, count)
    # About 1, so that a small variance is not the difference of two large numbers.
    variance = _spread(mean - 1, _ratio(excess_squared, count)) ** 2 if count else 0.0
    mean_square = variance + mean**2 if squared is None else _ratio(squared, count)
    # ESS = (Σw)² / (n Σw²), a fraction of the tokens.
    return {"mean": mean, "std": math.sqrt(variance), "eff_sample_size": _ratio(mean**2, mean_square)}


def _rejection_metrics(header: BatchHeader, config: RolloutCorrectionConfig) -> dict[str, float]:
    policy = header.policy
    tokens, sequences = policy.valid, policy.sequences
    metrics = {
        "rollout_rs_masked_fraction": _ratio(tokens - policy.accepted, tokens),
        "rollout_rs_seq_masked_fraction": _ratio(policy.sequences_with_rejected, sequences),
    }
    for criterion in config.criteria:
        found = _criterion_metrics(criterion, header.criteria[criterion.name], policy)
        metrics |= {f"rollout_rs_{criterion.name}_{name}": value for name, value in found.items()}
    of_ratios = [criterion.name for criterion in config.criteria if criterion.is_measured and criterion.bounds.on_ratio]
    if len(of_ratios) == 1:
        # As verl named them in 2025-11, when there was one criterion.
        for now, then in (("rho_fraction_above", "high"), ("rho_fraction_below", "low")):
            metrics[f"rollout_rs_ratio_fraction_{then}"] = metrics[f"rollout_rs_{of_ratios[0]}_{now}"]
    if header.veto is not None:
        metrics["rollout_is_veto_fraction"] = _ratio(header.veto.vetoed, sequences)
        metrics["rollout_is_catastrophic_token_fraction"] = _ratio(header.veto.catastrophic, tokens)
    return metrics


def _criterion_metrics(criterion: Criterion, sums: CriterionSums, policy: PolicySums) -> dict[str, float]:
    metrics = {
        "masked_fraction": _ratio(sums.rejected, policy.valid),
        "seq_masked_fraction": _ratio(sums.sequences_rejected, policy.sequences),
    }
    return (
        metrics | _statistic_metrics(criterion, sums, policy)
        if isinstance(sums, (SequenceTest, TokenTest))
        else metrics
    )


def _statistic_metrics(criterion: Criterion, sums: SequenceTest | TokenTest, policy: PolicySums) -> dict[str, float]:
    """The statistic that a criterion tests; where its bounds are on ρ that is -log ρ, as verl's: the sides turn."""
    tokens, sequences = policy.valid, policy.sequences
    turned = criterion.bounds.on_ratio
    sign = -1.0 if turned else 1.0

    def extremes(largest: float, smallest: float) -> tuple[float, float]:
        top, bottom = _extreme(largest), _extreme(smallest)
        return (-bottom + 0.0, -top + 0.0) if turned else (top, bottom)

    sequence_above, sequence_below = (_ratio(side, sequences) for side in (sums.statistic_high, sums.statistic_low))
    sequence_top, sequence_bottom = extremes(sums.statistic_max, sums.statistic_min)
    above, below, top, bottom = sequence_above, sequence_below, sequence_top, sequence_bottom
    if isinstance(sums, TokenTest):
        above, below = _ratio(sums.high, tokens), _ratio(sums.rejected - sums.high, tokens)
        tested = (
            (sums.tested_max, sums.tested_min)
            if isinstance(sums, OwnTokenTest)
            else (policy.log_ratio_max, policy.log_ratio_min)
        )
        top, bottom = extremes(*tested)
    metrics = {
        "mean": sign * _ratio(sums.total, tokens) + 0.0,
        "std": _spread(_ratio(sums.clamped, tokens), _ratio(sums.clamped_squared, tokens)),
        "max": top,
        "min": bottom,
        "fraction_high": below if turned else above,
        "fraction_low": above if turned else 0.0,
        "seq_mean": sign * _ratio(sums.statistic, sequences) + 0.0,
        "seq_std": _sample_std(sums.statistic, sums.statistic_squared, sequences),
        "seq_max": sequence_top,
        "seq_min": sequence_bottom,
        "seq_max_deviation": max(abs(sequence_top), abs(sequence_bottom)),
        "seq_fraction_high": sequence_below if turned else sequence_above,
    }
    if turned:
        metrics |= {"seq_fraction_low": sequence_above, "rho_fraction_above": above, "rho_fraction_below": below}
    return metrics


def _breakdowns(header: BatchHeader) -> dict[str, float]:
    """Rejected shares by length, by the reward's sign and by staleness; only buckets that hold tokens."""
    names: tuple[tuple[list[list[float]], Callable[[int], str]], ...] = (
        (header.by_length, lambda bucket: f"length_{2**bucket}_{2 ** (bucket + 1) - 1}"),
        (header.by_reward, lambda bucket: f"reward_{REWARD_SIGNS[bucket]}"),
        (header.by_staleness, lambda bucket: f"staleness_{bucket}"),
    )
    metrics = {}
    for table, label in names:
        total = sum(row[0] for row in table)
        for bucket, (tokens, rejected, *log_ratio) in enumerate(table):
            if not tokens:
                continue
            metrics[f"rollout_rs_masked_fraction_{label(bucket)}"] = rejected / tokens
            if log_ratio:
                metrics[f"{label(bucket)}_token_fraction"] = tokens / total
                metrics[f"{label(bucket)}_kl"] = -log_ratio[0] / tokens + 0.0
    return metrics
