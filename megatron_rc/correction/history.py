"""Numbers of a token that need other tokens of its sequence: of the tokens before it, and of its turn.

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
from megatron_rc.parallel.recurrence import MINIMA, SUMS, Algebra, Recurrence, neighbouring_values
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.criteria import K1
from megatron_rc.settings.criterion import Need, SequenceValues


@dataclass(frozen=True)
class HistoryValues:
    """Numbers of the tokens of one micro-batch, of the layout's local shape, float64, 0 if invalid."""

    log_weight: Tensor | None  # log of the unbounded weight; None: it is log ρ, or of the whole sequence
    statistics: dict[str, Tensor]  # by the name of each criterion on turns: its statistic


def history_values(shards: Shards, config: RolloutCorrectionConfig, cp: Group | None) -> list[HistoryValues]:
    """The numbers of each micro-batch, if the correction needs any (``config.needs_history``).

    Collectives: one SUM over each CP group for weights of prefixes, two for turns.

    Raises:
        ValueError: slices of sequences without their CP group.
    """
    if any(part.layout.cp(cp) is None and part.layout.cp_size > 1 for part in shards.parts):
        given = f"rollout_is={config.rollout_is!r}, rollout_rs={config.rollout_rs!r}"
        raise ValueError(f"{given} needs the other slices of a sequence before its sums: pass cp=, or whole sequences")
    level, criteria = config.level, [criterion for criterion in config.criteria if criterion.unit == "turn"]
    log_weights: list[Tensor | None] = [None] * len(shards.parts)
    turns: list[SequenceValues] = []
    if level is not None and level.before is not None:
        log_weights = [*_log_weights(shards, level.before, cp)]
    if criteria or (level is not None and level.unit == "turn"):
        needs = dict.fromkeys([Need("sum", K1), *(need for criterion in criteria for need in criterion.needs)])
        turns = _turns(shards, list(needs), cp)
    if level is not None and level.unit == "turn":
        log_weights = [turn.sum(K1) / (turn.num_tokens if level.mean else 1) for turn in turns]
    found = []
    for number, (part, log_weight) in enumerate(zip(shards.parts, log_weights, strict=True)):
        statistics = {criterion.name: _cleared(criterion.statistic(turns[number]), part) for criterion in criteria}
        found.append(HistoryValues(None if log_weight is None else _cleared(log_weight, part), statistics))
    return found


def _valid(part: Part) -> Tensor:
    return part.mask & is_log_prob(part.train) & is_log_prob(part.rollout)


def _cleared(values: Tensor, part: Part) -> Tensor:
    """The values of the valid tokens, 0 elsewhere."""
    return torch.where(_valid(part), values, 0)


def _log_ratio(part: Part) -> Tensor:
    return _cleared(part.train.double() - part.rollout.double(), part)


def _log_weights(shards: Shards, before: str, cp: Group | None) -> list[Tensor]:
    """Log w_t: log ρ_t plus the sum, or the smallest, of log ρ_j over the valid tokens j < t of the sequence."""
    log_ratios, recurrences = [_log_ratio(part) for part in shards.parts], []
    for part, log_ratio in zip(shards.parts, log_ratios, strict=True):
        if before == "sum":
            recurrences.append(Recurrence(part.layout, torch.ones_like(log_ratio), log_ratio))
        else:
            offsets = torch.where(_valid(part), log_ratio, torch.inf)
            recurrences.append(Recurrence(part.layout, torch.zeros_like(offsets), offsets, algebra=MINIMA))
    found = neighbouring_values(recurrences, cp)
    # The smallest of no values is infinite.
    return [own + torch.where(other.isinf(), 0, other) for own, other in zip(log_ratios, found, strict=True)]


def _turns(shards: Shards, needs: Sequence[Need], cp: Group | None) -> list[SequenceValues]:
    """Sums and extremes over the valid tokens of each token's turn, for each micro-batch.

    A turn is a run of consecutive tokens with one turn id, or without ids a run of the response mask.
    """
    turns = [(part.layout, part.mask if part.turn_ids is None else part.turn_ids) for part in shards.parts]
    # With a coefficient of 0 the recurrence's value is the token's own id.
    ids = [Recurrence(one, torch.zeros_like(own), own, backward) for one, own in turns for backward in (False, True)]
    goes_on = [one.offsets == other for one, other in zip(ids, neighbouring_values(ids, cp), strict=True)]
    recurrences = [
        Recurrence(part.layout, torch.where(same, algebra.same, algebra.nothing), values, bool(backward), algebra)
        for number, part in enumerate(shards.parts)
        for algebra, values in _columns(part, needs)
        for backward, same in enumerate(goes_on[2 * number : 2 * number + 2])
    ]
    outside = neighbouring_values(recurrences, cp)
    # The tokens before and after, if they are of the same turn.
    sides = [one.algebra.scale(one.coefficients, other) for one, other in zip(recurrences, outside, strict=True)]
    wholes = [
        one.algebra.join(one.offsets, one.algebra.join(before, after))
        for one, before, after in zip(recurrences[::2], sides[::2], sides[1::2], strict=True)
    ]
    found = []
    for first in range(0, len(wholes), 1 + len(needs)):
        num_tokens, *of_needs = wholes[first : first + 1 + len(needs)]
        signs = [-1 if need.how == "max" else 1 for need in needs]
        named = {need.name: sign * whole for need, sign, whole in zip(needs, signs, of_needs, strict=True)}
        found.append(SequenceValues(num_tokens.clamp(min=1), torch.zeros_like(num_tokens), named))
    return found


def _columns(part: Part, needs: Sequence[Need]) -> list[tuple[Algebra, Tensor]]:
    """The numbers that are joined over a turn: 1 for each valid token, then x of each need; a largest x negated."""
    valid = _valid(part)
    train, rollout = (torch.where(valid, values.double(), 0) for values in (part.train, part.rollout))
    log_ratio = train - rollout
    found = [(SUMS, valid.double())]
    for need in needs:
        values = need.divergence.values(train, rollout, log_ratio)
        if need.how == "sum":
            found.append((SUMS, torch.where(valid, values, 0)))
        else:
            found.append((MINIMA, torch.where(valid, -values if need.how == "max" else values, torch.inf)))
    return found
