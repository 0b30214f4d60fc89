"""Means and deviations from sums, and extremes: the parts of metrics."""

from __future__ import annotations

import math


def ratio(numerator: float, denominator: float) -> float:
    """The quotient; 0 if nothing was counted."""
    # + 0.0 turns a negative zero into a positive one.
    return numerator / denominator + 0.0 if denominator else 0.0


def extreme(value: float) -> float:
    """A largest or smallest value; 0 of no values."""
    return 0.0 if math.isinf(value) else value + 0.0


def spread(mean: float, mean_square: float) -> float:
    """The standard deviation."""
    return math.sqrt(max(mean_square - mean * mean, 0.0))


def sample_std(total: float, total_square: float, count: float) -> float:
    """The standard deviation with n - 1, as verl's over sequences; 0 for fewer than two."""
    return math.sqrt(max(total_square - total * total / count, 0.0) / (count - 1)) if count > 1 else 0.0
