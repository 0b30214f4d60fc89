"""Numbers of a token that need other tokens of its sequence: of the tokens before it, and of its turn.

The tokens of a sequence may lie on several CP ranks, in one or two chunks of consecutive tokens each.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from megatron_rc.correction.inputs import Part, Shards
from megatron_rc.numerics import is_log_prob
from megatron_rc.parallel.collectives import sum_each
from megatron_rc.parallel.groups import Group
from megatron_rc.parallel.recurrence import MINIMA, Recurrence, neighbouring_values
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.criteria import K1
from megatron_rc.settings.criterion import Need, SequenceValues


@dataclass(frozen=True)
class HistoryValues:
    """Log weights and turn statistics of one micro-batch's tokens: local shape, float64, 0 if invalid."""

    log_weight: Tensor | None  # unbounded; None: the level is token or sequence, and others compute the weight
    statistics: dict[str, Tensor]  # by the name of each criterion on turns: its statistic


def history_values(shards: Shards, config: RolloutCorrectionConfig, cp: Group | None) -> list[HistoryValues]:
    """Return the log weights and turn statistics of each micro-batch; call it if ``config.needs_history``.

    Collectives: one SUM over each CP group for weights of prefixes, two for turns.

    Raises:
        ValueError: slices of sequences without their CP group.
    """
    if any(part.layout.cp(cp) is None and part.layout.cp_size > 1 for part in shards.parts):
        given = f"rollout_is={config.rollout_is!r}, rollout_rs={config.rollout_rs!r}"
        raise ValueError(f"{given} needs the other slices of a sequence before its sums: pass cp=, or whole sequences")
    level = config.level
    log_weights: list[Tensor | None] = [None] * len(shards.parts)
    statistics: list[dict[str, Tensor]] = [{} for _ in shards.parts]
    if level is not None and level.before is not None:
        log_weights = [*_prefix_log_weights(shards, level.before, cp)]

    criteria = [criterion for criterion in config.criteria if criterion.unit == "turn"]
    weighs_turns = level is not None and level.unit == "turn"
    if criteria or weighs_turns:
        needs = dict.fromkeys([Need("sum", K1), *(need for criterion in criteria for need in criterion.needs)])
        for index, turns in enumerate(_turns(shards, list(needs), cp)):
            statistics[index] = {
                criterion.name: turns.of_tokens(criterion.statistic(turns.values)) for criterion in criteria
            }
            if level is not None and weighs_turns:
                log_weight = turns.values.sum(K1)
                if level.mean:
                    log_weight = log_weight / turns.values.num_tokens
                log_weights[index] = turns.of_tokens(log_weight)
    return [HistoryValues(*values) for values in zip(log_weights, statistics, strict=True)]


def _valid(part: Part) -> Tensor:
    """Return where a token is in the response mask, with two usable log-probs: bool, the local shape."""
    return part.mask & is_log_prob(part.train) & is_log_prob(part.rollout)


def _prefix_log_weights(shards: Shards, before: str, cp: Group | None) -> list[Tensor]:
    """Return log w_t of each token: log ρ_t plus the sum, or the smallest, of log ρ_j over valid tokens j < t."""
    log_ratios = []
    recurrences = []
    for part in shards.parts:
        valid = _valid(part)
        log_ratio = torch.where(valid, part.train.double() - part.rollout.double(), 0)
        log_ratios.append(log_ratio)
        if before == "sum":
            recurrences.append(Recurrence(part.layout, torch.ones_like(log_ratio), log_ratio))
        else:
            offsets = torch.where(valid, log_ratio, torch.inf)
            recurrences.append(Recurrence(part.layout, torch.zeros_like(offsets), offsets, algebra=MINIMA))

    log_weights = []
    for part, log_ratio, earlier in zip(shards.parts, log_ratios, neighbouring_values(recurrences, cp), strict=True):
        # The smallest of no values is infinite.
        log_weight = log_ratio + torch.where(earlier.isinf(), 0, earlier)
        log_weights.append(torch.where(_valid(part), log_weight, 0))
    return log_weights


@dataclass(frozen=True)
class Turns:
    """The turns of one micro-batch, of which the local tokens are a part."""

    values: SequenceValues  # of each turn: number of valid tokens, sums and extremes of x
    turn_of_token: Tensor  # [t] int64, the index of each local token's turn
    valid: Tensor  # bool, the local shape

    def of_tokens(self, per_turn: Tensor) -> Tensor:
        """Return for each token the value of its turn, 0 if the token is invalid; the local shape."""
        return torch.where(self.valid, per_turn[self.turn_of_token].view(self.valid.shape), 0)


def _turns(shards: Shards, needs: Sequence[Need], cp: Group | None) -> list[Turns]:
    """Return the turns of each micro-batch, with the sums and extremes in ``needs`` over each whole turn.

    A turn is a run of consecutive tokens with the same key: the turn id, or without ids the response mask's value. A
    turn may lie in several chunks of a sequence, which may lie on several CP ranks. So each rank reduces the turns in
    each of its chunks separately. Then all ranks learn the first and the last turn of every chunk, and join the last
    turn of a chunk with the first turn of the next one if their keys are equal.

    Collectives: two SUMs over each CP group, of 2 and of 2 (1 + number of needs) + 1 doubles for each chunk.
    """
    micro_batches = [_LocalTurns(part, needs) for part in shards.parts]
    on_several_ranks = [turns for turns in micro_batches if turns.layout.cp_size > 1]
    groups = [turns.layout.cp(cp) for turns in on_several_ranks]
    all_keys = sum_each([turns.edge_keys() for turns in on_several_ranks], groups)
    all_edges = sum_each([turns.edge_numbers() for turns in on_several_ranks], groups)
    for turns, keys, edges in zip(on_several_ranks, all_keys, all_edges, strict=True):
        turns.add_other_chunks(keys, edges)
    return [turns.whole() for turns in micro_batches]


class _LocalTurns:
    """The turns of the local tokens of one micro-batch; until ``add_other_chunks`` a turn ends where its chunk ends.

    There is room for as many turns as there are tokens, so that no shape depends on data.

    Attributes:
        layout: which tokens these are.
        numbers: [t, k] float64, of each turn: the number of valid tokens, then the sums of x, then the extremes, all
            as smallest values: for a largest x the smallest -x.
    """

    def __init__(self, part: Part, needs: Sequence[Need]) -> None:
        self.layout = part.layout
        self._valid = _valid(part)
        self._key = (part.mask if part.turn_ids is None else part.turn_ids).flatten()
        self._turn = self._numbered_turns()
        # Sums come first in the numbers, because they are joined in another way than extremes.
        self._sums = [need for need in needs if need.how == "sum"]
        self._extremes = [need for need in needs if need.how != "sum"]
        self._num_sums = 1 + len(self._sums)
        self.numbers = self._reduced(part)

    def whole(self) -> Turns:
        """Return the turns as they are known now."""
        num_tokens, *sums = self.numbers[:, : self._num_sums].unbind(1)
        named = {need.name: values for need, values in zip(self._sums, sums, strict=True)}
        for need, values in zip(self._extremes, self.numbers[:, self._num_sums :].unbind(1), strict=True):
            named[need.name] = -values if need.how == "max" else values
        of_turns = SequenceValues(num_tokens.clamp(min=1), torch.zeros_like(num_tokens), named)
        return Turns(of_turns, self._turn, self._valid)

    def edge_keys(self) -> Tensor:
        """Return the keys (see :func:`_turns`) of each chunk's first and last token, [chunks, 2].

        Chunks of other ranks have 0, so that a SUM over ranks has the keys of all chunks.
        """
        chunks, firsts, lasts = self._local_chunks
        keys = self._key.double()
        edges = torch.stack([keys[firsts], keys[lasts]], dim=1)
        return edges.new_zeros(self._num_chunks(), 2).index_copy_(0, chunks, edges)

    def edge_numbers(self) -> Tensor:
        """Return of each chunk the numbers of its first and its last turn, [chunks, 2k + 1]; 0 for other ranks' chunks.

        The last column is 1 if both are one turn.
        """
        chunks, firsts, lasts = self._local_chunks
        first_turns = self._turn[firsts]
        last_turns = self._turn[lasts]
        is_one_turn = (first_turns == last_turns).double().unsqueeze(1)
        edges = torch.cat([self.numbers[first_turns], self.numbers[last_turns], is_one_turn], dim=1)
        return edges.new_zeros(self._num_chunks(), edges.shape[1]).index_copy_(0, chunks, edges)

    def add_other_chunks(self, keys: Tensor, edges: Tensor) -> None:
        """Join the turns with their parts in other chunks: ``edge_keys`` and ``edge_numbers``, summed over ``cp``."""
        num_chunks = self.layout.num_chunks
        width = self.numbers.shape[1]
        first_keys, last_keys = keys.view(-1, num_chunks, 2).unbind(2)
        by_sequence = edges.view(-1, num_chunks, edges.shape[1])
        first_turns = by_sequence[..., :width]
        last_turns = by_sequence[..., width : 2 * width]
        is_one_turn = by_sequence[..., 2 * width :] > 0
        nothing = self._nothing(by_sequence[:, 0, :1])

        # before[c]: what the first turn of chunk c has in the chunks before c; after[c]: its last turn, behind c.
        before = [nothing]
        after = [nothing]
        for left, right in pairwise(range(num_chunks)):
            goes_on = (last_keys[:, left] == first_keys[:, right]).unsqueeze(1)
            earlier = torch.where(is_one_turn[:, left], before[-1], nothing)
            before.append(torch.where(goes_on, self._join(last_turns[:, left], earlier), nothing))
        for left, right in reversed([*pairwise(range(num_chunks))]):
            goes_on = (last_keys[:, left] == first_keys[:, right]).unsqueeze(1)
            later = torch.where(is_one_turn[:, right], after[0], nothing)
            after.insert(0, torch.where(goes_on, self._join(first_turns[:, right], later), nothing))

        chunks, firsts, lasts = self._local_chunks
        for tokens, others in ((firsts, before), (lasts, after)):
            per_chunk = torch.stack(others, dim=1).view(-1, width)[chunks]
            added = self._nothing(self.numbers[:, :1]).index_copy(0, self._turn[tokens], per_chunk)
            self.numbers = self._join(self.numbers, added)

    def _numbered_turns(self) -> Tensor:
        """Return the index of each token's turn, [t] int64, ascending."""
        chunk = self.layout.chunk_index.to(self._key.device, non_blocking=True)
        begins = (self._key[1:] != self._key[:-1]) | (chunk[1:] != chunk[:-1])
        turn = torch.zeros_like(chunk)
        turn[1:] = begins.cumsum(0)
        return turn

    def _reduced(self, part: Part) -> Tensor:
        """Return the numbers of the turns of the local tokens."""
        train = torch.where(self._valid, part.train, 0).double()
        rollout = torch.where(self._valid, part.rollout, 0).double()
        columns = [self._valid.double()]
        for need in (*self._sums, *self._extremes):
            values = need.divergence.values(train, rollout, train - rollout)
            if need.how != "sum":
                values = torch.where(self._valid, -values if need.how == "max" else values, torch.inf)
            columns.append(values)
        table = torch.stack(columns, dim=-1).view(-1, len(columns))
        sums = torch.zeros_like(table[:, : self._num_sums]).index_add_(0, self._turn, table[:, : self._num_sums])
        if not self._extremes:
            return sums
        values = table[:, self._num_sums :]
        index = self._turn.unsqueeze(1).expand(values.shape)
        return torch.cat([sums, torch.full_like(values, torch.inf).scatter_reduce_(0, index, values, "amin")], dim=1)

    def _join(self, numbers: Tensor, others: Tensor) -> Tensor:
        """Return the numbers of turns from those of their two parts."""
        first_extreme = self._num_sums
        sums = numbers[..., :first_extreme] + others[..., :first_extreme]
        minima = torch.minimum(numbers[..., first_extreme:], others[..., first_extreme:])
        return torch.cat([sums, minima], dim=-1)

    def _nothing(self, like: Tensor) -> Tensor:
        """Return [rows, k], the numbers of no tokens, for as many rows as ``like``, [rows, 1], has."""
        sums = torch.zeros_like(like).repeat(1, self._num_sums)
        return torch.cat([sums, torch.full_like(like, torch.inf).repeat(1, len(self._extremes))], dim=1)

    def _num_chunks(self) -> int:
        """Return the number of chunks of all sequences, on all CP ranks."""
        return self.layout.num_sequences * self.layout.num_chunks

    @functools.cached_property
    def _local_chunks(self) -> tuple[Tensor, Tensor, Tensor]:
        """The indices of the local chunks, and of their first and last tokens, [c] int64 each."""
        chunk = self.layout.chunk_index
        edge = chunk[1:] != chunk[:-1]
        outside = edge.new_ones(min(len(chunk), 1))
        firsts = torch.cat([outside, edge]).nonzero().flatten()
        lasts = torch.cat([edge, outside]).nonzero().flatten()
        device = self._key.device
        indices = [values.to(device, non_blocking=True) for values in (chunk[firsts], firsts, lasts)]
        return indices[0], indices[1], indices[2]
