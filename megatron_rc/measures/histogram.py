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
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rc.numerics import EXP_LIMIT

_DROPPED_BITS = 18  # of the 23 of the mantissa
_PER_OCTAVE = 32
# powers of two between which bins are told apart
_LOWEST = -15
_HIGHEST = 5
_HALF = (_HIGHEST - _LOWEST) * _PER_OCTAVE
NUM_CODES = 1 << (32 - _DROPPED_BITS)  # values of the remaining bits, the code of a number, sign included
_FIRST = (_LOWEST + 127) * _PER_OCTAVE
NUM_BINS = 2 * _HALF + 1
QUANTILES = (1, 5, 25, 50, 75, 95, 99)
WEIGHT_QUANTILES = (25, 50, 75)
_EVEN_BINS = 40


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


def bin_index(values: Tensor) -> Tensor:
    """Return the index of each value's bin, int64, flat, of values of any shape; bins are in ascending order."""
    code = (values.float().flatten().view(torch.int32) >> _DROPPED_BITS) & (NUM_CODES - 1)
    return _bin_of_code(values.device).index_select(0, code)


@functools.cache
def _bin_of_code(device: torch.device) -> Tensor:
    """[NUM_CODES] int64: the bin of each code; magnitudes beyond the last power are in the outermost one."""
    magnitude = (torch.arange(NUM_CODES // 2, device=device) - _FIRST).clamp(-1, _HALF - 1) + 1
    return torch.cat([_HALF + magnitude, _HALF - magnitude])


def bins_of(values: Tensor, counts: Tensor) -> Tensor:
    """Return k histograms of the values [n], [k, NUM_BINS] float64; value i counts ``counts[k, i]`` times, float64."""
    bins = torch.zeros(len(counts), NUM_BINS, dtype=torch.float64, device=values.device)
    return bins.index_add_(1, bin_index(values), counts)


def add_to_bins(bins: Tensor, values: Tensor) -> None:
    """Add values of any shape to a histogram, [NUM_BINS] float64, in place."""
    bins.index_add_(0, bin_index(values), _one(values.device).expand(values.numel()))


@functools.cache
def _one(device: torch.device) -> Tensor:
    """[1] float64: a count of 1."""
    return torch.ones(1, dtype=torch.float64, device=device)


class Histogram:
    """A histogram on the host, from the number of values in each of the NUM_BINS bins."""

    def __init__(self, counts: Sequence[float]) -> None:
        self._until = list(accumulate(counts))  # for each bin the number of values up to its end

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
        before = self._until[index - 1] if index else 0.0
        edges = _edges()
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
