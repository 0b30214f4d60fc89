"""Metrics from sums over the whole batch: a mean is a quotient of two sums, never a mean of means."""

from __future__ import annotations

import math
from collections.abc import Callable

from megatron_rc.measures.header import (
    BatchHeader,
    Breakdowns,
    CriterionSums,
    PolicySums,
    SampleSums,
    StatisticSums,
    TokenSums,
    WeightMoments,
    WeightSums,
)
from megatron_rc.measures.histogram import derive_quantiles
from megatron_rc.measures.measure import REWARD_SIGNS
from megatron_rc.numerics import EXP_LIMIT, LOG_WEIGHT_FLOOR, NORMALIZE_LIMIT
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.criterion import Criterion

# The oldest dashboards say the word twice: mismatch/mismatch_kl.
_OLDEST_PREFIX, _OLDEST_NAME = "mismatch/", "mismatch_"


def derive_metrics(header: BatchHeader[float], config: RolloutCorrectionConfig) -> dict[str, float]:
    """Every metric of one rollout batch, under verl's names if it has one; see ``docs/metrics.md``.

    Returns:
        ``<metric_prefix><name>`` to a float; 0 for a batch without valid tokens (the normalisation factor is 1).
    """
    policy = _policy_metrics(header.policy, header.tokens)
    if config.metric_prefix == _OLDEST_PREFIX:
        policy = {_OLDEST_NAME + name: value for name, value in policy.items()}
    metrics = policy | derive_quantiles(header, config)
    if header.weights is not None:
        metrics |= weight_metrics(header, header.weights, config)
    metrics |= _rejection_metrics(header, config)
    metrics |= _breakdowns(header.breakdowns)
    if config.bad_log_probs != "error":
        metrics["bad_log_probs"] = header.data.bad_tokens
    return {config.metric_prefix + name: value for name, value in metrics.items()}


def sequence_eff_sample_size(policy: PolicySums[float]) -> float:
    """Effective sample size of the unbounded weights w = Π ρ of the sequences with a valid token; 0 without one."""
    return eff_sample_size(policy.sequence_sample, policy.sequences)


def eff_sample_size(sums: SampleSums[float], count: float) -> float:
    """(Σ w)² / (n Σ w²) of n weights, in (0, 1]; 0 of no weights, or if all of them are 0.

    Kong 1992, "A Note on Importance Sampling using Standardized Weights".
    """
    # Rounding may take equal weights to just above 1.
    return min(ratio(sums.weight * sums.weight, count * sums.squared), 1.0)


def _policy_metrics(sums: PolicySums[float], of_tokens: TokenSums[float]) -> dict[str, float]:
    tokens, sequences = sums.valid, sums.sequences
    means = {"training_ppl": sums.training.plain, "training_log_ppl": sums.training.log}
    means |= {
        "rollout_ppl": sums.rollout.plain,
        "rollout_log_ppl": sums.rollout.log,
        "ppl_ratio": sums.difference.plain,
    }
    means |= {"log_ppl_diff": sums.difference.log, "log_ppl_abs_diff": sums.abs_difference}
    return {name: ratio(total, sequences) for name, total in means.items()} | {
        "kl": ratio(-sums.log_ratio, tokens),
        "k3_kl": ratio(of_tokens.k3, tokens),
        "log_ppl_diff_max": extreme(sums.difference_max),
        "log_ppl_diff_min": extreme(sums.difference_min),
        # E[ρ²] - 1 = E[(ρ - 1)²] + 2 E[ρ - 1]
        "chi2_token": ratio(of_tokens.ratio.excess_squared + 2 * sums.excess, tokens),
        "chi2_seq": ratio(sums.sequence_excess_squared + 2 * sums.sequence_excess, sequences),
        "num_tokens": tokens,
        "num_sequences": sequences,
    }


def _rejection_metrics(header: BatchHeader[float], config: RolloutCorrectionConfig) -> dict[str, float]:
    policy = header.policy
    tokens, sequences = policy.valid, policy.sequences
    accepted: float = sum(counts[2] for counts in header.denominators.counts)
    metrics = {
        "rollout_rs_masked_fraction": ratio(tokens - accepted, tokens),
        "rollout_rs_seq_masked_fraction": ratio(policy.sequences_with_rejected, sequences),
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
        metrics["rollout_is_veto_fraction"] = ratio(header.veto.sequences_rejected, sequences)
        metrics["rollout_is_catastrophic_token_fraction"] = ratio(header.veto.rejected, tokens)
    return metrics


def _criterion_metrics(criterion: Criterion, sums: CriterionSums[float], policy: PolicySums[float]) -> dict[str, float]:
    metrics = {
        "masked_fraction": ratio(sums.rejected, policy.valid),
        "seq_masked_fraction": ratio(sums.sequences_rejected, policy.sequences),
    }
    if sums.statistic is not None:
        metrics |= _statistic_metrics(criterion, sums.statistic, sums.rejected, policy)
    return metrics


def _statistic_metrics(
    criterion: Criterion, sums: StatisticSums[float], rejected: float, policy: PolicySums[float]
) -> dict[str, float]:
    """The statistic that a criterion tests; with bounds on ρ it is -log ρ, as in verl: the sides turn."""
    tokens, sequences = policy.valid, policy.sequences
    turned = criterion.bounds.on_ratio
    sign = -1.0 if turned else 1.0

    def extremes(largest: float, smallest: float) -> tuple[float, float]:
        top, bottom = extreme(largest), extreme(smallest)
        return (-bottom + 0.0, -top + 0.0) if turned else (top, bottom)

    sequence_above, sequence_below = (ratio(side, sequences) for side in (sums.outside.above, sums.outside.below))
    sequence_top, sequence_bottom = extremes(sums.max, sums.min)
    above, below = sequence_above, sequence_below
    if criterion.of_tokens:
        above, below = ratio(sums.tested.high, tokens), ratio(rejected - sums.tested.high, tokens)
    top, bottom = extremes(sums.tested.max, sums.tested.min)
    metrics = {
        "mean": sign * ratio(sums.total, tokens) + 0.0,
        "std": spread(ratio(sums.tested.clamped, tokens), ratio(sums.tested.clamped_squared, tokens)),
        "max": top,
        "min": bottom,
        "fraction_high": below if turned else above,
        "fraction_low": above if turned else 0.0,
        "seq_mean": sign * ratio(sums.statistic, sequences) + 0.0,
        "seq_std": sample_std(sums.statistic, sums.squared, sequences),
        "seq_max": sequence_top,
        "seq_min": sequence_bottom,
        "seq_max_deviation": max(abs(sequence_top), abs(sequence_bottom)),
        "seq_fraction_high": sequence_below if turned else sequence_above,
    }
    if turned:
        metrics |= {"seq_fraction_low": sequence_above, "rho_fraction_above": above, "rho_fraction_below": below}
    return metrics


def _breakdowns(tables: Breakdowns) -> dict[str, float]:
    """Rejected shares by length, the reward's sign, staleness and turn; only buckets that hold tokens."""
    names: tuple[tuple[list[list[float]], Callable[[int], str]], ...] = (
        (tables.by_length, lambda bucket: f"length_{2**bucket}_{2 ** (bucket + 1) - 1}"),
        (tables.by_reward, lambda bucket: f"reward_{REWARD_SIGNS[bucket]}"),
        (tables.by_staleness, lambda bucket: f"staleness_{bucket}"),
        # Turn 0 alone would repeat the whole batch.
        (tables.by_turn if any(row[0] for row in tables.by_turn[1:]) else [], lambda bucket: f"turn_{bucket}"),
    )
    metrics = {}
    for table, label in names:
        for bucket, (tokens, rejected, *log_ratio) in enumerate(table):
            if tokens:
                metrics[f"rollout_rs_masked_fraction_{label(bucket)}"] = rejected / tokens
            if tokens and log_ratio:
                metrics[f"{label(bucket)}_token_fraction"] = tokens / sum(row[0] for row in table)
                metrics[f"{label(bucket)}_kl"] = -log_ratio[0] / tokens + 0.0
    return metrics


def weight_metrics(
    header: BatchHeader[float], sums: WeightSums[float], config: RolloutCorrectionConfig
) -> dict[str, float]:
    """All of the batch's importance weights, before and after their bounds, and as applied."""
    tokens, sequences = header.policy.valid, header.policy.sequences
    mean = ratio(header.denominators.total_weight, header.denominators.weight_count)
    factor = 1.0 if not config.rollout_is_batch_normalize or mean <= NORMALIZE_LIMIT else 1 / mean
    floor = -EXP_LIMIT if config.weighs_single_tokens else LOG_WEIGHT_FLOOR
    extremes = {"max": _safe_exp(sums.raw.max, floor), "min": _safe_exp(sums.raw.min, floor)}
    raw = weight_moments(sums.raw, tokens) | extremes
    bounded = weight_moments(sums.bounded, tokens)
    bounded |= {"max": extreme(sums.bounded.max), "min": extreme(sums.bounded.min)}
    applied = {name: value if name == "eff_sample_size" else value * factor for name, value in bounded.items()}
    if not config.weighs_tokens:
        # verl's extremes of sequence weights are those before any bound.
        bounded |= extremes
    found = {f"raw_{name}": value for name, value in raw.items()} | bounded
    found |= {f"applied_{name}": value for name, value in applied.items()} | _mean_metrics(sums, sequences)
    above, below = ratio(sums.outside.above, tokens), ratio(sums.outside.below, tokens)
    if config.rollout_is == "sequence":
        above, below = ratio(sums.mean_outside.above, sequences), ratio(sums.mean_outside.below, sequences)
    found |= {"ratio_fraction_high": above, "ratio_fraction_low": below}
    outside = ratio(sums.outside.above + sums.outside.below, tokens)
    if config.is_mode != "truncate":
        found["oob_ratio"] = outside
    if config.is_mode == "mask":
        found |= {"masked_fraction": outside, "seq_masked_fraction": ratio(sums.sequences_outside, sequences)}
    if config.rollout_is_batch_normalize:
        found |= {"batch_norm_factor": 1 / factor, "batch_norm_skipped": float(mean <= NORMALIZE_LIMIT)}
    return {f"rollout_is_{name}": value for name, value in found.items()}


def _mean_metrics(sums: WeightSums[float], sequences: float) -> dict[str, float]:
    """Metrics of the mean weight of each sequence's tokens."""
    mean = sums.mean
    return {
        "seq_mean": ratio(mean.total, sequences),
        "seq_std": weight_std(mean.total, mean.excess_squared, mean.squared, sequences, lost=1),
        "seq_max": extreme(mean.max),
        "seq_min": extreme(mean.min),
        "seq_max_deviation": max(abs(mean.max - 1), abs(mean.min - 1)) if sequences else 0.0,
        "seq_fraction_high": ratio(sums.mean_outside.above, sequences),
        "seq_fraction_low": ratio(sums.mean_outside.below, sequences),
    }


def _safe_exp(log: float, floor: float) -> float:
    return 0.0 if math.isinf(log) else math.exp(max(floor, min(EXP_LIMIT, log)))


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
    """Mean, standard deviation and effective sample size of ``count`` weights."""
    return {
        "mean": ratio(sums.total, count),
        "std": weight_std(sums.total, sums.excess_squared, sums.sample.squared, count),
        "eff_sample_size": eff_sample_size(sums.sample, count),
    }


def weight_std(total: float, excess_squared: float, squared: float, count: float, lost: int = 0) -> float:
    """The standard deviation of weights, with ``count - lost`` in its denominator; 0 for too few weights.

    Args:
        total: Σ w.
        excess_squared: Σ (w - 1)².
        squared: Σ w².
        count: number of weights.
        lost: 1 for the deviation of a sample.
    """
    if count <= lost:
        return 0.0
    mean = total / count
    # A small variance must not be the difference of two large numbers: weights around 1 are taken less 1.
    near_one = mean > 0.5
    sum_of_squares = excess_squared if near_one else squared
    middle = mean - 1 if near_one else mean
    squared_distances = sum_of_squares - count * middle**2
    return math.sqrt(max(squared_distances, 0.0) / (count - lost))
