"""Metrics from the numbers of a whole batch: a mean is a quotient of two sums, never a mean of means.

The metrics stand in ``megatron_rc/measures/table.py``. This module has their arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megatron_rc.measures.header import BatchHeader, Moments
from megatron_rc.numerics import NORMALIZE_LIMIT
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.criterion import Criterion


@dataclass(frozen=True)
class Numbers:
    """What a metric is made of: the numbers of a whole batch; for some metrics a criterion, or a bucket of tokens."""

    header: BatchHeader[float]
    config: RolloutCorrectionConfig
    criterion: Criterion | None = None  # of metrics that each criterion has
    bucket: tuple[float, float, float] = (0.0, 0.0, 0.0)  # valid tokens, rejected tokens, Σ log ρ: of breakdowns

    def total(self, name: str) -> float:
        """Return a sum over sequences, by its name in ``BatchHeader.totals``."""
        return self.header.totals[name]

    @property
    def tokens(self) -> float:
        """The number of valid tokens: T."""
        return self.total("tokens")

    @property
    def sequences(self) -> float:
        """The number of sequences with a valid token: S."""
        return self.total("sequences")

    def of_tokens(self, name: str) -> Moments[float]:
        """Return the moments of a quantity over valid tokens."""
        return self.header.tokens.moments[name]

    def of_sequences(self, name: str) -> Moments[float]:
        """Return the moments of a quantity over sequences."""
        return self.header.sequence_moments[name]

    @property
    def accepted(self) -> float:
        """The number of accepted tokens."""
        accepted: float = sum(counts[2] for counts in self.header.denominators.counts)
        return accepted

    @property
    def mean_weight(self) -> float:
        """w̄, the mean weight that batch normalisation divides by."""
        return ratio(self.header.denominators.total_weight, self.header.denominators.weight_count)

    @property
    def is_normalized(self) -> bool:
        """True if the weights were divided by w̄."""
        return self.config.rollout_is_batch_normalize and self.mean_weight > NORMALIZE_LIMIT

    @property
    def divisor(self) -> float:
        """The number that the weights were divided by: w̄, or 1."""
        return self.mean_weight if self.is_normalized else 1.0

    @property
    def name(self) -> str:
        """The name of the criterion."""
        return "" if self.criterion is None else self.criterion.name

    @property
    def is_negated(self) -> bool:
        """True if the criterion has bounds on ρ: its metrics describe -log ρ, as verl's: high and low change places."""
        return self.criterion is not None and self.criterion.bounds.on_ratio

    @property
    def sign(self) -> float:
        """-1 if the criterion's metrics describe -log ρ, else 1."""
        return -1.0 if self.is_negated else 1.0

    @property
    def sequences_outside(self) -> tuple[float, float]:
        """Shares of sequences whose statistic is above the criterion's bounds, and below them."""
        above = self.total(f"{self.name}_above")
        below = self.total(f"{self.name}_below")
        return ratio(above, self.sequences), ratio(below, self.sequences)

    @property
    def units_outside(self) -> tuple[float, float]:
        """The same shares of what the criterion tests: of tokens, or of sequences."""
        if self.criterion is None or not self.criterion.of_tokens:
            return self.sequences_outside
        above = self.header.tokens.totals[f"{self.name}_above"]
        return ratio(above, self.tokens), ratio(self.total(f"{self.name}_rejected") - above, self.tokens)

    def range_of(self, moments: Moments[float]) -> tuple[float, float]:
        """Return (smallest, largest) value of the criterion's statistic; of -log ρ if the metrics describe that."""
        smallest = extreme(moments.smallest)
        largest = extreme(moments.largest)
        return (0.0 - largest, 0.0 - smallest) if self.is_negated else (smallest, largest)

    @property
    def tested_range(self) -> tuple[float, float]:
        """(smallest, largest) number that the criterion tests, of a token or of a sequence."""
        is_of_tokens = self.criterion is not None and self.criterion.of_tokens
        return self.range_of(self.of_tokens(self.name) if is_of_tokens else self.of_sequences(self.name))

    @property
    def statistic_range(self) -> tuple[float, float]:
        """(smallest, largest) statistic of a sequence."""
        return self.range_of(self.of_sequences(self.name))


@dataclass(frozen=True)
class Metric:
    """One metric of the correction.

    Attributes:
        name: without the prefix; ``<…>`` stands for the name of a criterion or of a bucket.
        numerator: function from the numbers of the batch to the numerator, or to the metric if nothing is divided.
        over: the denominator: ``T`` valid tokens, ``S`` sequences with a valid token, ``T of the bucket``; empty:
            nothing is divided.
        formula: what one token or sequence adds, in words or symbols, for docs/metrics.md.
        values: the range of the metric, for docs/metrics.md.
        advice: one sentence for docs/metrics.md: a bad value, and what to do.
        when: whether a batch has this metric; None: always.
    """

    name: str
    numerator: Callable[[Numbers], float]
    over: Literal["T", "S", "T of the bucket", ""]
    formula: str
    values: str
    advice: str
    when: Callable[[Numbers], bool] | None = None

    def value(self, numbers: Numbers) -> float:
        """Return the metric; 0 if nothing was counted."""
        numerator = self.numerator(numbers)
        if self.over == "T":
            return ratio(numerator, numbers.tokens)
        if self.over == "S":
            return ratio(numerator, numbers.sequences)
        if self.over == "T of the bucket":
            return ratio(numerator, numbers.bucket[0])
        return numerator + 0.0  # a negative zero becomes a positive one


def ratio(numerator: float, denominator: float) -> float:
    """Return the quotient; 0 if nothing was counted."""
    # + 0.0 turns a negative zero into a positive one.
    return numerator / denominator + 0.0 if denominator else 0.0


def extreme(value: float | None) -> float:
    """Return a largest or smallest value; 0 of no values."""
    return 0.0 if value is None or math.isinf(value) else value + 0.0


def eff_sample_size(weights: Moments[float]) -> float:
    """Return (Σ w)² / (n Σ w²) of n weights, in (0, 1]; 0 of no weights, or if all of them are 0.

    Kong 1992, "A Note on Importance Sampling using Standardized Weights".
    """
    # Rounding may take equal weights to just above 1.
    return min(ratio(weights.total * weights.total, weights.count * weights.squared), 1.0)


def sequence_eff_sample_size(header: BatchHeader[float]) -> float:
    """Effective sample size of the unbounded weights w = Π ρ of the sequences with a valid token; 0 without one."""
    return eff_sample_size(header.sequence_moments["sequence_ratio"])


def std(moments: Moments[float], *, lost: int = 0) -> float:
    """Return the standard deviation, with ``count - lost`` in its denominator; 0 for too few values.

    ``lost`` is 1 for the deviation of a sample, as verl's over sequences.
    """
    if moments.count <= lost:
        return 0.0
    squared_distances = moments.squared - moments.total * moments.total / moments.count
    return math.sqrt(max(squared_distances, 0.0) / (moments.count - lost))


def weight_std(weights: Moments[float], excess: Moments[float], *, lost: int = 0) -> float:
    """Return the standard deviation of weights w, from the moments of w and of w - 1.

    A small variance must not be the difference of two large numbers: weights around 1 are taken less 1.
    """
    if not weights.count:
        return 0.0
    mean = weights.total / weights.count
    return std(excess if mean > 0.5 else weights, lost=lost)
