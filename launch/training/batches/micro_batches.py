"""This rank's part of a rollout batch, cut into the micro-batches of its optimizer steps: padded rows, or packed.

Padded: a micro-batch has ``--micro-batch-size`` rows of ``--seq-length``. Packed: a micro-batch has sequences one after
the other, without their padding, and all micro-batches have the same length. All data-parallel ranks agree on the
number of micro-batches, and add empty ones if they have fewer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron_rc.launch.rollouts.routed_experts import NOT_NEEDED
from megatron_rc.launch.rollouts.teacher_scores import TeacherScores
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.batches.packing import pack
from megatron_rc.parallel import ParallelGroups, SequenceLayout
from megatron_rc.parallel.collectives import all_reduce_sum
from megatron_rc.parallel.groups import group_rank, group_size
from megatron_rc.records.rollout import RolloutBatch
from megatron_rc.records.support import offsets_of, take_support
from megatron_rc.training.micro_batch import MicroBatch

_PER_SEQUENCE = ("sequence_ids", "sequence_lengths", "rewards", "plan_ids")


@dataclass(frozen=True, kw_only=True)
class LocalTokens(MicroBatch):
    """Inputs of the model and of the loss for some sequences on this rank, label-aligned.

    Weights, mask, lengths and the trainer's log-probs are None until they are known; advantages are 0. The critic's
    fields are None without a critic and before the last stage.
    """

    tokens: Tensor  # input tokens, of the layout's local shape, as all fields here
    positions: Tensor  # position of each token in its sequence
    labels: Tensor  # the next token of each token
    # [..., layers with experts of this stage, top_k] int16, -1 if unknown, -2 if not needed; None without replay.
    routed_experts: Tensor | None = None
    # The tokens that the engine kept at each label, see megatron_rc.records.support; None: log-probs are over all.
    support_ids: Tensor | None = None
    support_counts: Tensor | None = None
    turn_rewards: Tensor | None = None  # parts of the rewards that came with earlier turns; None: there are none
    # The teacher's last hidden states of all micro-batches, [micro-batches, s/cp, b, h], with sequence parallelism
    # [..., s/cp/tp, b, h]; of one micro-batch without the first dimension.
    teacher_hidden: Tensor | None = None
    # Log-probs of the labels by each teacher, [..., teachers]; None if nothing needs them.
    teacher_log_probs: Tensor | None = None
    # A teacher's likeliest tokens at each label, in the form of the supports, and their log-probs.
    teacher_top_ids: Tensor | None = None
    teacher_top_counts: Tensor | None = None
    teacher_top_log_probs: Tensor | None = None
    values: Tensor | None = None  # the critic's values before its steps on the rollout batch
    returns: Tensor | None = None  # targets of the values

    def piece(self, cut: Cut) -> LocalTokens:
        """The tokens of one micro-batch; advantages may be those of tokens or of sequences."""
        advantages_are_per_token = self.advantages.shape == self.layout.shape
        per_sequence = _PER_SEQUENCE if advantages_are_per_token else (*_PER_SEQUENCE, "advantages")
        index_of: dict[str, slice | int] = {
            **dict.fromkeys(per_sequence, cut.sequences),
            "support_ids": slice(*cut.support),
            "teacher_top_ids": slice(*cut.teacher_top),
            "teacher_top_log_probs": slice(*cut.teacher_top),
            "teacher_hidden": cut.number,
        }
        pieces: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                # All other tensors have one entry a token.
                pieces[field.name] = value[index_of.get(field.name, cut.tokens)]
        return replace(self, layout=cut.layout, **pieces)


@dataclass(frozen=True)
class Cut:
    """Slices of one micro-batch in the local batch, and its layout."""

    tokens: slice  # in the first dimension of the tokens
    sequences: slice
    layout: SequenceLayout
    number: int  # of the micro-batch, over all mini-batches
    support: tuple[int, int] = (0, 0)  # begin and end in support_ids
    teacher_top: tuple[int, int] = (0, 0)  # begin and end in teacher_top_ids


@dataclass(frozen=True)
class LocalBatch:
    """A rollout batch on this rank."""

    local: LocalTokens  # all tokens, in the order of the micro-batches
    label_places: Tensor  # like the tokens, int64: each label's index in the flattened rollout batch; -1 for padding
    rows: Tensor  # [n] int64 on the tokens' device: each sequence's row of the rollout batch; -1 for padding
    mini_batch_ids: Tensor  # [n] int64 on the tokens' device: each sequence's mini-batch
    cuts: tuple[tuple[Cut, ...], ...]  # for each mini-batch its micro-batches, equally many on every data-parallel rank
    total_tokens: tuple[int, ...]  # for each mini-batch the number of tokens on all ranks, padding included
    rows_of_model: int  # number of rows of the model's input in a micro-batch; 1 if packed
    length_of_model: int  # length of these rows over all CP ranks

    def sides(self, values: Tensor) -> Tensor:
        """Return the sequences' values, [n], from values by row of the rollout batch; 0 for padding."""
        return torch.where(self.rows >= 0, values[self.rows.clamp(min=0)], values.new_zeros(()))

    def with_advantages(self, advantages: Tensor) -> LocalBatch:
        """This batch with advantages, [n] or like the tokens."""
        return replace(self, local=replace(self.local, advantages=advantages))


def cut_batch(batch: RolloutBatch, config: RunConfig, groups: ParallelGroups) -> LocalBatch:
    """Cut this rank's part out of a rollout batch, after the shift to label positions over whole sequences.

    Collectives: with packed sequences one SUM of [data-parallel ranks, rows] over ``dp``.
    """
    cut = _packed if config.training.rl_use_sequence_packing else _padded
    return _with_support_cuts(cut(batch, config, groups))


def _with_support_cuts(batch: LocalBatch) -> LocalBatch:
    """The batch with the part of the supports in each cut. One host synchronisation, if there are supports."""
    counts = batch.local.support_counts
    return batch if counts is None else _with_ranges(batch, "support", counts)


def _with_ranges(batch: LocalBatch, name: str, counts: Tensor) -> LocalBatch:
    """The batch with begin and end of each cut in a list of ids, of which each token has so many."""
    ends = offsets_of(counts.flatten(1).sum(1) if counts.dim() > 1 else counts).tolist()

    def with_range(cut: Cut) -> Cut:
        ids_of_cut: Any = {name: (ends[cut.tokens.start], ends[cut.tokens.stop])}
        return replace(cut, **ids_of_cut)

    return replace(batch, cuts=tuple(tuple(map(with_range, mini_batch)) for mini_batch in batch.cuts))


def with_teacher_scores(batch: LocalBatch, scores: TeacherScores) -> LocalBatch:
    """The batch with a teacher's log-probs of the same rollout batch, at its sampled tokens.

    One host synchronisation.
    """
    # A label is the token at the next place; -1 leaves a position without ids.
    places = torch.where(batch.local.response_mask, batch.label_places + 1, -1)
    top_ids, top_counts = take_support(scores.top_ids, scores.top_counts, places)
    top_log_probs, _ = take_support(scores.top_log_probs, scores.top_counts, places)
    log_probs = torch.where(places >= 0, scores.log_probs.flatten()[places.clamp(min=0)], 0)
    local = replace(
        batch.local,
        teacher_log_probs=log_probs.unsqueeze(-1),
        teacher_top_ids=top_ids,
        teacher_top_counts=top_counts,
        teacher_top_log_probs=top_log_probs,
    )
    return _with_ranges(replace(batch, local=local), "teacher_top", top_counts)


def _padded(batch: RolloutBatch, config: RunConfig, groups: ParallelGroups) -> LocalBatch:
    rows, length = batch.tokens.shape
    cp_rank = group_rank(groups.cp)
    cp_size = group_size(groups.cp)
    rows_of_micro_batch = config.training.micro_batch_size
    rows_of_mini_batch = config.training.global_batch_size // config.data_parallel_size
    num_mini_batches = rows // rows_of_mini_batch

    layout = SequenceLayout.padded(rows, length // cp_size, cp_rank=cp_rank, cp_size=cp_size)
    layout_of_micro_batch = SequenceLayout.padded(
        rows_of_micro_batch, length // cp_size, cp_rank=cp_rank, cp_size=cp_size
    )
    layouts = [layout_of_micro_batch] * (rows // rows_of_micro_batch)
    row_indices = torch.arange(rows, device=batch.tokens.device)

    def take(values: Tensor, _: int) -> Tensor:
        return layout.cut(values)

    return LocalBatch(
        local=_local_tokens(batch, layout, row_indices, take),
        label_places=_label_places(batch, take),
        rows=row_indices,
        mini_batch_ids=row_indices // rows_of_mini_batch,
        cuts=_consecutive(layouts, [rows_of_mini_batch // rows_of_micro_batch] * num_mini_batches),
        total_tokens=(config.training.global_batch_size * length,) * num_mini_batches,
        rows_of_model=rows_of_micro_batch,
        length_of_model=length,
    )


def _local_tokens(
    batch: RolloutBatch, layout: SequenceLayout, rows: Tensor, take: Callable[[Tensor, int], Tensor]
) -> LocalTokens:
    """This rank's tokens of a rollout batch.

    ``rows``, [n], has each sequence's row of the batch, -1 for padding. ``take`` is called with (values [rows, s, ...],
    filler for padding) and returns their local part.
    """
    labels, mask, rollout_log_probs = batch.label_aligned()
    turn_rewards = batch.label_turn_rewards()
    experts = batch.routed_experts
    support = batch.label_support()
    support_ids = None
    support_counts = None
    if support is not None:
        support_ids, support_counts = take_support(*support, _label_places(batch, take))
    return LocalTokens(
        train_log_probs=None,
        layout=layout,
        tokens=take(batch.tokens, 0),
        positions=layout.positions().to(batch.tokens.device),
        labels=take(labels, 0),
        response_mask=take(mask, 0),
        rollout_log_probs=take(rollout_log_probs, 0),
        policy_versions=take(batch.label_versions(), 0),
        turn_ids=take(batch.label_turns(), 0),
        # The experts that read a token also predict its label, so they are not shifted.
        routed_experts=None if experts is None else take(experts, NOT_NEEDED),
        support_ids=support_ids,
        support_counts=support_counts,
        turn_rewards=None if turn_rewards is None else take(turn_rewards, 0),
        advantages=torch.zeros(len(rows), device=rows.device),
        sequence_ids=torch.where(rows >= 0, batch.sample_ids[rows.clamp(min=0)], 0),
    )


def _label_places(batch: RolloutBatch, take: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Each local label's index in the flattened rollout batch, -1 for padding; ``take`` as for the tokens."""
    places = torch.arange(batch.tokens.numel(), device=batch.tokens.device)
    return take(places.view_as(batch.tokens), -1)


def _packed(batch: RolloutBatch, config: RunConfig, groups: ParallelGroups) -> LocalBatch:
    device = batch.tokens.device
    replica = group_rank(groups.dp)
    counts_of_replicas = _token_counts(batch, config, groups)
    packing = pack(counts_of_replicas, replica, config)

    micro_batches = []  # each a list of (row, length) of its sequences
    for mini_batch, (bins, counts) in enumerate(zip(packing.bins, counts_of_replicas[replica], strict=True)):
        first_row = mini_batch * len(counts)
        for rows_of_bin in bins:
            sequences = [(first_row + row, counts[row]) for row in rows_of_bin]
            missing = packing.width - sum(counts[row] for row in rows_of_bin)
            micro_batches.append([*sequences, *_padding(missing, config.training.seq_length)])

    layouts = [_packed_layout([length for _, length in micro_batch], groups) for micro_batch in micro_batches]
    layout = _packed_layout([length for micro_batch in micro_batches for _, length in micro_batch], groups)
    rows = torch.tensor([row for micro_batch in micro_batches for row, _ in micro_batch])
    mini_batches = [index for index, number in enumerate(packing.num_micro_batches) for _ in range(number)]
    num_sequences = torch.tensor([len(micro_batch) for micro_batch in micro_batches])
    take = _taker(batch, layout, rows)
    return LocalBatch(
        local=_local_tokens(batch, layout, rows.to(device), take),
        label_places=_label_places(batch, take),
        rows=rows.to(device),
        mini_batch_ids=torch.tensor(mini_batches).repeat_interleave(num_sequences).to(device),
        cuts=_consecutive(layouts, packing.num_micro_batches),
        total_tokens=tuple(number * packing.width_of_ranks for number in packing.num_micro_batches),
        rows_of_model=1,
        length_of_model=sum(layouts[0].full_lengths),
    )


def _token_counts(batch: RolloutBatch, config: RunConfig, groups: ParallelGroups) -> list[list[list[int]]]:
    """Return for each replica, mini-batch and row the tokens up to the row's last trained label, padded for CP.

    It is 0 for a row without a trained label. One host synchronisation.
    """
    rows, length = batch.tokens.shape
    mask = batch.label_aligned()[1]
    used = (mask * torch.arange(1, length + 1, device=mask.device)).amax(dim=1)
    counts = torch.zeros(group_size(groups.dp), rows, dtype=torch.int64, device=mask.device)
    unit = config.parallel.sequence_unit
    counts[group_rank(groups.dp)] = (used + unit - 1) // unit * unit
    per_rank = config.training.global_batch_size // config.data_parallel_size
    split: list[list[list[int]]] = all_reduce_sum(counts, groups.dp).unflatten(1, (-1, per_rank)).tolist()
    return split


def _padding(tokens: int, longest: int) -> list[tuple[int, int]]:
    """(-1, length) of padding sequences with so many tokens in all, none longer than ``longest``."""
    return [(-1, min(longest, tokens - start)) for start in range(0, tokens, longest)]


def _taker(batch: RolloutBatch, layout: SequenceLayout, rows: Tensor) -> Callable[[Tensor, int], Tensor]:
    """Function that brings ``[rows, s, ...]`` of a rollout batch to the packed layout of its sequences."""
    lengths = torch.tensor(layout.full_lengths)
    device = batch.tokens.device
    position = torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    row = rows.repeat_interleave(lengths)
    index = layout.cut(row.clamp(min=0) * batch.tokens.shape[1] + position).to(device)
    is_token = layout.cut(row >= 0).to(device)

    def take(values: Tensor, filler: int) -> Tensor:
        packed = values.flatten(0, 1)[index]
        further_dimensions = [1] * (packed.dim() - 1)
        return torch.where(is_token.view(-1, *further_dimensions), packed, values.new_full((), filler))

    return take


def _packed_layout(lengths: Sequence[int], groups: ParallelGroups) -> SequenceLayout:
    cp_size = group_size(groups.cp)
    bounds = accumulate([0, *(length // cp_size for length in lengths)])
    return SequenceLayout.packed(list(bounds), cp_rank=group_rank(groups.cp), cp_size=cp_size)


def _consecutive(layouts: Sequence[SequenceLayout], num_micro_batches: Sequence[int]) -> tuple[tuple[Cut, ...], ...]:
    """Cuts of micro-batches that lie one after the other, by mini-batch."""
    cuts = []
    first_token = 0
    first_sequence = 0
    for number, layout in enumerate(layouts):
        end_of_tokens = first_token + layout.shape[0]
        end_of_sequences = first_sequence + layout.num_sequences
        tokens = slice(first_token, end_of_tokens)
        cuts.append(Cut(tokens, slice(first_sequence, end_of_sequences), layout, number))
        first_token = end_of_tokens
        first_sequence = end_of_sequences
    ends = list(accumulate(num_micro_batches))
    return tuple(tuple(cuts[end - number : end]) for end, number in zip(ends, num_micro_batches, strict=True))
