"""Histograms of log ρ and of the importance weights that merge over ranks, and their quantiles: fixed bins.

A bin is a run of float32 numbers that share sign, exponent and the five leading bits of the mantissa. So a bin around x
is at most |x|/32 wide. Magnitudes below 2⁻¹⁵ share one bin, magnitudes above 2⁵ the outermost ones. A quantile is
interpolated inside its bin: it is off by at most 1/32 of its value, or 2⁻¹⁴ (6e-5) near 0, for values within ±32.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rc.measures.header import BatchHeader
from megatron_rc.numerics import EXP_LIMIT
from megatron_rc.settings.config import RolloutCorrectionConfig

_DROPPED_BITS = 18  # of the 23 of the mantissa
_PER_OCTAVE = 32
_LOWEST, _HIGHEST = -15, 5  # powers of two between which bins are told apart
_HALF = (_HIGHEST - _LOWEST) * _PER_OCTAVE
NUM_CODES = 1 << (32 - _DROPPED_BITS)  # values of the remaining bits, sign included
_FIRST = (_LOWEST + 127) * _PER_OCTAVE
NUM_BINS = 2 * _HALF + 1
QUANTILES = (1, 5, 25, 50, 75, 95, 99)
WEIGHT_QUANTILES = (25, 50, 75)
_EVEN_BINS = 40
_GPU_COUNTERS = 32


class Distribution(NamedTuple):
    """The number of values in each bin, for boards that draw it."""

    edges: list[float]  # [bins + 1], ascending
    counts: list[float]  # [bins], values between two edges


def even_bins(
    low: float, high: float, total: float, below: Callable[[float], float], *, most: int = _EVEN_BINS
) -> Distribution:
    """Bins of one width, at most 40 (or ``most``), from the smallest to the largest of ``total`` values.

    ``below`` gives the number of values below any value.
    """
    if not low < high:
        low, high = low - 0.5, low + 0.5
    bins = min(most, _EVEN_BINS)
    edges = [low + (high - low) * step / bins for step in range(bins + 1)]
    until = [0.0, *map(below, edges[1:-1]), total]
    return Distribution(edges, [after - before for before, after in pairwise(until)])


def codes_of(values: Tensor) -> Tensor:
    """The code of each value, of any shape: the leading bits of it as a float32; int32."""
    return (values.float().view(torch.int32) >> _DROPPED_BITS) & (NUM_CODES - 1)


class CodeCounter:
    """Counts how often each code occurs, in ``counts``, [counters, NUM_CODES] float64.

    A GPU, whose ``bincount`` waits for the host, has many counters: additions to one number wait for each other.
    """

    def __init__(self, device: torch.device) -> None:
        counters = 1 if device.type == "cpu" else _GPU_COUNTERS
        self.counts = torch.zeros(counters, NUM_CODES, dtype=torch.float64, device=device)

    def add(self, codes: Tensor) -> None:
        """Count codes, of any shape."""
        if len(self.counts) == 1:
            self.counts += torch.bincount(codes.reshape(-1), minlength=NUM_CODES)
        else:
            self._scatter(codes.reshape(-1).long())

    def _scatter(self, codes: Tensor) -> None:
        rest = codes.numel() % len(self.counts)
        # Threads that run side by side read neighbours, so these belong to different counters.
        shares = codes[rest:].view(-1, len(self.counts)).t()
        for counts, own in ((self.counts, shares), (self.counts[:1], codes[None, :rest])):
            counts.scatter_add_(1, own, counts.new_ones(1, 1).expand(own.shape))


def bins_from_codes(codes: Tensor, num_values: Tensor) -> Tensor:
    """[NUM_BINS] float64, ascending: the histogram, from the ``counts`` of a :class:`CodeCounter`.

    ``num_values``, 0-D, of the counted values are data; the others are exact zeros in the place of data.
    """
    # For each sign, by magnitude: in the bin around 0, in bins of their own, and beyond the last power.
    signs = codes.sum(0).view(2, -1)
    near, inside, far = signs.tensor_split((_FIRST, _FIRST + _HALF - 1), dim=1)
    positive, negative = torch.cat([inside, far.sum(1, keepdim=True)], dim=1)
    return torch.cat([negative.flip(0), (near.sum() - signs.sum() + num_values).view(1), positive])


@functools.cache
def _bin_of_code(device: torch.device) -> Tensor:
    """[NUM_CODES] int64: the bin of each code; magnitudes beyond the last power are in the outermost one."""
    magnitude = (torch.arange(NUM_CODES // 2, device=device) - _FIRST).clamp(-1, _HALF - 1) + 1
    return torch.cat([_HALF + magnitude, _HALF - magnitude])


def bins_of(values: Tensor, counts: Tensor) -> Tensor:
    """[k, NUM_BINS] float64: k histograms of the values [n]; value i counts ``counts[k, i]`` times, float64."""
    bins = torch.zeros(len(counts), NUM_BINS, dtype=torch.float64, device=values.device)
    return bins.index_add_(1, _bin_of_code(values.device)[codes_of(values)], counts)


class Histogram:
    """A histogram on the host, from [NUM_BINS] cumulative counts."""

    def __init__(self, until: Sequence[float]) -> None:
        self._until = until

    @property
    def total(self) -> float:
        """The number of values."""
        return self._until[-1]

    @property
    def ends(self) -> tuple[float, float]:
        """The smallest and largest value, to the width of a bin; there must be a value."""
        edges = _edges()
        return edges[bisect_right(self._until, 0.0)], edges[bisect_left(self._until, self.total) + 1]

    def below(self, value: float) -> float:
        """The number of values below this one; its own bin counts in proportion."""
        edges = _edges()
        index = bisect_right(edges, value) - 1
        if not 0 <= index < NUM_BINS:
            return self.total if index > 0 else 0.0
        before = self._until[index - 1] if index else 0.0
        return before + (self._until[index] - before) * (value - edges[index]) / (edges[index + 1] - edges[index])

    def quantile(self, share: float) -> float:
        """The value with this share of all values below it; 0 of none."""
        return self.value_at(share * self._until[-1])

    def value_at(self, rank: float) -> float:
        """The value with so many values below it; 0 of none."""
        if not self._until[-1]:
            return 0.0
        index = min(bisect_left(self._until, rank), NUM_BINS - 1)
        before, edges = self._until[index - 1] if index else 0.0, _edges()
        count = self._until[index] - before
        part = (rank - before) / count if count else 0.0
        return edges[index] + (edges[index + 1] - edges[index]) * part


def quantiles(histogram: Histogram) -> dict[str, float]:
    """``log_ratio_p01`` … ``log_ratio_p99``; 0 of no values."""
    return {f"log_ratio_p{percent:02d}": histogram.quantile(percent / 100) for percent in QUANTILES}


@functools.cache
def _edges() -> list[float]:
    """[NUM_BINS + 1], ascending."""
    ends = [
        2.0 ** (_LOWEST + step // _PER_OCTAVE) * (1 + step % _PER_OCTAVE / _PER_OCTAVE) for step in range(_HALF + 1)
    ]
    return [-end for end in reversed(ends)] + ends


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
        # The outermost bin has every log below -31, that of a weight of 0 among them.
        is_nothing = log < _edges()[1]
        weight = 0.0 if is_nothing else math.exp(min(log, EXP_LIMIT))
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
        zeros = (header.weights.outside.above, header.weights.outside.below) if config.is_mode == "mask" else (0.0, 0.0)
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
