"""Series of a run's metrics for drawing; long ones become means and extremes of stretches of steps."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MOST = 600  # points that are drawn one by one
STRETCHES = 300  # stretches of a series with more points
_USUAL_PREFIX = "rollout_corr/"
_OF_STRETCHES = ("steps", "first", "last", "values", "low", "high")


@dataclass
class Series:
    """One metric over a run, in the order of its steps."""

    steps: array[int] = field(default_factory=lambda: array("q"))  # steps with a value
    values: array[float] = field(default_factory=lambda: array("d"))  # one for each step; may be NaN or infinite

    def finite(self) -> list[tuple[int, float]]:
        """Pairs (step, value) of the finite values."""
        return [pair for pair in zip(self.steps, self.values, strict=True) if math.isfinite(pair[1])]

    def mean_of_last(self, number: int) -> float | None:
        """Mean of the last finite values; None if there are none."""
        last = [value for _, value in self.finite()[-number:]]
        return sum(last) / len(last) if last else None


def usual_names(row: dict[str, float], prefix: str) -> dict[str, float]:
    """Metrics of a row with the prefix ``rollout_corr/`` instead of ``--metric-prefix``.

    The prefix ``mismatch/`` of old dashboards appears twice in a name: ``mismatch/mismatch_kl``.
    """
    if prefix == _USUAL_PREFIX:
        return row
    return {
        _USUAL_PREFIX + name.removeprefix(prefix).removeprefix("mismatch_") if name.startswith(prefix) else name: value
        for name, value in row.items()
    }


def collect(rows: Iterable[Mapping[str, Any]], wanted: Sequence[str]) -> dict[str, Series]:
    """Collect the series of the wanted metrics; a name that ends in ``/`` stands for all that begin with it."""
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
    """A series as data of the page: ``steps``, and ``values`` with None for values that are not finite.

    A long series is cut into stretches. ``values`` are then their means, ``low`` and ``high`` their extreme values,
    ``first`` and ``last`` their first and last steps.
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
    """Series with common steps, so that they can be stacked; 0 for values that are missing."""
    steps = array("q", sorted({step for name in names for step in series[name].steps}))
    known = {name: dict(series[name].finite()) for name in names}
    return {
        name: Series(steps, array("d", [values.get(step, 0.0) for step in steps])) for name, values in known.items()
    }


def _rounded(value: float) -> float | None:
    """A value to five digits, more than a drawing shows; None if it is not finite."""
    return float(f"{value:.5g}") if math.isfinite(value) else None
