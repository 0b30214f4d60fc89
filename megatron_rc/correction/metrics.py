"""Metrics from sums over the whole batch: a mean is a quotient of two sums, never a mean of means."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rc.correction.token_pass.histogram import quantiles
from megatron_rc.numerics import EXP_LIMIT, NORMALIZE_LIMIT
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.criteria import Criterion

Numbers = Mapping[str, float]
# Names that the oldest dashboards have behind their prefix once more.
_OLDEST_PREFIX, _OLDEST_NAME = "mismatch/", "mismatch_"


@dataclass(frozen=True)
class Statistics:
    """A header on the host, by name.

    Attributes:
        sums: numbers that add up.
        tables: sums in buckets.
        maxima: largest values; a minimum is the largest negative.
    """

    sums: Numbers
    tables: Mapping[str, Any]
    maxima: Numbers


def derive_metrics(statistics: Statistics, config: RolloutCorrectionConfig) -> dict[str, float]:
    """Every metric of one rollout batch, under verl's names where it has one; see ``docs/metrics.md``.

    Returns:
        ``<metric_prefix><name>`` to a float; 0 for a batch without valid tokens (the normalisation factor is 1).
    """
    sums, maxima = statistics.sums, statistics.maxima
    policy = _policy_metrics(sums, maxima)
    if config.metric_prefix == _OLDEST_PREFIX:
        policy = {_OLDEST_NAME + name: value for name, value in policy.items()}
    metrics = policy | quantiles(statistics.tables["bins"])
    if config.rollout_is is not None:
        metrics |= _weight_metrics(sums, maxima, config)
    metrics |= _rejection_metrics(sums, maxima, config)
    metrics |= _breakdowns(statistics.tables)
    if config.bad_log_probs != "error":
        metrics["bad_log_probs"] = sums["bad_tokens"]
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


def _policy_metrics(sums: Numbers, maxima: Numbers) -> dict[str, float]:
    tokens, sequences = sums["valid"], sums["sequences"]
    return {
        "kl": _ratio(-sums["log_ratio"], tokens),
        # E[ρ - 1 - log ρ] = E[ρ - 1] - E[log ρ]
        "k3_kl": _ratio(sums["excess"] - sums["log_ratio"], tokens),
        "training_ppl": _ratio(sums["train_ppl"], sequences),
        "training_log_ppl": _ratio(sums["train_log_ppl"], sequences),
        "rollout_ppl": _ratio(sums["rollout_ppl"], sequences),
        "rollout_log_ppl": _ratio(sums["rollout_log_ppl"], sequences),
        "log_ppl_diff": _ratio(sums["log_ppl_diff"], sequences),
        "log_ppl_abs_diff": _ratio(sums["log_ppl_abs_diff"], sequences),
        "log_ppl_diff_max": _extreme(maxima["log_ppl_diff"]),
        "log_ppl_diff_min": -_extreme(maxima["-log_ppl_diff"]) + 0.0,
        "ppl_ratio": _ratio(sums["ppl_ratio"], sequences),
        # E[ρ²] - 1 = E[(ρ - 1)²] + 2 E[ρ - 1]
        "chi2_token": _ratio(sums["excess_squared"] + 2 * sums["excess"], tokens),
        "chi2_seq": _ratio(sums["sequence_excess_squared"] + 2 * sums["sequence_excess"], sequences),
        "num_tokens": tokens,
        "num_sequences": sequences,
    }


def _weight_metrics(sums: Numbers, maxima: Numbers, config: RolloutCorrectionConfig) -> dict[str, float]:
    tokens, sequences = sums["valid"], sums["sequences"]
    by_token = config.rollout_is == "token"
    raw_total = tokens + sums["excess"] if by_token else sums["raw"]
    raw_square = sums["excess_squared" if by_token else "raw_excess_squared"]
    log = "log_ratio" if by_token else "log_weight"
    raw_high, raw_low = (_safe_exp(sign * maxima[prefix + log]) for sign, prefix in ((1, ""), (-1, "-")))
    high, low = _bounded_extremes(raw_high, raw_low, sums, maxima, config)
    factor = normalization_factor(sums) if config.rollout_is_batch_normalize else 1.0
    count = tokens if config.rollout_is != "sequence" else sequences
    above, below = ("above", "below") if config.rollout_is != "geometric" else ("tokens_above", "tokens_below")
    metrics = _moments("rollout_is_raw_", raw_total, raw_square, tokens, raw_high, raw_low)
    bounded = _moments("rollout_is_", sums["weight"], sums["weight_excess_squared"], tokens, high, low)
    scaled = {name: value if name.endswith("eff_sample_size") else value * factor for name, value in bounded.items()}
    metrics |= {name.replace("rollout_is_", "rollout_is_applied_"): value for name, value in scaled.items()}
    if not by_token:
        # verl's extremes of sequence weights are those before any bound.
        bounded |= {"rollout_is_max": raw_high, "rollout_is_min": raw_low}
    metrics |= bounded
    metrics |= {
        "rollout_is_ratio_fraction_high": _ratio(sums[above], count),
        "rollout_is_ratio_fraction_low": _ratio(sums[below], count),
        "rollout_is_seq_mean": 1 + _ratio(sums["sequence_weight_excess"], sequences) if sequences else 0.0,
        "rollout_is_seq_std": _sample_std(
            sums["sequence_weight_excess"], sums["sequence_weight_excess_squared"], sequences
        ),
        "rollout_is_seq_max": _extreme(maxima["sequence_weight"]),
        "rollout_is_seq_min": -_extreme(maxima["-sequence_weight"]) + 0.0,
        "rollout_is_seq_max_deviation": max(abs(maxima["sequence_weight"] - 1), abs(-maxima["-sequence_weight"] - 1))
        if sequences
        else 0.0,
        "rollout_is_seq_fraction_high": _ratio(sums["sequence_weight_high"], sequences),
        "rollout_is_seq_fraction_low": _ratio(sums["sequence_weight_low"], sequences),
    }
    if config.is_mode != "truncate":
        outside = sums["above"] + sums["below"] if by_token else sums["tokens_above"] + sums["tokens_below"]
        metrics["rollout_is_oob_ratio"] = _ratio(outside, tokens)
    if config.is_mode == "mask":
        metrics["rollout_is_masked_fraction"] = metrics["rollout_is_oob_ratio"]
        metrics["rollout_is_seq_masked_fraction"] = _ratio(sums["sequences_outside"], sequences)
    if config.rollout_is_batch_normalize:
        metrics["rollout_is_batch_norm_factor"] = 1 / factor
        metrics["rollout_is_batch_norm_skipped"] = float(_mean_weight(sums) <= NORMALIZE_LIMIT)
    return metrics


def normalization_factor(sums: Numbers) -> float:
    """1 / w̄; 1 where w̄ is not to be divided by."""
    mean = _mean_weight(sums)
    return 1 / mean if mean > NORMALIZE_LIMIT else 1.0


def _mean_weight(sums: Numbers) -> float:
    return _ratio(sums["normalize_weight"], sums["normalize_count"])


def _safe_exp(log: float) -> float:
    return 0.0 if math.isinf(log) else math.exp(max(-EXP_LIMIT, min(EXP_LIMIT, log)))


def _bounded_extremes(
    raw_high: float, raw_low: float, sums: Numbers, maxima: Numbers, config: RolloutCorrectionConfig
) -> tuple[float, float]:
    """Largest and smallest weight after the bounds, 0 without valid tokens."""
    lower, upper = config.is_bounds
    if not sums["valid"]:
        return 0.0, 0.0
    if config.staleness_scale is not None:
        return maxima["weight"], -maxima["-weight"] + 0.0
    if config.is_mode == "truncate":
        return min(raw_high, upper), min(raw_low, upper)
    if config.is_mode == "clamp":
        return min(max(raw_high, lower), upper), min(max(raw_low, lower), upper)
    return maxima["weight"], 0.0 if sums["above"] + sums["below"] else raw_low


def _moments(
    prefix: str, total: float, excess_squared: float, count: float, high: float, low: float
) -> dict[str, float]:
    mean = _ratio(total, count)
    # About 1, so that a small variance is not the difference of two large numbers.
    variance = _spread(mean - 1, _ratio(excess_squared, count)) ** 2 if count else 0.0
    return {
        f"{prefix}mean": mean,
        f"{prefix}std": math.sqrt(variance),
        f"{prefix}min": low,
        f"{prefix}max": high,
        # ESS = (Σw)² / (n Σw²) = mean² / (variance + mean²), a fraction of the tokens.
        f"{prefix}eff_sample_size": _ratio(mean**2, variance + mean**2),
    }


def _rejection_metrics(sums: Numbers, maxima: Numbers, config: RolloutCorrectionConfig) -> dict[str, float]:
    tokens, sequences = sums["valid"], sums["sequences"]
    metrics = {
        "rollout_rs_masked_fraction": _ratio(tokens - sums["accepted_tokens"], tokens),
        "rollout_rs_seq_masked_fraction": _ratio(sums["sequences_with_rejected"], sequences),
    }
    for criterion in config.criteria:
        prefix = f"rollout_rs_{criterion.name}_"
        metrics[f"{prefix}masked_fraction"] = _ratio(sums[f"rejected_{criterion.name}"], tokens)
        metrics[f"{prefix}seq_masked_fraction"] = _ratio(sums[f"sequences_rejected_{criterion.name}"], sequences)
        if criterion.is_measured:
            metrics |= {prefix + name: value for name, value in _criterion_metrics(criterion, sums, maxima).items()}
    if config.rollout_token_veto_threshold is not None:
        metrics["rollout_is_veto_fraction"] = _ratio(sums["vetoed"], sequences)
        metrics["rollout_is_catastrophic_token_fraction"] = _ratio(sums["catastrophic"], tokens)
    return metrics


def _criterion_metrics(criterion: Criterion, sums: Numbers, maxima: Numbers) -> dict[str, float]:
    """The statistic that a criterion tests; for k1 that is -log ρ, as verl's, so its sign and sides turn around."""
    name, tokens, sequences = criterion.name, sums["valid"], sums["sequences"]
    by_token = criterion.unit == "token"
    count = tokens if by_token else sequences
    high, low = f"{'' if by_token else 'sequence_'}high_{name}", f"sequence_low_{name}"
    turned = criterion.bounds.on_ratio
    sign = -1.0 if turned else 1.0

    def extremes(key: str) -> tuple[float, float]:
        top, bottom = _extreme(maxima[key]), -_extreme(maxima[f"-{key}"]) + 0.0
        return (-bottom + 0.0, -top + 0.0) if turned else (top, bottom)

    above = _ratio(sums[high], count)
    below = _ratio(sums[f"rejected_{name}"] - sums[high], count) if by_token else _ratio(sums[low], count)
    sequence_above, sequence_below = (_ratio(sums[f"sequence_{side}_{name}"], sequences) for side in ("high", "low"))
    sequence_top, sequence_bottom = extremes(f"sequence_{name}")
    top, bottom = sequence_top, sequence_bottom
    if by_token:
        top, bottom = extremes("log_ratio" if turned else f"token_{name}")
    clamped = _ratio(sums[f"clamped_{name}"], tokens)
    metrics = {
        "mean": sign * _ratio(sums[f"total_{name}"], tokens) + 0.0,
        "std": _spread(clamped, _ratio(sums[f"clamped_squared_{name}"], tokens)),
        "max": top,
        "min": bottom,
        "fraction_high": below if turned else above,
        "fraction_low": above if turned else 0.0,
        "seq_mean": sign * _ratio(sums[f"sequence_{name}"], sequences) + 0.0,
        "seq_std": _sample_std(sums[f"sequence_{name}"], sums[f"sequence_squared_{name}"], sequences),
        "seq_max": sequence_top,
        "seq_min": sequence_bottom,
        "seq_max_deviation": max(abs(sequence_top), abs(sequence_bottom)),
        "seq_fraction_high": sequence_below if turned else sequence_above,
    }
    if turned:
        metrics |= {"seq_fraction_low": sequence_above, "rho_fraction_above": above, "rho_fraction_below": below}
    return metrics


def _breakdowns(tables: Mapping[str, Any]) -> dict[str, float]:
    """Rejected shares by length, by the reward's sign and by staleness; only buckets that hold tokens."""
    names: dict[str, Callable[[int], str]] = {
        "length": lambda bucket: f"length_{2**bucket}_{2 ** (bucket + 1) - 1}",
        "reward": lambda bucket: ("reward_negative", "reward_zero", "reward_positive")[bucket],
        "staleness": lambda bucket: f"staleness_{bucket}",
    }
    metrics = {}
    for table, label in names.items():
        total = sum(row[0] for row in tables[table])
        for bucket, (tokens, rejected, *log_ratio) in enumerate(tables[table]):
            if not tokens:
                continue
            metrics[f"rollout_rs_masked_fraction_{label(bucket)}"] = rejected / tokens
            if log_ratio:
                metrics[f"{label(bucket)}_token_fraction"] = tokens / total
                metrics[f"{label(bucket)}_kl"] = -log_ratio[0] / tokens + 0.0
    return metrics
