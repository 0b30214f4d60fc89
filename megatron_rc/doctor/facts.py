"""The numbers that the rules look at, under the names of ``docs/metrics.md`` without a prefix."""

from __future__ import annotations

import math


class Facts(dict[str, float]):
    """Numbers by name. One that is missing is NaN, so that no comparison with it holds."""

    def __missing__(self, name: str) -> float:
        return math.nan

    def has(self, *names: str) -> bool:
        """Whether all of these are known."""
        return all(name in self for name in names)
