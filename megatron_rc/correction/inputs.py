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
    """One rank's part of a rollout batch: one tensor each, or lists with one a micro-batch."""


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
        """current_version - version, int64."""
        return (self.current_version or 0) - versions


def check_needs(config: RolloutCorrectionConfig, counts: AgreedCounts, *, has_advantages: bool = True) -> None:
    """Raise ValueError if the config needs advantages, prompts or versions that are not given."""
    for criterion in config.criteria:
        if criterion.only_negative and not has_advantages:
            raise ValueError(f"rollout_rs={criterion.name} needs advantages: one a sequence or one a token")
        if criterion.unit == "prompt" and counts.num_groups is None:
            needed = "the prompt of each sequence: pass group_ids= and num_groups="
            raise ValueError(f"rollout_rs={criterion.name} needs {needed}")
    for name in ("rollout_staleness_scale", "proximal_interpolation"):
        if counts.current_version is None and getattr(config, name):
            needed = "the versions of the weights: pass policy_versions= and current_version="
            raise ValueError(f"{name}={getattr(config, name)!r} needs {needed}")


@dataclass(frozen=True)
class Part:
    """One micro-batch: per-token tensors of its layout's local shape."""

    train: Tensor  # log π_train, nats
    rollout: Tensor  # log π_rollout, nats
    mask: Tensor  # the response mask, bool
    layout: SequenceLayout
    sequences: slice  # the numbers of its sequences among those of all micro-batches
    advantages: Tensor | None  # one a token; None if they are one a sequence or not given
    versions: Tensor | None  # int64, one a token; None if they are one a sequence or not given
    turn_ids: Tensor | None  # int64, equal for a turn's tokens, different for neighbours; None: runs of the mask


@dataclass(frozen=True)
class Shards:
    """The checked input of one rank; per-sequence tensors are [n] over all micro-batches, on the tokens' device."""

    parts: tuple[Part, ...]  # the micro-batches
    is_list: bool  # the caller gave lists, and gets lists back
    counts: AgreedCounts
    rank: int  # of this process among the data-parallel ranks; in dp_cp if layouts have CP groups of their own
    has_default_ids: bool  # the caller gave no sequence ids
    out_of_range: Tensor  # [6, n] bool, by PER_SEQUENCE: the value was not finite, or was moved into its range
    sequence_ids: Tensor  # int64
    mini_batch_ids: Tensor  # int64
    group_ids: Tensor | None = None  # int64, the prompt of each sequence
    advantages: Tensor | None = None  # one a sequence; None if they are one a token or not given
    rewards: Tensor | None = None
    policy_versions: Tensor | None = None  # int64, one a sequence; None if they are one a token or not given

    @classmethod
    def joined(cls, every: Sequence[Shards]) -> Shards:
        """Shards of one micro-batch each, with the same :attr:`given`, as those of one batch."""
        first, bounds = every[0], [0, *accumulate(len(one.sequence_ids) for one in every)]
        found: dict[str, Any] = {name: torch.cat([getattr(one, name) for one in every]) for name in first.given}
        if first.has_default_ids:
            found["sequence_ids"] = torch.arange(bounds[-1], device=first.device)
        numbers = map(slice, bounds, bounds[1:])
        parts = tuple(dataclasses.replace(part, sequences=next(numbers)) for one in every for part in one.parts)
        wrong = torch.cat([one.out_of_range for one in every], 1)
        return dataclasses.replace(first, parts=parts, is_list=True, out_of_range=wrong, **found)

    @property
    def given(self) -> tuple[str, ...]:
        """The names of the values with one a sequence."""
        return tuple(name for name in PER_SEQUENCE if getattr(self, name) is not None)

    @functools.cached_property
    def counts_here(self) -> Tensor:
        """[n] bool: the sequences that count on this rank: it is the first of their CP group, whose ranks know them."""
        return torch.cat([x.mask.new_full((x.layout.num_sequences,), x.layout.cp_rank == 0) for x in self.parts])

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the arithmetic and of the weights."""
        return functools.reduce(torch.promote_types, [x.dtype for one in self.parts for x in (one.train, one.rollout)])

    @property
    def device(self) -> torch.device:
        """The device that the tokens are on."""
        return self.parts[0].mask.device

    def expand(self, per_sequence: Tensor) -> list[Tensor]:
        """[n] as one value a token, for each micro-batch."""
        return [part.layout.expand(per_sequence[part.sequences]) for part in self.parts]


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
    batches, rank = split_inputs(inputs, groups), 0
    if groups is not None:
        own = [one.layout.cp_group for one in batches]  # type: ignore[union-attr]
        groups.check_sums(*own)
        rank = group_rank(groups.dp_cp if groups.dp is None or any(own) else groups.dp)
    device, ends = batches[0].response_mask.device, list(accumulate(one.layout.num_sequences for one in batches))  # type: ignore[union-attr]
    every = torch.arange(ends[-1], device=device)
    found = {"sequence_ids": every, "mini_batch_ids": torch.zeros_like(every)}
    wrong = torch.zeros(len(PER_SEQUENCE), ends[-1], dtype=torch.bool, device=device)
    for row, name in enumerate(PER_SEQUENCE):
        if getattr(inputs, name) is not None and is_one_a_sequence(name, batches):
            given = on_device(torch.cat([getattr(one, name).detach() for one in batches]), device)
            found[name] = _into_range(name, given, counts)
            wrong[row] = found[name] != given
    parts = tuple(_part(one, end, found) for one, end in zip(batches, ends, strict=True))
    is_list, no_ids = isinstance(inputs.response_mask, (list, tuple)), inputs.sequence_ids is None
    return Shards(parts, is_list, counts, rank, has_default_ids=no_ids, out_of_range=wrong, **found)


def split_inputs(inputs: AnyInputs, groups: ParallelGroups | None) -> list[OneMicroBatch]:
    """The inputs of each micro-batch, those of tokens checked; without a layout, padded rows cut over ``groups.cp``."""
    # Backwards, because in bypass mode the rollout log-probs stand for the training log-probs too.
    names, masks = [field.name for field in reversed(dataclasses.fields(CorrectionInputs))], inputs.response_mask
    if isinstance(masks, (list, tuple)) and not masks:
        raise ValueError("response_mask is an empty list: give at least one micro-batch, with no sequences if need be")
    columns = {name: _listed(name, getattr(inputs, name), masks) for name in names}
    rows = (dict(zip(names, values, strict=True)) for values in zip(*columns.values(), strict=True))
    return [_checked(OneMicroBatch(**row), groups) for row in rows]


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """The values on a device; only a copy to a GPU may still be under way, since the host reads its own at once."""
    return values.to(device, non_blocking=device.type != "cpu")


def _part(one: OneMicroBatch, end: int, per_sequence: Collection[str]) -> Part:
    """A micro-batch, up to sequence number ``end`` of all; inputs that are not ``per_sequence`` are one a token."""
    train, rollout = one.train_log_probs.detach(), one.rollout_log_probs.detach()  # type: ignore[union-attr]
    advantages = None if "advantages" in per_sequence else one.advantages
    versions = None if "policy_versions" in per_sequence else one.policy_versions
    sequences = slice(end - one.layout.num_sequences, end)  # type: ignore[union-attr]
    return Part(train, rollout, one.response_mask, one.layout, sequences, advantages, versions, one.turn_ids)  # type: ignore[arg-type]


def _into_range(name: str, value: Tensor, counts: AgreedCounts) -> Tensor:
    """The values with each one that is out of its range moved to the nearest limit; of floats, NaN and infinities."""
    limits: dict[str, tuple[int | None, int | None]] = {
        "sequence_ids": (0, NUM_SEQUENCE_IDS - 1),
        "mini_batch_ids": (0, counts.num_mini_batches - 1),
        "group_ids": (0, (counts.num_groups or 1) - 1),
        "policy_versions": (None, counts.current_version),
    }
    return value.clamp(*limits[name]) if name in limits else torch.where(value.isfinite(), value, 0)


def _check_pairs(inputs: AnyInputs, counts: AgreedCounts) -> None:
    for name in ("rollout_log_probs", "train_log_probs"):
        if getattr(inputs, name) is None:
            raise ValueError(f"{name} are missing: the correction compares train_log_probs with rollout_log_probs")
    if (inputs.group_ids is None) != (counts.num_groups is None):
        raise ValueError("group_ids and num_groups come together: num_groups counts the prompts of all ranks")
    if (inputs.policy_versions is None) != (counts.current_version is None):
        raise ValueError("policy_versions and current_version come together: staleness is their difference")
    if inputs.mini_batch_ids is None and counts.num_mini_batches > 1:
        raise ValueError(f"num_mini_batches={counts.num_mini_batches} needs mini_batch_ids, one a sequence")


def _listed(name: str, value: Any, masks: Any) -> list[Any]:
    """One value for each micro-batch, given like the masks: as a list or, for a single one, as it is."""
    is_list, given = isinstance(masks, (list, tuple)), type(value).__name__
    if value is None and name != "response_mask":
        return [None] * (len(masks) if is_list else 1)
    if is_list != isinstance(value, (list, tuple)):
        raise ValueError(f"{name} is a {given}: give tensors for everything, or lists for everything")
    values = value if is_list else [value]
    if is_list and len(values) != len(masks):
        raise ValueError(f"{name} has {len(values)} entries: expected one a micro-batch, {len(masks)}")
    kind, remedy = (SequenceLayout, LAYOUT_REMEDY) if name == "layout" else (Tensor, "a torch.Tensor")
    for index, each in enumerate(values):
        if not isinstance(each, kind):
            place, verb = (f"{name}[{index}]", "pass") if is_list else (name, "expected")
            raise ValueError(f"{place} is a {type(each).__name__}: {verb} {remedy}, or a list with one a micro-batch")
    return [*values]


def _checked(one: OneMicroBatch, groups: ParallelGroups | None) -> OneMicroBatch:
    """The micro-batch with its layout; ValueError for tensors that do not fit together."""
    mask, rollout = one.response_mask, one.rollout_log_probs
    layout = SequenceLayout.given(one.layout, "response_mask", mask, groups)
    check_mask("response_mask", mask)
    for name, value in (("rollout_log_probs", rollout), ("train_log_probs", one.train_log_probs)):
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
    ids = one.turn_ids
    if ids is not None and (ids.shape != mask.shape or ids.dtype != torch.int64 or ids.device != mask.device):
        given, expected = (f"{one.dtype} {tuple(one.shape)} on {one.device}" for one in (ids, mask))
        raise ValueError(f"turn_ids are {given}: expected torch.int64, like response_mask {expected}, one a token")
    return dataclasses.replace(one, layout=layout)


def is_one_a_sequence(name: str, batches: Sequence[OneMicroBatch]) -> bool:
    """Whether an input has one value a sequence, not one a token; of two equal shapes it has one a sequence.

    Raises ValueError for another shape, or another dtype.
    """
    floating, may_be_per_token = name in ("advantages", "rewards"), name in ("advantages", "policy_versions")
    shapes = [(cast(SequenceLayout, one.layout).num_sequences,) for one in batches]
    of_sequences = [getattr(one, name).shape for one in batches] == shapes
    for one, shape in zip(batches, shapes, strict=True):
        value, layout = getattr(one, name), cast(SequenceLayout, one.layout)
        expected = layout.shape if may_be_per_token and not of_sequences else shape
        if value.shape != expected or (not value.is_floating_point() if floating else value.dtype != torch.int64):
            words = f"{'float' if floating else 'int64'}, one for each of {layout.num_sequences} sequences"
            if may_be_per_token:
                words += f", or one a token {tuple(layout.shape)} in all micro-batches"
            raise ValueError(f"{name} is {value.dtype} {tuple(value.shape)}: expected {words}")
    return of_sequences
