"""Quantiles of log ρ that merge over ranks: a histogram with fixed bins.

A bin is a run of float32 numbers that share sign, exponent and the five leading bits of the mantissa. So a bin around x
is at most |x|/32 wide. Magnitudes below 2⁻¹⁵ share one bin, magnitudes above 2⁵ the outermost ones. A quantile is
interpolated inside its bin: it is off by at most 1/32 of its value, or 2⁻¹⁴ (6e-5) near 0, for values within ±32.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

_DROPPED_BITS = 18  # of the 23 of the mantissa
_PER_OCTAVE = 32
_LOWEST, _HIGHEST = -15, 5  # powers of two between which bins are told apart
_HALF = (_HIGHEST - _LOWEST) * _PER_OCTAVE
NUM_CODES = 1 << (32 - _DROPPED_BITS)  # values of the remaining bits, sign included
_FIRST = (_LOWEST + 127) * _PER_OCTAVE
NUM_BINS = 2 * _HALF + 1
QUANTILES = (1, 5, 25, 50, 75, 95, 99)
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
    """The code of each value, of any shape: the leading bits of it as a float32; int64."""
    return ((values.float().view(torch.int32) >> _DROPPED_BITS) & (NUM_CODES - 1)).long()


class CodeCounter:
    """Counts how often each code occurs, in ``counts``, [counters, NUM_CODES] float64.

    A CPU has a counter for each thread, because a scatter runs in parallel over rows only. A GPU has many, because
    additions to one number wait for each other, and most tokens have one of few codes.
    """

    def __init__(self, device: torch.device) -> None:
        self._in_turns = device.type != "cpu"
        counters = _GPU_COUNTERS if self._in_turns else torch.get_num_threads()
        self.counts = torch.zeros(counters, NUM_CODES, dtype=torch.float64, device=device)
        self._one = self.counts.new_ones(1, 1)

    def add(self, codes: Tensor) -> None:
        """Count codes, of any shape."""
        codes = codes.reshape(-1)
        rest = codes.numel() % len(self.counts)
        self._add(self.counts, codes[rest:])
        if rest:
            self._add(self.counts[:1], codes[:rest])

    def _add(self, counts: Tensor, codes: Tensor) -> None:
        # Threads of a GPU that run side by side read neighbours, so these belong to different counters there.
        shares = codes.view(-1, len(counts)).t() if self._in_turns else codes.view(len(counts), -1)
        counts.scatter_add_(1, shares, self._one.expand(shares.shape))


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
