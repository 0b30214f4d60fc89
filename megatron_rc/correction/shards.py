"""What the correction is given: checked, with its defaults, micro-batch by micro-batch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeVar, cast

import torch
from torch import Tensor

from megatron_rc.correction.inputs import AgreedCounts, AnyInputs, Layouts, Tensors, check_counts
from megatron_rc.numerics import NUM_SEQUENCE_IDS, check_mask
from megatron_rc.parallel.arguments import check_kind
from megatron_rc.parallel.groups import ParallelGroups, group_rank
from megatron_rc.parallel.layout import LAYOUT_REMEDY, SequenceLayout

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """One micro-batch: per-token tensors of its layout's local shape; ``first`` is its first sequence's index."""

    train: Tensor
    rollout: Tensor
    mask: Tensor
    layout: SequenceLayout
    first: int
    advantages: Tensor | None
    versions: Tensor | None


@dataclass(frozen=True)
class Shards:
    """The checked input of one rank; per-sequence tensors are [n] over all micro-batches, on the tokens' device.

    Attributes:
        parts: the micro-batches.
        is_list: the caller gave lists, and gets lists back.
        counts: what every rank agrees on.
        dtype: of the arithmetic and the weights.
        sequence_ids: int64.
        mini_batch_ids: int64.
        prompt_ids: int64, or None.
        advantages: one a sequence, or None (also where they are per token).
        rewards: or None.
        versions: one a sequence, or None (also where they are per token).
        rank: of this process among those that hold other sequences.
        default_ids: the caller gave no sequence ids.
        bad: [n] bool by what is wrong: side inputs out of their range, which are clamped into it.
    """

    parts: tuple[Part, ...]
    is_list: bool
    counts: AgreedCounts
    dtype: torch.dtype
    sequence_ids: Tensor
    mini_batch_ids: Tensor
    prompt_ids: Tensor | None
    advantages: Tensor | None
    rewards: Tensor | None
    versions: Tensor | None
    rank: int = 0
    default_ids: bool = False
    bad: dict[str, Tensor] = field(default_factory=dict)

    @property
    def num_sequences(self) -> int:
        """Number of local sequences, over all micro-batches."""
        return len(self.sequence_ids)

    @property
    def is_first_cp_rank(self) -> bool:
        """True on the rank of each CP group that counts whole sequences."""
        return self.parts[0].layout.cp_rank == 0

    def checked(self, device: torch.device) -> Shards:
        """These shards on a device, with ids clamped into their range, and flags where one was not or was NaN."""
        limits: tuple[tuple[str, str, int | None, int | None], ...] = (
            ("sequence_ids", "sequence_ids", 0, NUM_SEQUENCE_IDS - 1),
            ("mini_batch_ids", "mini_batch_ids", 0, self.counts.num_mini_batches - 1),
            ("prompt_ids", "group_ids", 0, (self.counts.num_groups or 1) - 1),
            ("versions", "policy_versions", None, self.counts.current_version),
        )
        moved, bad = {}, {}
        # A copy to the host would not be there yet.
        sends = device.type != "cpu"
        nothing = torch.zeros(self.num_sequences, dtype=torch.bool, device=device)
        for field_name, name, lower, upper in limits:
            bad[name] = nothing
            if (value := getattr(self, field_name)) is not None:
                value = value.to(device, non_blocking=sends)
                moved[field_name] = value.clamp(lower, upper)
                bad[name] = moved[field_name] != value
        for name in ("advantages", "rewards"):
            bad[name] = nothing
            if (value := getattr(self, name)) is not None:
                moved[name] = value.to(device, non_blocking=sends)
                bad[name] = ~moved[name].isfinite()
        return dataclasses.replace(self, **moved, bad=bad)

    @property
    def device(self) -> torch.device:
        """The device that the tokens are on."""
        return self.parts[0].mask.device


def collect_shards(inputs: AnyInputs, counts: AgreedCounts, groups: ParallelGroups | None = None) -> Shards:
    """Check shapes, dtypes and counts, and fill in the defaults.

    Args:
        inputs: this rank's part.
        counts: what every rank agrees on.
        groups: those that carry the sums; None where something else does: the layouts alone say which shard this is.

    Raises:
        ValueError: names the argument, what was expected and what came; alike on all ranks, since it looks at shapes
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
    if inputs.train_log_probs is None or inputs.rollout_log_probs is None:
        name = "rollout_log_probs" if inputs.rollout_log_probs is None else "train_log_probs"
        raise ValueError(f"{name} are missing: the correction compares train_log_probs with rollout_log_probs")
    rollout = _listed("rollout_log_probs", inputs.rollout_log_probs, is_list, len(masks))
    train = _listed("train_log_probs", inputs.train_log_probs, is_list, len(masks))
    layouts = layouts_of(inputs.layout, masks, is_list, groups)
    for tensors in zip(masks, layouts, train, rollout, strict=True):
        _check_tokens(*tensors)
        if groups is not None:
            groups.check_cut(tensors[1].cp_rank, tensors[1].cp_size)
    num = [layout.num_sequences for layout in layouts]
    firsts = list(accumulate([0, *num[:-1]]))
    advantages, token_advantages = _sides("advantages", inputs.advantages, is_list, layouts, floating=True)
    versions, token_versions = _sides("policy_versions", inputs.policy_versions, is_list, layouts)
    parts = [
        Part(train.detach(), rollout.detach(), *fields)
        for train, rollout, *fields in zip(
            train, rollout, masks, layouts, firsts, token_advantages, token_versions, strict=True
        )
    ]
    dtypes = [tensor.dtype for tensor in (*train, *rollout)]
    ids = _per_sequence("sequence_ids", inputs.sequence_ids, is_list, num)
    mini_batches = _per_sequence("mini_batch_ids", inputs.mini_batch_ids, is_list, num)
    return Shards(
        parts=tuple(parts),
        is_list=is_list,
        counts=counts,
        dtype=functools.reduce(torch.promote_types, dtypes, torch.float32),
        sequence_ids=torch.arange(sum(num)) if ids is None else ids,
        mini_batch_ids=torch.zeros(sum(num), dtype=torch.int64) if mini_batches is None else mini_batches,
        prompt_ids=_per_sequence("group_ids", inputs.group_ids, is_list, num),
        advantages=advantages,
        rewards=_per_sequence("rewards", inputs.rewards, is_list, num, floating=True),
        versions=versions,
        rank=0 if groups is None else group_rank(groups.dp if groups.dp is not None else groups.dp_cp),
        default_ids=ids is None,
    ).checked(masks[0].device)


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
    name: str,
    value: Tensors | None,
    is_list: bool,
    num: Sequence[int],
    *,
    floating: bool = False,
) -> Tensor | None:
    if value is None:
        return None
    values: list[Tensor] = _listed(name, value, is_list, len(num))
    for tensor, count in zip(values, num, strict=True):
        right = tensor.is_floating_point() if floating else tensor.dtype == torch.int64
        if tuple(tensor.shape) != (count,) or not right:
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}: expected {'float' if floating else 'int64'}, one for "
                f"each of {count} sequences"
            )
    return torch.cat([tensor.detach() for tensor in values])


def _sides(
    name: str,
    value: Tensors | None,
    is_list: bool,
    layouts: Sequence[SequenceLayout],
    *,
    floating: bool = False,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Values given one a sequence or one a token: (all of the first kind, or else the tokens' of each part)."""
    nothing: list[Tensor | None] = [None] * len(layouts)
    if value is None:
        return None, nothing
    values = [tensor.detach() for tensor in _listed(name, value, is_list, len(layouts))]
    pairs = list(zip(values, layouts, strict=True))
    per_sequence = all(tuple(tensor.shape) == (layout.num_sequences,) for tensor, layout in pairs)
    for tensor, layout in pairs:
        right = tensor.is_floating_point() if floating else tensor.dtype == torch.int64
        if not (per_sequence or tuple(tensor.shape) == layout.shape) or not right:
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}: expected {'float' if floating else 'int64'}, one a "
                f"sequence {(layout.num_sequences,)} or one a token {layout.shape}, alike in all micro-batches"
            )
    return (torch.cat(values), nothing) if per_sequence else (None, list(values))
