"""Levels of the importance weights: a table with one object each.

To add a level, put an object into the table. Flags, errors, descriptions, weights and metrics follow from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class WeightLevel:
    """One level of the importance weights: which tokens share a weight, and how it follows from their log ρ.

    Attributes:
        name: the value of the field ``rollout_is``.
        words: the weight in words and as a formula, for descriptions.
        unit: the tokens that share one weight: all of a ``sequence``, those of a ``turn``, or one ``token`` alone.
        mean: True if log w is the mean of log ρ over the unit's tokens; False if it is their sum.
        before: for the unit ``token``: log w_t is log ρ_t plus the ``sum`` of log ρ_j over the tokens j < t of its
            sequence, or plus the smallest of them (``min``). None: log w_t is log ρ_t.
    """

    name: str
    words: str
    unit: Literal["token", "turn", "sequence"]
    mean: bool = False
    before: Literal["sum", "min"] | None = None


_TABLE = (
    WeightLevel("token", "token weights w_t = ρ_t", unit="token"),
    WeightLevel("sequence", "sequence weights w = Π ρ_t", unit="sequence"),
    WeightLevel("geometric", "sequence weights w = (Π ρ_t)^(1/n), the geometric mean", unit="sequence", mean=True),
    WeightLevel("turn", "turn weights w = Π ρ_t over the tokens of a turn", unit="turn"),
    WeightLevel("turn_geometric", "turn weights w = (Π ρ_t)^(1/n) over the n tokens of a turn", unit="turn", mean=True),
    # Precup, Sutton, Singh 2000, "Eligibility Traces for Off-Policy Policy Evaluation".
    WeightLevel("prefix", "prefix weights w_t = Π ρ_j over j <= t", unit="token", before="sum"),
    # Lei et al. 2026, "A Step Back: Prefix Importance Ratio Stabilizes Policy Optimization".
    WeightLevel("min_prefix", "MinPRO weights w_t = ρ_t · min ρ_j over j < t", unit="token", before="min"),
)
LEVELS = {level.name: level for level in _TABLE}
