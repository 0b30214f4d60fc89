"""Levels of the importance weights: a table with one object each.

To add a level, put an object into the table. Flags, errors, descriptions, weights and metrics follow from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from megatron_rc.settings.criteria import K1
from megatron_rc.settings.criterion import Need, SequenceValues

PRODUCT = (Need("sum", K1),)  # the sum that ``of_sums`` uses


@dataclass(frozen=True)
class WeightLevel:
    """One level of the importance weights.

    Attributes:
        name: the value of ``rollout_is``.
        words: the weight in words and as a formula.
        unit: the tokens that share a weight: of a ``sequence``, of a ``turn``, or each ``token`` by itself.
        of_sums: log w from the sums over the tokens of the unit; None for the unit token.
        before: log w_t is log ρ_t, plus the ``sum`` of log ρ_j over j < t, or plus the smallest of them (``min``).
    """

    name: str
    words: str
    unit: Literal["token", "turn", "sequence"]
    of_sums: Callable[[SequenceValues], Tensor] | None = None
    before: Literal["sum", "min"] | None = None

    @property
    def of_tokens(self) -> bool:
        """Whether tokens of one sequence have different weights."""
        return self.unit != "sequence"

    @property
    def of_single_tokens(self) -> bool:
        """Whether a weight is the ratio of one token alone."""
        return self.unit == "token" and self.before is None


def _product(values: SequenceValues) -> Tensor:
    return values.sum(K1)


def _geometric_mean(values: SequenceValues) -> Tensor:
    return values.sum(K1) / values.num_tokens


_TABLE = (
    WeightLevel("token", "token weights w_t = ρ_t", "token"),
    WeightLevel("sequence", "sequence weights w = Π ρ_t", "sequence", _product),
    WeightLevel("geometric", "sequence weights w = (Π ρ_t)^(1/n), the geometric mean", "sequence", _geometric_mean),
    WeightLevel("turn", "turn weights w = Π ρ_t over the tokens of a turn", "turn", _product),
    WeightLevel(
        "turn_geometric", "turn weights w = (Π ρ_t)^(1/n) over the n tokens of a turn", "turn", _geometric_mean
    ),
    # Precup, Sutton, Singh 2000, "Eligibility Traces for Off-Policy Policy Evaluation".
    WeightLevel("prefix", "prefix weights w_t = Π ρ_j over j <= t", "token", before="sum"),
    # Lei et al. 2026, "A Step Back: Prefix Importance Ratio Stabilizes Policy Optimization".
    WeightLevel("min_prefix", "MinPRO weights w_t = ρ_t · min ρ_j over j < t", "token", before="min"),
)
LEVELS = {level.name: level for level in _TABLE}
