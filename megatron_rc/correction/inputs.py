"""The inputs of a correction: the records that a caller fills, and the same checked, micro-batch by micro-batch."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from megatron_rc.numerics import NUM_SEQUENCE_IDS, check_mask
from megatron_rc.parallel.arguments import check_integer
from megatron_rc.parallel.groups import ParallelGroups, group_rank
from megatron_rc.parallel.layout import LAYOUT_REMEDY, Layouts, SequenceLayout
from megatron_rc.settings.config import RolloutCorrectionConfig

Tensors = Tensor | Sequence[Tensor]

_LEAST = {"num_mini_batches": 1, "num_groups": 1, "max_staleness": 0}
# Inputs with one value a sequence; advantages and policy_versions may have one a token instead.
PER_SEQUENCE = ("sequence_ids", "mini_batch_ids", "group_ids", "policy_versions", "advantages", "rewards")

# What to do about log-probs of fewer than 32 bits.
_WIDER = {
    "rollout_log_probs": (
        "ask the engine for float32, or pass rollout_log_probs.float() if only their storage was narrow"
    ),
    "train_log_probs": (
        "compute them from logits in float32, as megatron_rc.parallel.vocab_parallel_log_probs does, or pass "
        "train_log_probs.float() if only their storage was narrow"
    ),
}

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
    turn_ids: V | None = None


AnyInputs = CorrectionInputs[Tensors, Layouts]
OneMicroBatch = CorrectionInputs[Tensor, SequenceLayout]


class PlanInputs(AnyInputs):
    """The part of a rollout batch on one rank: one tensor for each field, or a list with one a micro-batch."""


@dataclass(frozen=True)
class AgreedCounts:
    """The counts that all ranks agree on before any of them looks at data, so that no shape depends on data.

    Attributes:
        num_mini_batches: optimizer steps that share the batch.
        num_groups: prompts of the whole batch; None if no criterion looks at prompts.
        current_version: of the weights that train; None if versions are not used.
        max_staleness: the last bucket of staleness holds everything from here on.

    Raises:
        ValueError: impossible counts.
    """

    num_mini_batches: int = 1
    num_groups: int | None = None
    current_version: int | None = None
    max_staleness: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not field.default:
                check_integer(field.name, value, least=_LEAST.get(field.name, -math.inf))
        if self.max_staleness and self.current_version is None:
            raise ValueError(
                f"max_staleness={self.max_staleness} does nothing without policy_versions and current_version"
            )

    @property
    def one_step(self) -> AgreedCounts:
        """The counts of a single mini-batch, without prompts."""
        return dataclasses.replace(self, num_mini_batches=1, num_groups=None)

    def staleness(self, versions: Tensor) -> Tensor:
        """Return current_version - version, int64."""
        return (self.current_version or 0) - versions


def check_needs(config: RolloutCorrectionConfig, counts: AgreedCounts, *, has_advantages: bool = True) -> None:
    """Raise ValueError if the config needs advantages, prompts or versions that are not given."""
    for criterion in config.criteria:
        if criterion.only_negative and not has_advantages:
            raise ValueError(f"rollout_rs={criterion.name} needs advantages: one a sequence or one a token")
        if criterion.unit == "prompt" and counts.num_groups is None:
            missing = "the prompt of each sequence: pass group_ids= and num_groups="
            raise ValueError(f"rollout_rs={criterion.name} needs {missing}")
    for name in ("rollout_staleness_scale", "proximal_interpolation"):
        if counts.current_version is None and getattr(config, name):
            missing = "the versions of the weights: pass policy_versions= and current_version="
            raise ValueError(f"{name}={getattr(config, name)!r} needs {missing}")


@dataclass(frozen=True)
class Part:
    """A checked micro-batch: per-token tensors of its layout's local shape."""

    train: Tensor  # log π_train, nats
    rollout: Tensor  # log π_rollout, nats
    mask: Tensor  # the response mask, bool
    layout: SequenceLayout
    sequences: slice  # the indices of its sequences among those of all micro-batches
    advantages: Tensor | None  # one a token; None if they are one a sequence or not given
    versions: Tensor | None  # int64, one a token; None if they are one a sequence or not given
    turn_ids: Tensor | None  # int64, equal for a turn's tokens, different for neighbours; None: runs of the mask

    def expand(self, per_sequence: Tensor) -> Tensor:
        """Return for each token the value of its sequence, from [n] over all micro-batches; maybe a view."""
        values = per_sequence[self.sequences]
        if self.mask.dim() == 2:
            return values.unsqueeze(1).expand(self.mask.shape)
        return self.layout.expand(values)


@dataclass(frozen=True)
class Shards:
    """The checked input of one rank; per-sequence tensors are [n] over all micro-batches, on the tokens' device."""

    parts: tuple[Part, ...]  # the micro-batches
    is_list: bool  # the caller gave lists, and gets lists back
    counts: AgreedCounts
    rank: int  # of this process among the data-parallel ranks; in dp_cp if layouts have CP groups of their own
    has_default_ids: bool  # the caller gave no sequence ids
    # By the names of PER_SEQUENCE, if one a sequence was given. Bool: not finite, or moved into the range.
    out_of_range: dict[str, Tensor]
    # 0, 1, 2, …, int64: not fewer numbers than sequences, nor than tokens of the longest sequence.
    counting: Tensor
    sequence_ids: Tensor  # int64
    mini_batch_ids: Tensor  # int64
    group_ids: Tensor | None = None  # int64, the prompt of each sequence
    advantages: Tensor | None = None  # one a sequence; None if they are one a token or not given
    rewards: Tensor | None = None
    policy_versions: Tensor | None = None  # int64, one a sequence; None if they are one a token or not given

    def is_out_of_range(self, name: str) -> Tensor:
        """Return if the input ``name`` was not finite, or was moved into its range, [n] bool; False if not given."""
        if name in self.out_of_range:
            return self.out_of_range[name]
        return torch.zeros_like(self.sequence_ids, dtype=torch.bool)

    @functools.cached_property
    def counts_elsewhere(self) -> Tensor:
        """The sequences that another rank counts, [n] bool.

        All ranks of a CP group know a sequence whole. The first of them counts it.
        """
        flags = []
        for part in self.parts:
            is_elsewhere = part.layout.cp_rank != 0
            flags.append(part.mask.new_full((part.layout.num_sequences,), is_elsewhere, dtype=torch.bool))
        return flags[0] if len(flags) == 1 else torch.cat(flags)

    @functools.cached_property
    def counts_here(self) -> Tensor:
        """The sequences that this rank counts, [n] bool."""
        return ~self.counts_elsewhere

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the arithmetic and of the weights."""
        dtypes = {tensor.dtype for part in self.parts for tensor in (part.train, part.rollout)}
        return functools.reduce(torch.promote_types, dtypes)

    @property
    def device(self) -> torch.device:
        """The device that the tokens are on."""
        return self.parts[0].mask.device


def collect_shards(inputs: AnyInputs, counts: AgreedCounts, groups: ParallelGroups | None = None) -> Shards:
    """Check shapes and dtypes, and fill in the defaults.

    Args:
        inputs: this rank's part.
        counts: the counts that all ranks agree on.
        groups: the groups that carry the sums. None if another transport does: the layouts alone say which shard
            this is.

    Raises:
        ValueError: names the argument, its value and the expected one; equal on all ranks.
    """
    _check_pairs(inputs, counts)
    micro_batches = split_inputs(inputs, groups)
    layouts = [cast(SequenceLayout, micro_batch.layout) for micro_batch in micro_batches]
    rank = 0
    if groups is not None:
        cp_groups = [layout.cp_group for layout in layouts]
        groups.check_sums(*cp_groups)
        rank = group_rank(groups.dp_cp if groups.dp is None or any(cp_groups) else groups.dp)

    device = micro_batches[0].response_mask.device
    ends = list(accumulate(layout.num_sequences for layout in layouts))

    longest = max(layout.longest for layout in layouts)
    counting = torch.arange(max(ends[-1], longest), device=device)

    # The inputs with one value a sequence, over all micro-batches; first the defaults.
    indices = counting[: ends[-1]]
    per_sequence = {"sequence_ids": indices, "mini_batch_ids": torch.zeros_like(indices)}
    out_of_range = {}
    for name in PER_SEQUENCE:
        if getattr(inputs, name) is not None and is_one_a_sequence(name, micro_batches):
            pieces = [getattr(micro_batch, name).detach() for micro_batch in micro_batches]
            values = on_device(torch.cat(pieces), device)
            per_sequence[name] = _into_range(name, values, counts)
            out_of_range[name] = per_sequence[name] != values

    parts = []
    for micro_batch, layout, end in zip(micro_batches, layouts, ends, strict=True):
        sequences = slice(end - layout.num_sequences, end)
        parts.append(_part(micro_batch, layout, sequences, per_sequence))
    return Shards(
        parts=tuple(parts),
        is_list=isinstance(inputs.response_mask, (list, tuple)),
        counts=counts,
        rank=rank,
        has_default_ids=inputs.sequence_ids is None,
        out_of_range=out_of_range,
        counting=counting,
        **per_sequence,
    )


def split_inputs(inputs: AnyInputs, groups: ParallelGroups | None) -> list[OneMicroBatch]:
    """Return the inputs of each micro-batch, with its layout; tensors of tokens are checked.

    Without a layout, tensors are padded rows that are cut over ``groups.cp``.

    Raises:
        ValueError: not the same number of lists, or tensors that do not fit together.
    """
    masks = inputs.response_mask
    if isinstance(masks, (list, tuple)) and not masks:
        raise ValueError("response_mask is an empty list: give at least one micro-batch, with no sequences if need be")
    # Backwards, because in bypass mode the rollout log-probs stand for the training log-probs too.
    names = [field.name for field in reversed(dataclasses.fields(CorrectionInputs))]
    values_by_name = {name: _one_a_micro_batch(name, getattr(inputs, name), masks) for name in names}
    micro_batches = []
    for values in zip(*values_by_name.values(), strict=True):
        micro_batch = OneMicroBatch(**dict(zip(names, values, strict=True)))
        micro_batches.append(_with_layout(micro_batch, groups))
    return micro_batches


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """Return the values on a device; only a copy to a GPU may still be under way: the host reads its own at once."""
    return values.to(device, non_blocking=device.type != "cpu")


def _part(micro_batch: OneMicroBatch, layout: SequenceLayout, sequences: slice, per_sequence: Collection[str]) -> Part:
    """Return a checked micro-batch; advantages and versions that are not ``per_sequence`` are one a token."""
    return Part(
        train=cast(Tensor, micro_batch.train_log_probs).detach(),
        rollout=micro_batch.rollout_log_probs.detach(),
        mask=micro_batch.response_mask,
        layout=layout,
        sequences=sequences,
        advantages=None if "advantages" in per_sequence else micro_batch.advantages,
        versions=None if "policy_versions" in per_sequence else micro_batch.policy_versions,
        turn_ids=micro_batch.turn_ids,
    )


def _into_range(name: str, values: Tensor, counts: AgreedCounts) -> Tensor:
    """Return ids and versions moved to the nearest limit of their range; floats with 0 for NaN and infinities."""
    limits: dict[str, tuple[int | None, int | None]] = {
        "sequence_ids": (0, NUM_SEQUENCE_IDS - 1),
        "mini_batch_ids": (0, counts.num_mini_batches - 1),
        "group_ids": (0, (counts.num_groups or 1) - 1),
        "policy_versions": (None, counts.current_version),
    }
    if name in limits:
        return values.clamp(*limits[name])
    return torch.where(values.isfinite(), values, 0)


def _check_pairs(inputs: AnyInputs, counts: AgreedCounts) -> None:
    """Raise ValueError for missing log-probs, and for inputs without the count that belongs to them."""
    for name in ("rollout_log_probs", "train_log_probs"):
        if getattr(inputs, name) is None:
            raise ValueError(f"{name} are missing: the correction compares train_log_probs with rollout_log_probs")
    if (inputs.group_ids is None) != (counts.num_groups is None):
        raise ValueError("group_ids and num_groups come together: num_groups counts the prompts of all ranks")
    if (inputs.policy_versions is None) != (counts.current_version is None):
        raise ValueError("policy_versions and current_version come together: staleness is their difference")
    if inputs.mini_batch_ids is None and counts.num_mini_batches > 1:
        raise ValueError(f"num_mini_batches={counts.num_mini_batches} needs mini_batch_ids, one a sequence")


def _one_a_micro_batch(name: str, value: Any, masks: Any) -> list[Any]:
    """Return an input as a list with one value a micro-batch; ValueError unless it was given like the masks.

    Masks and inputs are lists, or single tensors of a single micro-batch.
    """
    is_list = isinstance(masks, (list, tuple))
    if value is None and name != "response_mask":
        return [None] * (len(masks) if is_list else 1)
    if is_list != isinstance(value, (list, tuple)):
        raise ValueError(f"{name} is a {type(value).__name__}: give tensors for everything, or lists for everything")
    values = [*value] if is_list else [value]
    if is_list and len(values) != len(masks):
        raise ValueError(f"{name} has {len(values)} entries: expected one a micro-batch, {len(masks)}")

    expected_type: type = Tensor
    remedy = "a torch.Tensor"
    if name == "layout":
        expected_type = SequenceLayout
        remedy = LAYOUT_REMEDY
    for index, entry in enumerate(values):
        if isinstance(entry, expected_type):
            continue
        actual = type(entry).__name__
        if is_list:
            raise ValueError(f"{name}[{index}] is a {actual}: pass {remedy}, or a list with one a micro-batch")
        raise ValueError(f"{name} is a {actual}: expected {remedy}, or a list with one a micro-batch")
    return values


def _with_layout(micro_batch: OneMicroBatch, groups: ParallelGroups | None) -> OneMicroBatch:
    """Return the micro-batch with its layout; ValueError for tensors of tokens that do not fit together."""
    mask = micro_batch.response_mask
    layout = SequenceLayout.given(micro_batch.layout, "response_mask", mask, groups)
    check_mask("response_mask", mask)

    log_probs = {"rollout_log_probs": micro_batch.rollout_log_probs, "train_log_probs": micro_batch.train_log_probs}
    for name, value in log_probs.items():
        if value is None:
            continue
        if value.shape != mask.shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}: response_mask has {tuple(mask.shape)}")
        if value.device != mask.device:
            raise ValueError(f"{name} is on {value.device}, response_mask on {mask.device}: move them together")
        if not value.is_floating_point():
            raise ValueError(f"{name} is {value.dtype}: expected a float dtype")
        if torch.finfo(value.dtype).bits < 32:
            raise ValueError(f"{name} is {value.dtype}, which shifts the ratios by percents: {_WIDER[name]}")

    turn_ids = micro_batch.turn_ids
    if turn_ids is not None and _describe(turn_ids) != _describe(mask, torch.int64):
        raise ValueError(
            f"turn_ids are {_describe(turn_ids)}: expected torch.int64, like response_mask {_describe(mask)}, one a "
            "token"
        )
    return dataclasses.replace(micro_batch, layout=layout)


def _describe(tensor: Tensor, dtype: torch.dtype | None = None) -> str:
    """Return dtype, shape and device of a tensor in words; ``dtype`` in place of its own."""
    return f"{dtype or tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"


def is_one_a_sequence(name: str, micro_batches: Sequence[OneMicroBatch]) -> bool:
    """Return whether an input has one value a sequence, not one a token; one a sequence, if both shapes are the same.

    Raises:
        ValueError: another shape, or another dtype.
    """
    is_float = name in ("advantages", "rewards")
    may_be_per_token = name in ("advantages", "policy_versions")
    layouts = [cast(SequenceLayout, micro_batch.layout) for micro_batch in micro_batches]
    values = [getattr(micro_batch, name) for micro_batch in micro_batches]
    per_sequence = all(value.shape == (layout.num_sequences,) for value, layout in zip(values, layouts, strict=True))
    for value, layout in zip(values, layouts, strict=True):
        expected_shape = layout.shape if may_be_per_token and not per_sequence else (layout.num_sequences,)
        has_right_dtype = value.is_floating_point() if is_float else value.dtype == torch.int64
        if value.shape != expected_shape or not has_right_dtype:
            dtype = "float" if is_float else "int64"
            expected = f"{dtype}, one for each of {layout.num_sequences} sequences"
            if may_be_per_token:
                expected += f", or one a token {tuple(layout.shape)} in all micro-batches"
            raise ValueError(f"{name} is {value.dtype} {tuple(value.shape)}: expected {expected}")
    return per_sequence
