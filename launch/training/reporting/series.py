"""Series of a run's metrics, as its page and its picture draw them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import fmean

from megatron_rc.drawing.charts import Curve

MOST_POINTS = 600  # longer series are drawn in stretches
NUM_STRETCHES = 300
_USUAL_PREFIX = "rollout_corr/"


@dataclass
class Series:
    """One metric over a run, in the order of its steps.

    Attributes:
        steps: steps with a finite value.
        values: one value for each of these steps.
        num_not_finite: values that are NaN or infinite, which are left out.
    """

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    num_not_finite: int = 0

    def add(self, step: int, value: float) -> None:
        """Add the value of a later step."""
        if math.isfinite(value):
            self.steps.append(step)
            self.values.append(value)
        else:
            self.num_not_finite += 1

    def mean_of_last(self, number: int) -> float:
        """Mean of the last values; the series has at least one."""
        return fmean(self.values[-number:])

    def as_curve(self, label: str) -> Curve:
        """Return the series as a curve.

        A long series is cut into stretches: the curve has their means, and the band their smallest and largest values.
        """
        number = len(self.steps)
        if number <= MOST_POINTS:
            return Curve(label, x=self.steps, y=self.values)
        stretches = list(_stretches(number))
        return Curve(
            label,
            x=[fmean(self.steps[stretch]) for stretch in stretches],
            y=[fmean(self.values[stretch]) for stretch in stretches],
            low=[min(self.values[stretch]) for stretch in stretches],
            high=[max(self.values[stretch]) for stretch in stretches],
        )


def _stretches(number: int) -> Iterator[slice]:
    for stretch in range(NUM_STRETCHES):
        yield slice(number * stretch // NUM_STRETCHES, number * (stretch + 1) // NUM_STRETCHES)


def usual_names(row: Mapping[str, float], prefix: str) -> Mapping[str, float]:
    """Metrics of a row with the prefix ``rollout_corr/`` instead of ``--metric-prefix``.

    The prefix ``mismatch/`` of old dashboards appears twice in a name: ``mismatch/mismatch_kl``.
    """
    if prefix == _USUAL_PREFIX:
        return row
    renamed = {}
    for name, value in row.items():
        if name.startswith(prefix):
            name = _USUAL_PREFIX + name.removeprefix(prefix).removeprefix("mismatch_")
        renamed[name] = value
    return renamed
