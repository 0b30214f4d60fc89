"""Facts: numbers that the rules judge, under the names of ``docs/metrics.md`` without a prefix."""

from __future__ import annotations

import math


class Facts(dict[str, float]):
    """Numbers by name; a missing one reads as NaN, so that every comparison with it is False."""

    def __missing__(self, name: str) -> float:
        return math.nan

    def has(self, *names: str) -> bool:
        """Whether all of these are known."""
        return all(name in self for name in names)
