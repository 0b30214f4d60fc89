"""Distributions of log ρ and of the importance weights, and their quantiles, from the histograms of a header."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_rc.measures.header import BatchHeader
from megatron_rc.measures.histogram import Distribution, Histogram, even_bins, quantiles
from megatron_rc.numerics import EXP_LIMIT
from megatron_rc.settings.config import RolloutCorrectionConfig

WEIGHT_QUANTILES = (25, 50, 75)


@dataclass(frozen=True)
class WeightHistogram:
    """A histogram of bounded weights w, made from one of log w before the bounds."""

    logs: Histogram
    lower: float = 0.0
    upper: float = math.inf
    above: float = 0.0  # how many lie above the bounds and are 0: the mode ``mask``
    below: float = 0.0  # how many lie below them and are 0

    @property
    def zeros(self) -> float:
        """How many weights the bounds made 0."""
        return self.above + self.below

    def quantile(self, share: float) -> float:
        """The weight below which this share of them lies; the zeros come first."""
        rank = share * self.logs.total
        return 0.0 if rank < self.zeros else self._weight(self.logs.value_at(rank - self.above))

    def count_below(self, weight: float) -> float:
        """How many weights lie below this one."""
        if weight >= self.upper:
            return self.logs.total
        if weight <= self.lower:
            return self.zeros
        inside = min(max(self.logs.below(math.log(weight)), self.below), self.logs.total - self.above)
        return self.above + inside

    def distribution(self) -> Distribution:
        """The weights in bins of one width."""
        low, high = map(self._weight, self.logs.ends)
        return even_bins(0.0 if self.zeros else low, high, self.logs.total, self.count_below)

    def _weight(self, log: float) -> float:
        # A weight that is not 0 has a log of at least -20.
        weight = math.exp(min(log, EXP_LIMIT)) if log > -EXP_LIMIT - 1 else 0.0
        return min(max(weight, self.lower), self.upper)


def weight_histograms(header: BatchHeader[float], config: RolloutCorrectionConfig) -> dict[str, WeightHistogram]:
    """``rollout_is_seq``, the mean weight of each sequence, and ``rollout_is``, the weight of each token.

    Token-level weights have no ``rollout_is`` if they are no ratios of tokens, or have bounds by staleness; without
    weights there are none.
    """
    if header.weights is None:
        return {}
    per_sequence, *per_token = map(Histogram, header.weights.histograms)
    found = {"rollout_is_seq": WeightHistogram(per_sequence)}
    if per_token:
        found["rollout_is"] = WeightHistogram(per_token[0])
    elif config.weighs_single_tokens and config.staleness_scale is None:
        lower, upper = config.is_bounds
        lower = math.exp(-EXP_LIMIT) if config.is_mode == "truncate" else lower
        zeros = (header.weights.above, header.weights.below) if config.is_mode == "mask" else (0.0, 0.0)
        found["rollout_is"] = WeightHistogram(Histogram(header.bins), lower, upper, *zeros)
    return found


def derive_distributions(header: BatchHeader[float], config: RolloutCorrectionConfig) -> dict[str, Distribution]:
    """``<metric_prefix>log_ratio``, log ρ of the tokens, and :func:`weight_histograms`; none without a valid token."""
    if not header.policy.valid:
        return {}
    bins = Histogram(header.bins)
    found = {"log_ratio": even_bins(*bins.ends, bins.total, bins.below)}
    found |= {name: histogram.distribution() for name, histogram in weight_histograms(header, config).items()}
    return {config.metric_prefix + name: distribution for name, distribution in found.items()}


def derive_quantiles(header: BatchHeader[float], config: RolloutCorrectionConfig) -> dict[str, float]:
    """Quantiles of log ρ (``log_ratio_p01`` …) and of the weights (``rollout_is_p25`` …); 0 without a valid token."""
    found = quantiles(Histogram(header.bins))
    for name, weights in weight_histograms(header, config).items():
        found |= {f"{name}_p{percent}": weights.quantile(percent / 100) for percent in WEIGHT_QUANTILES}
    return found if header.policy.valid else dict.fromkeys(found, 0.0)
