"""The inputs of a correction: the records that a caller fills, and the same checked, micro-batch by micro-batch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, TypeVar, cast

import torch
from torch import Tensor

from megatron_rc.numerics import NUM_SEQUENCE_IDS, check_mask
from megatron_rc.parallel.arguments import check_integer, check_kind
from megatron_rc.parallel.groups import ParallelGroups, group_rank
from megatron_rc.parallel.layout import LAYOUT_REMEDY, SequenceLayout

Tensors = Tensor | Sequence[Tensor]
Layouts = SequenceLayout | Sequence[SequenceLayout]

T = TypeVar("T")
V = TypeVar("V", bound=Tensors, covariant=True)
L = TypeVar("L", bound=Layouts, covariant=True)


@dataclass(frozen=True)
class CorrectionInputs(Generic[V, L]):
    """Sampled tokens of one rank: V and L are tensors and layouts, or lists of them.

    :func:`correct_rollouts` describes the fields under the same names. A tensor that may have one value a sequence or
    one a token is read as one a sequence if both shapes are the same.

    Attributes:
        train_log_probs: must be None if the correction is made in the loss: π_θ comes later.
    """

    train_log_probs: V | None
    rollout_log_probs: V
    response_mask: V
    layout: L | None = None
    advantages: V | None = None
    rewards: V | None = None
    group_ids: V | None = None
    sequence_ids: V | None = None
    policy_versions: V | None = None
    mini_batch_ids: V | None = None


AnyInputs = CorrectionInputs[Tensors, Layouts]
OneMicroBatch = CorrectionInputs[Tensor, SequenceLayout]


class PlanInputs(AnyInputs):
    """One rank's part of a rollout batch: one tensor each, or lists with one a micro-batch."""


@dataclass(frozen=True)
class AgreedCounts:
    """The counts that all ranks agree on before any of them looks at data, so that no shape depends on data.

    Attributes:
        num_mini_batches: optimizer steps that share the batch.
        num_groups: prompts of the whole batch; None if no criterion looks at prompts.
        current_version: of the weights that train; None if versions are not used.
        max_staleness: the last bucket of staleness holds everything from here on.
    """

    num_mini_batches: int = 1
    num_groups: int | None = None
    current_version: int | None = None
    max_staleness: int = 0


def check_counts(counts: AgreedCounts) -> None:
    """Raise ValueError for impossible counts."""
    check_integer("num_mini_batches", counts.num_mini_batches, least=1)
    if counts.num_groups is not None:
        check_integer("num_groups", counts.num_groups, least=1)
    if counts.current_version is not None:
        check_integer("current_version", counts.current_version)
    check_integer("max_staleness", counts.max_staleness, least=0)
    if counts.max_staleness and counts.current_version is None:
        raise ValueError(
            f"max_staleness={counts.max_staleness} does nothing without policy_versions and current_version"
        )


@dataclass(frozen=True)
class Part:
    """One micro-batch: per-token tensors of its layout's local shape.

    Attributes:
        train: log π_train, nats.
        rollout: log π_rollout, nats.
        mask: the response mask, bool.
        layout: which tokens these are.
        sequences: the numbers of its sequences among those of all micro-batches.
        advantages: one a token; None if they are one a sequence or not given.
        versions: int64, one a token; None if they are one a sequence or not given.
    """

    train: Tensor
    rollout: Tensor
    mask: Tensor
    layout: SequenceLayout
    sequences: slice
    advantages: Tensor | None
    versions: Tensor | None


@dataclass(frozen=True)
class OutOfRange:
    """Each sequence's value is not finite, or was moved into its range: [n] bool; in counts, 0-D float64."""

    sequence_ids: Tensor
    mini_batch_ids: Tensor
    group_ids: Tensor
    policy_versions: Tensor
    advantages: Tensor
    rewards: Tensor


@dataclass(frozen=True)
class Shards:
    """The checked input of one rank; per-sequence tensors are [n] over all micro-batches, on the tokens' device.

    Attributes:
        parts: the micro-batches.
        is_list: the caller gave lists, and gets lists back.
        counts: the counts that all ranks agree on.
        dtype: of the arithmetic and of the weights.
        sequence_ids: int64.
        mini_batch_ids: int64.
        group_ids: int64, the prompt of each sequence; None if they are not given.
        advantages: one a sequence; None if they are one a token or not given.
        rewards: one a sequence; None if they are not given.
        versions: int64, one a sequence; None if they are one a token or not given.
        rank: of this process among the data-parallel ranks.
        has_default_ids: the caller gave no sequence ids.
        out_of_range: which of these values were wrong.
    """

    parts: tuple[Part, ...]
    is_list: bool
    counts: AgreedCounts
    dtype: torch.dtype
    sequence_ids: Tensor
    mini_batch_ids: Tensor
    group_ids: Tensor | None
    advantages: Tensor | None
    rewards: Tensor | None
    versions: Tensor | None
    rank: int
    has_default_ids: bool
    out_of_range: OutOfRange

    @property
    def num_sequences(self) -> int:
        """Number of local sequences, over all micro-batches."""
        return len(self.sequence_ids)

    @property
    def is_first_cp_rank(self) -> bool:
        """True on the rank of each CP group that counts whole sequences."""
        return self.parts[0].layout.cp_rank == 0

    @property
    def device(self) -> torch.device:
        """The device that the tokens are on."""
        return self.parts[0].mask.device

    def expand(self, per_sequence: Tensor) -> list[Tensor]:
        """[n] as one value a token, for each micro-batch."""
        return [part.layout.expand(per_sequence[part.sequences]) for part in self.parts]

    def sum_sequences(self, values: Sequence[Tensor]) -> Tensor:
        """[n] float64: the local parts of the sums over each sequence, from one tensor a micro-batch."""
        return torch.cat([part.layout.sum_sequences(one) for part, one in zip(self.parts, values, strict=True)])


def collect_shards(
    inputs: AnyInputs, counts: AgreedCounts, groups: ParallelGroups | None = None, *, first_sequence: int = 0
) -> Shards:
    """Check shapes, dtypes and counts, and fill in the defaults.

    Args:
        inputs: this rank's part.
        counts: the counts that all ranks agree on.
        groups: the groups that carry the sums; None if another transport does: the layouts alone say which shard
            this is.
        first_sequence: the first sequence id if none are given.

    Raises:
        ValueError: names the argument, its value and the expected one; alike on all ranks, since it looks at shapes
            only.
    """
    check_counts(counts)
    _check_pairs(inputs, counts)
    if groups is not None:
        groups.check_sums()
    is_list = not isinstance(inputs.response_mask, Tensor)
    masks: list[Tensor] = _listed("response_mask", inputs.response_mask, is_list, None)
    if not masks:
        raise ValueError("response_mask is an empty list: give at least one micro-batch, with no sequences if need be")
    layouts = layouts_of(inputs.layout, masks, is_list, groups)
    parts = _parts(inputs, masks, layouts, is_list, groups)
    num, device = [layout.num_sequences for layout in layouts], masks[0].device
    per_sequence = functools.partial(_per_sequence, is_list=is_list, num=num)
    ids, advantages, versions = inputs.sequence_ids, inputs.advantages, inputs.policy_versions
    number, nothing = sum(num), torch.zeros(sum(num), dtype=torch.bool, device=device)
    given = {
        "sequence_ids": torch.arange(first_sequence, first_sequence + number)
        if ids is None
        else per_sequence("sequence_ids", ids),
        "mini_batch_ids": per_sequence("mini_batch_ids", inputs.mini_batch_ids),
        "group_ids": per_sequence("group_ids", inputs.group_ids),
        "policy_versions": None if parts[0].versions is not None else per_sequence("policy_versions", versions),
        "advantages": None if parts[0].advantages is not None else per_sequence("advantages", advantages, True),
        "rewards": per_sequence("rewards", inputs.rewards, True),
    }
    # A copy to the host would not be there yet.
    sent = {
        name: None if value is None else value.to(device, non_blocking=device.type != "cpu")
        for name, value in given.items()
    }
    in_range = {name: value if value is None else _into_range(name, value, counts) for name, value in sent.items()}
    wrong = {
        name: nothing if value is None or moved is None else moved != value
        for (name, value), moved in zip(sent.items(), in_range.values(), strict=True)
    }
    dtypes = [tensor.dtype for part in parts for tensor in (part.train, part.rollout)]
    return Shards(
        parts=tuple(parts),
        is_list=is_list,
        counts=counts,
        dtype=functools.reduce(torch.promote_types, dtypes, torch.float32),
        sequence_ids=cast(Tensor, in_range["sequence_ids"]),
        mini_batch_ids=nothing.long() if in_range["mini_batch_ids"] is None else in_range["mini_batch_ids"],
        group_ids=in_range["group_ids"],
        advantages=sent["advantages"],
        rewards=sent["rewards"],
        versions=in_range["policy_versions"],
        rank=0 if groups is None else group_rank(groups.dp if groups.dp is not None else groups.dp_cp),
        has_default_ids=ids is None,
        out_of_range=OutOfRange(**wrong),
    )


def _into_range(name: str, value: Tensor, counts: AgreedCounts) -> Tensor:
    """The values with each one that is out of its range moved to the nearest limit; of floats, NaN and infinities."""
    limits: dict[str, tuple[int | None, int | None]] = {
        "sequence_ids": (0, NUM_SEQUENCE_IDS - 1),
        "mini_batch_ids": (0, counts.num_mini_batches - 1),
        "group_ids": (0, (counts.num_groups or 1) - 1),
        "policy_versions": (None, counts.current_version),
    }
    return value.clamp(*limits[name]) if name in limits else torch.where(value.isfinite(), value, 0)


def _parts(
    inputs: AnyInputs,
    masks: Sequence[Tensor],
    layouts: Sequence[SequenceLayout],
    is_list: bool,
    groups: ParallelGroups | None,
) -> list[Part]:
    if inputs.train_log_probs is None or inputs.rollout_log_probs is None:
        name = "rollout_log_probs" if inputs.rollout_log_probs is None else "train_log_probs"
        raise ValueError(f"{name} are missing: the correction compares train_log_probs with rollout_log_probs")
    rollout = _listed("rollout_log_probs", inputs.rollout_log_probs, is_list, len(masks))
    train = _listed("train_log_probs", inputs.train_log_probs, is_list, len(masks))
    for tensors in zip(masks, layouts, train, rollout, strict=True):
        _check_tokens(*tensors)
        if groups is not None:
            groups.check_cut(tensors[1].cp_rank, tensors[1].cp_size)
    ends = list(accumulate(layout.num_sequences for layout in layouts))
    return [
        Part(train.detach(), rollout.detach(), mask, layout, slice(end - layout.num_sequences, end), *sides)
        for train, rollout, mask, layout, end, *sides in zip(
            train,
            rollout,
            masks,
            layouts,
            ends,
            _per_token("advantages", inputs.advantages, is_list, layouts, True),
            _per_token("policy_versions", inputs.policy_versions, is_list, layouts),
            strict=True,
        )
    ]


def _check_pairs(inputs: AnyInputs, counts: AgreedCounts) -> None:
    if (inputs.group_ids is None) != (counts.num_groups is None):
        raise ValueError(
            "group_ids and num_groups come together: num_groups is the count of prompts, equal on all ranks"
        )
    if (inputs.policy_versions is None) != (counts.current_version is None):
        raise ValueError("policy_versions and current_version come together: staleness is their difference")
    if inputs.mini_batch_ids is None and counts.num_mini_batches > 1:
        raise ValueError(
            f"num_mini_batches={counts.num_mini_batches} needs mini_batch_ids: the optimizer step of each sequence"
        )


def _listed(name: str, value: T | Sequence[T], is_list: bool, count: int | None) -> list[T]:
    """One value for each micro-batch, given as a list or, for a single one, as it is."""
    kind, remedy = (SequenceLayout, LAYOUT_REMEDY) if name == "layout" else (Tensor, "a torch.Tensor")
    if not isinstance(value, (kind, list, tuple)):
        raise ValueError(f"{name} is a {type(value).__name__}: expected {remedy}, or a list with one a micro-batch")
    if is_list != isinstance(value, (list, tuple)):
        raise ValueError(
            f"{name} is a {type(value).__name__}: give one tensor for everything, or a list with one a micro-batch for "
            "everything"
        )
    values: list[T] = list(value) if isinstance(value, (list, tuple)) else [cast(T, value)]
    if count is not None and len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries: expected one for each of {count} micro-batches")
    for index, each in enumerate(values):
        check_kind(f"{name}[{index}]", each, kind, remedy)
    return values


def layouts_of(
    value: Layouts | None, masks: Sequence[Tensor], is_list: bool, groups: ParallelGroups | None
) -> list[SequenceLayout]:
    """The layout of each micro-batch; without one, padded rows cut as ``groups.cp`` says."""
    if value is not None:
        return _listed("layout", value, is_list, len(masks))
    return [SequenceLayout.given(None, "response_mask", mask, groups) for mask in masks]


def _check_tokens(mask: Tensor, layout: SequenceLayout, train: Tensor, rollout: Tensor) -> None:
    for name, value in (("rollout_log_probs", rollout), ("train_log_probs", train), ("response_mask", mask)):
        if tuple(value.shape) != layout.shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}: the layout's local shape is {layout.shape}")
        if value.device != mask.device:
            raise ValueError(f"{name} is on {value.device}, response_mask on {mask.device}: move them together")
    check_mask("response_mask", mask)
    for name, value in (("rollout_log_probs", rollout), ("train_log_probs", train)):
        if not value.is_floating_point():
            raise ValueError(f"{name} is {value.dtype}: expected a float dtype")
    if torch.finfo(rollout.dtype).bits < 32:
        raise ValueError(
            f"rollout_log_probs is {rollout.dtype}, which shifts the ratios by percents: ask the engine for float32, "
            "or pass rollout_log_probs.float() if only their storage was narrow"
        )


def _per_sequence(
    name: str, value: Tensors | None, floating: bool = False, *, is_list: bool, num: Sequence[int]
) -> Tensor | None:
    if value is None:
        return None
    values: list[Tensor] = _listed(name, value, is_list, len(num))
    for tensor, count in zip(values, num, strict=True):
        if tuple(tensor.shape) != (count,) or not _has_kind(tensor, floating):
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}: expected {'float' if floating else 'int64'}, one for "
                f"each of {count} sequences"
            )
    return torch.cat([tensor.detach() for tensor in values])


def _per_token(
    name: str, value: Tensors | None, is_list: bool, layouts: Sequence[SequenceLayout], floating: bool = False
) -> Sequence[Tensor | None]:
    """The values of each micro-batch if they are one a token; None each if they are one a sequence or not given."""
    if value is None:
        return [None] * len(layouts)
    values = [tensor.detach() for tensor in _listed(name, value, is_list, len(layouts))]
    pairs = list(zip(values, layouts, strict=True))
    per_sequence = all(tuple(tensor.shape) == (layout.num_sequences,) for tensor, layout in pairs)
    for tensor, layout in pairs:
        if not (per_sequence or tuple(tensor.shape) == layout.shape) or not _has_kind(tensor, floating):
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}: expected {'float' if floating else 'int64'}, one a "
                f"sequence {(layout.num_sequences,)} or one a token {layout.shape}, alike in all micro-batches"
            )
    return [None] * len(layouts) if per_sequence else values


def _has_kind(tensor: Tensor, floating: bool) -> bool:
    return tensor.is_floating_point() if floating else tensor.dtype == torch.int64
