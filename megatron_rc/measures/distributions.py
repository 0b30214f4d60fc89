"""Distributions of log ρ and of the importance weights, from what a batch's header counts for the quantiles.

``docs/design.md`` begins with the words and symbols that are used here.
"""

from __future__ import annotations

import math

from megatron_rc.measures.header import BatchHeader, WeightSums
from megatron_rc.measures.histogram import Distribution, Histogram, even_bins
from megatron_rc.settings.config import RolloutCorrectionConfig


def derive_distributions(header: BatchHeader[float], config: RolloutCorrectionConfig) -> dict[str, Distribution]:
    """The distributions whose quantiles are metrics (``<name>_p50``).

    Returns:
        ``<metric_prefix>log_ratio``, log ρ of the tokens; with weights ``rollout_is``, the bounded weight of each token
        (not of token weights with bounds by staleness), and ``rollout_is_seq``, its mean over each sequence. Nothing
        for a batch without valid tokens.
    """
    if not header.policy.valid:
        return {}
    bins = Histogram(header.bins)
    found = {"log_ratio": even_bins(*bins.ends, bins.total, bins.below)}
    if header.weights is not None:
        per_sequence, *per_token = map(Histogram, header.weights.histograms)
        found["rollout_is_seq"] = _weights(per_sequence)
        if per_token:
            found["rollout_is"] = _weights(per_token[0])
        elif config.staleness_scale is None:
            found["rollout_is"] = _token_weights(bins, header.weights, config)
    return {config.metric_prefix + name: distribution for name, distribution in found.items()}


def _weights(logs: Histogram) -> Distribution:
    """The distribution of weights, from the histogram of their logs."""
    low, high = map(math.exp, logs.ends)
    return even_bins(low, high, logs.total, lambda weight: logs.below(math.log(weight)))


def _token_weights(logs: Histogram, sums: WeightSums[float], config: RolloutCorrectionConfig) -> Distribution:
    """The distribution of bounded weights, from log ρ: values beyond a bound lie on it, or with ``mask`` at 0."""
    lower, upper = config.is_bounds if config.is_mode != "truncate" else (0.0, config.is_bounds[1])
    zeros = beyond = 0.0
    if config.is_mode == "mask":
        zeros, beyond = sums.tokens_above + sums.tokens_below, sums.tokens_below
    low, high = (min(max(math.exp(end), lower), upper) for end in logs.ends)

    def below(weight: float) -> float:
        if weight >= upper:
            return logs.total
        if weight <= lower:
            return zeros
        inside = min(max(logs.below(math.log(weight)), beyond), logs.total - zeros + beyond)
        return zeros + inside - beyond

    return even_bins(0.0 if zeros else low, high, logs.total, below)
