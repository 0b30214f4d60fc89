"""Means, deviations and extremes of a batch, from its sums."""

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


def weight_moments(total: float, excess_squared: float, squared: float | None, count: float) -> dict[str, float]:
    """Mean, deviation and effective sample size of weights, from Σ w, Σ (w - 1)² and, if known by itself, Σ w²."""
    mean = ratio(total, count)
    # About 1, so that a small variance is not the difference of two large numbers.
    std = spread(mean - 1, ratio(excess_squared, count)) if count else 0.0
    mean_square = std**2 + mean**2 if squared is None else ratio(squared, count)
    # ESS = (Σ w)² / (n Σ w²), a fraction of the tokens.
    return {"mean": mean, "std": std, "eff_sample_size": ratio(mean**2, mean_square)}
