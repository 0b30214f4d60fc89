"""The histograms of a whole batch, of log ρ and of the importance weights, for boards and as quantiles."""

from __future__ import annotations

import math

from megatron_rc.measures.header import BatchHeader
from megatron_rc.measures.histogram import (
    NUM_BINS,
    WEIGHT_QUANTILES,
    Distribution,
    Histogram,
    WeightHistogram,
    even_bins,
    quantiles,
)
from megatron_rc.numerics import EXP_LIMIT
from megatron_rc.settings.config import RolloutCorrectionConfig


def log_ratio_histogram(header: BatchHeader[float]) -> Histogram:
    """Return the histogram of log ρ over the valid tokens."""
    counts = list(header.tokens.bins)
    # Tokens that are not valid are counted with a log ρ of 0.
    counts[NUM_BINS // 2] -= sum(counts) - header.totals["tokens"]
    return Histogram(counts)


def weight_histograms(header: BatchHeader[float], config: RolloutCorrectionConfig) -> dict[str, WeightHistogram]:
    """Return ``rollout_is_seq``, the mean weight of each sequence, and ``rollout_is``, the weight of each token.

    Token-level weights have no ``rollout_is`` if they are no ratios of tokens, or have bounds by staleness; without
    weights there are none.
    """
    if header.weight_bins is None:
        return {}
    per_sequence, *per_token = [Histogram(bins) for bins in header.weight_bins]
    histograms = {"rollout_is_seq": WeightHistogram(per_sequence)}
    if per_token:
        histograms["rollout_is"] = WeightHistogram(per_token[0])
    elif config.weighs_single_tokens and config.staleness_scale is None:
        lower, upper = config.is_bounds
        if config.is_mode == "truncate":
            lower = math.exp(-EXP_LIMIT)
        is_masked = config.is_mode == "mask"
        histograms["rollout_is"] = WeightHistogram(
            log_ratio_histogram(header),
            lower=lower,
            upper=upper,
            above=header.totals["above"] if is_masked else 0.0,
            below=header.totals["below"] if is_masked else 0.0,
        )
    return histograms


def derive_distributions(header: BatchHeader[float], config: RolloutCorrectionConfig) -> dict[str, Distribution]:
    """Return the distributions of log ρ and of the weights, by their names on boards; none without a valid token.

    The names: ``<metric_prefix>log_ratio``, and those of :func:`weight_histograms`.
    """
    if not header.totals["tokens"]:
        return {}
    log_ratio = log_ratio_histogram(header)
    distributions = {"log_ratio": even_bins(*log_ratio.ends, log_ratio.total, log_ratio.below)}
    for name, histogram in weight_histograms(header, config).items():
        distributions[name] = histogram.distribution()
    return {config.metric_prefix + name: distribution for name, distribution in distributions.items()}


def derive_quantiles(header: BatchHeader[float], config: RolloutCorrectionConfig) -> dict[str, float]:
    """Quantiles of log ρ (``log_ratio_p01`` …) and of the weights (``rollout_is_p25`` …); 0 without a valid token."""
    values = quantiles(log_ratio_histogram(header))
    for name, weights in weight_histograms(header, config).items():
        for percent in WEIGHT_QUANTILES:
            values[f"{name}_p{percent}"] = weights.quantile(percent / 100)
    return values if header.totals["tokens"] else dict.fromkeys(values, 0.0)
