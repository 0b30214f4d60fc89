"""Numbers of a token that need other tokens of its sequence: sums over the tokens before it, and over its turn.

The tokens of a sequence may lie on several CP ranks, in two chunks each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.correction.inputs import Part, Shards
from megatron_rc.numerics import is_log_prob
from megatron_rc.parallel.groups import Group
from megatron_rc.parallel.recurrence import MINIMA, SUMS, Recurrence, neighbouring_values
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.criterion import Need, SequenceValues
from megatron_rc.settings.levels import PRODUCT


@dataclass(frozen=True)
class HistoryValues:
    """Numbers of the tokens of one micro-batch, of the layout's local shape, float64."""

    log_weight: Tensor | None  # log of the unbounded weight; None: it is log ρ, or of the whole sequence
    statistics: dict[str, Tensor]  # by the name of each criterion on turns: its statistic


class SequenceTokens:
    """The tokens of one micro-batch, with functions of the other tokens of their sequences.

    Attributes:
        log_ratio: log ρ, 0 if invalid; float64, of the layout's local shape.
        valid: bool: tokens of the response mask with two usable log-probs.
    """

    def __init__(self, part: Part, cp: Group | None) -> None:
        self._layout, self._cp, self._turn_ids = part.layout, cp, part.turn_ids
        self.valid = part.mask & is_log_prob(part.train) & is_log_prob(part.rollout)
        self.log_ratio = self.cleared(part.train.double() - part.rollout.double())

    def sum_before(self) -> Tensor:
        """Σ log ρ over the valid tokens before each token. Collectives: one SUM over ``cp``."""
        return self._neighbours([Recurrence(torch.ones_like(self.log_ratio), self.log_ratio)])[0]

    def smallest_before(self) -> Tensor:
        """The smallest log ρ of a valid token before each token, 0 without one. Collectives: one SUM over ``cp``."""
        offsets = torch.where(self.valid, self.log_ratio, torch.inf)
        (smallest,) = self._neighbours([Recurrence(torch.zeros_like(offsets), offsets, algebra=MINIMA)])
        return torch.where(smallest.isinf(), 0, smallest)

    def turns(self, needs: Sequence[Need]) -> SequenceValues:
        """Sums and extremes over the valid tokens of each token's turn. Collectives: two SUMs over ``cp``.

        A turn is a run of consecutive tokens with one turn id, or without ids a run of the response mask.
        """
        ids, nothing = self._turn_ids.double(), torch.zeros_like(self.log_ratio)
        # With a coefficient of 0 the recurrence's value is the token's own id.
        before, after = self._neighbours([Recurrence(nothing, ids), Recurrence(nothing, ids, backward=True)])
        goes_on = before == ids, after == ids
        columns = [(SUMS, self.valid.double())]
        for need in needs:
            values = self.log_ratio if need.divergence.of is None else need.divergence.of(self.log_ratio)
            if need.how == "sum":
                columns.append((SUMS, self.cleared(values)))
            else:
                values = -values if need.how == "max" else values
                columns.append((MINIMA, torch.where(self.valid, values, torch.inf)))
        recurrences = [
            Recurrence(torch.where(same, algebra.same, algebra.nothing), values, backward, algebra)
            for algebra, values in columns
            for backward, same in enumerate(goes_on)
        ]
        outside = iter(zip(recurrences, self._neighbours(recurrences), strict=True))
        found = []
        for algebra, values in columns:
            for one, value in (next(outside), next(outside)):
                values = algebra.join(values, algebra.scale(one.coefficients, value))
            found.append(values)
        num_tokens, *totals = found
        signs = [-1 if need.how == "max" else 1 for need in needs]
        named = {need.name: sign * total for need, sign, total in zip(needs, signs, totals, strict=True)}
        return SequenceValues(num_tokens.clamp(min=1), nothing, named)

    def cleared(self, values: Tensor) -> Tensor:
        """The values of the valid tokens, 0 elsewhere."""
        return torch.where(self.valid, values, 0)

    def _neighbours(self, recurrences: Sequence[Recurrence]) -> list[Tensor]:
        return neighbouring_values(recurrences, self._layout, self._cp)


def history_values(shards: Shards, config: RolloutCorrectionConfig, cp: Group | None) -> list[HistoryValues] | None:
    """The numbers of each micro-batch; None if the correction needs none.

    Collectives of each micro-batch over ``cp``: one SUM for weights of prefixes, two SUMs for turns.
    """
    level, criteria = config.level, [criterion for criterion in config.criteria if criterion.unit == "turn"]
    of_history = None if level is None else level.of_history
    of_turn = level.of_sums if level is not None and level.unit == "turn" else None
    if not criteria and of_turn is None and of_history is None:
        return None
    # The sum of log ρ, which weights need, is among those of a criterion only if it needs it too.
    needs = list(dict.fromkeys([*PRODUCT, *(need for criterion in criteria for need in criterion.needs)]))
    found = []
    for part in shards.parts:
        tokens, statistics = SequenceTokens(part, cp), {}
        log_weight = None if of_history is None else of_history(tokens)
        if criteria or of_turn is not None:
            turns = tokens.turns(needs)
            log_weight = log_weight if of_turn is None else of_turn(turns)
            statistics = {criterion.name: tokens.cleared(criterion.statistic(turns)) for criterion in criteria}
        found.append(HistoryValues(None if log_weight is None else tokens.cleared(log_weight), statistics))
    return found
