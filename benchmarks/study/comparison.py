"""Comparisons of kinds of run by tests: differences of means, by Welch's t-test with Holm's correction."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

import mpmath

from benchmarks.study.design import FAMILY_ERROR, MARGIN, Block, Kind, Run
from benchmarks.study.results import Outcome

# The three measures of a kind of run that are compared.
MEASURED: Mapping[str, Callable[[Outcome], float]] = {
    "reward of the last weights": lambda outcome: outcome.final,
    "over the run": lambda outcome: outcome.over_the_run,
    "right answers": lambda outcome: outcome.right_at_the_end,
}


@dataclass(frozen=True)
class Difference:
    """A difference of two means of a few seeds.

    Attributes:
        mean: the first mean minus the second.
        low: lower end of its 95 % interval; NaN if neither sample has any spread.
        high: upper end of its 95 % interval; NaN in the same case.
        p: chance of a difference as large as this, or larger, between equal kinds, by Welch's two-sided t-test.
    """

    mean: float
    low: float
    high: float
    p: float


def difference_of(values: Sequence[float], others: Sequence[float]) -> Difference:
    """The difference of the means of two independent samples with at least two values each (Welch, 1947).

    Two samples without any spread say nothing about chance: there is no interval then, and p is 1.
    """
    mean = fmean(values) - fmean(others)
    squares = [variance(sample) / len(sample) for sample in (values, others)]
    error = math.sqrt(sum(squares))
    if error == 0:
        return Difference(mean, math.nan, math.nan, 1.0)
    freedom = sum(squares) ** 2 / sum(
        square**2 / (len(sample) - 1) for square, sample in zip(squares, (values, others), strict=True)
    )
    margin = _quantile(0.95, freedom) * error
    return Difference(mean, mean - margin, mean + margin, _outside(abs(mean) / error, freedom))


def _outside(t: float, freedom: float) -> float:
    """Probability that Student's t is beyond -t or t."""
    return float(mpmath.betainc(freedom / 2, 0.5, 0, freedom / (freedom + t * t), regularized=True))


@functools.cache
def _quantile(inside: float, freedom: float) -> float:
    """The t that Student's t is within with this probability."""
    low, high = 0.0, 1e3
    for _ in range(80):
        middle = (low + high) / 2
        if 1 - _outside(middle, freedom) < inside:
            low = middle
        else:
            high = middle
    return high


def holm(chances: Mapping[tuple[str, ...], float]) -> dict[tuple[str, ...], float]:
    """Each chance corrected for the number of comparisons (Holm, 1979): at most ``FAMILY_ERROR`` is a verdict."""
    corrected: dict[tuple[str, ...], float] = {}
    largest = 0.0
    for place, name in enumerate(sorted(chances, key=lambda name: chances[name])):
        largest = max(largest, min(1.0, chances[name] * (len(chances) - place)))
        corrected[name] = largest
    return corrected


@dataclass(frozen=True)
class Comparison:
    """A kind of run beside another one, in one measure; ``p`` is corrected for the whole family."""

    difference: Difference
    p: float

    @property
    def verdict(self) -> str:
        """``better``, ``worse`` or ``undecided``."""
        if self.p > FAMILY_ERROR:
            return "undecided"
        return "better" if self.difference.mean > 0 else "worse"

    @property
    def is_above_margin(self) -> bool:
        """Whether the whole 95 % interval, which is of this difference alone, is above ``-MARGIN``."""
        return self.difference.low > -MARGIN


def measures_of(block: Block) -> dict[str, Callable[[Outcome], float]]:
    """The measures that a block's tests compare, by their titles."""
    return {name: MEASURED[name] for name in block.measures or MEASURED}


def comparisons(outcomes: Iterable[Outcome], blocks: Sequence[Block]) -> dict[tuple[str, ...], Comparison]:
    """Every comparison of a family of blocks, by ``comparison_key``.

    Empty until all runs of all blocks are there: with a part of them the correction for their number would differ.
    """
    by_key = {outcome.key: outcome for outcome in outcomes}
    if not all(run.key in by_key for block in blocks for run in block.runs):
        return {}
    differences: dict[tuple[str, ...], Difference] = {}
    for block in blocks:
        for kind, other_kind in block.compared_pairs:
            outcomes_of_kind = [by_key[Run(block.setting, *kind, seed).key] for seed in block.seeds]
            outcomes_of_other = [by_key[Run(block.setting, *other_kind, seed).key] for seed in block.seeds]
            for name, measure in measures_of(block).items():
                values = [measure(outcome) for outcome in outcomes_of_kind]
                others = [measure(outcome) for outcome in outcomes_of_other]
                differences[comparison_key(block, kind, other_kind, name)] = difference_of(values, others)
    corrected = holm({name: difference.p for name, difference in differences.items()})
    return {name: Comparison(difference, corrected[name]) for name, difference in differences.items()}


def comparison_key(block: Block, kind: Kind, other_kind: Kind, measure: str) -> tuple[str, ...]:
    """The key of a comparison: setting, mismatch, correction, the other kind's mismatch and correction, measure."""
    names = [part.name for part in (*kind, *other_kind)]
    return block.setting.name, *names, measure
