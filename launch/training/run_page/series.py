"""The numbers of a run as a page draws them: whole where they are few, else the extremes of every stretch of steps."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Points that are drawn one by one; of more, so many stretches.
MOST, STRETCHES = 600, 300
_OF_STRETCHES = ("steps", "first", "last", "values", "low", "high")


@dataclass
class Series:
    """One metric over a run, in the order of its steps.

    Attributes:
        steps: at which it was measured.
        values: one each; NaN and infinite ones too.
    """

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def finite(self) -> list[tuple[int, float]]:
        """(step, value) of the values that are numbers."""
        return [pair for pair in zip(self.steps, self.values, strict=True) if math.isfinite(pair[1])]

    def mean_of_last(self, number: int) -> float | None:
        """Of the last values that are numbers; None: there is none."""
        last = [value for _, value in self.finite()[-number:]]
        return sum(last) / len(last) if last else None


def collect(rows: Iterable[Mapping[str, Any]], wanted: Sequence[str]) -> dict[str, Series]:
    """The series of these metrics, and of those that begin with a name that ends in ``/``."""
    exact = {name for name in wanted if not name.endswith("/")}
    beginnings = tuple(name for name in wanted if name.endswith("/"))
    found: dict[str, Series] = {}
    for row in rows:
        for name, value in row.items():
            if (name in exact or name.startswith(beginnings)) and isinstance(value, int | float):
                series = found.setdefault(name, Series())
                series.steps.append(int(row["step"]))
                series.values.append(value)
    return found


def drawn(series: Series) -> dict[str, Any]:
    """What the page gets of a series: ``steps`` and ``values``, null where a value is no number.

    Of a long one ``values`` are the means of stretches with as many points each, ``low`` and ``high`` the smallest and
    the largest value there, ``first`` and ``last`` the steps that a stretch begins and ends with: no peak is lost.
    """
    if len(series.steps) <= MOST:
        return {"steps": list(series.steps), "values": [_rounded(value) for value in series.values]}
    number, found = len(series.steps), []
    for stretch in range(STRETCHES):
        part = slice(number * stretch // STRETCHES, number * (stretch + 1) // STRETCHES)
        steps, values = series.steps[part], [value for value in series.values[part] if math.isfinite(value)]
        held = values or [math.nan]
        summary = (sum(held) / len(held), min(held), max(held))
        found.append(((steps[0] + steps[-1]) / 2, steps[0], steps[-1], *map(_rounded, summary)))
    return {name: [stretch[place] for stretch in found] for place, name in enumerate(_OF_STRETCHES)}


def aligned(series: Mapping[str, Series], names: Sequence[str]) -> dict[str, Series]:
    """Series with the same steps, 0 where a metric was not measured, so that they can be stacked."""
    steps = array("q", sorted({step for name in names if name in series for step in series[name].steps}))
    found = {}
    for name in names:
        if name in series:
            known = dict(series[name].finite())
            found[name] = Series(steps, array("d", [known.get(step, 0.0) for step in steps]))
    return found


def _rounded(value: float) -> float | None:
    """Five digits are more than a picture shows."""
    return float(f"{value:.5g}") if math.isfinite(value) else None
