"""Rollout batches: the record that an engine passes to the trainer, with its checks and files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_rc.records.checks import (
    FIELDS,
    FINISH_REASONS,
    OPTIONAL,
    TRAINER_LOG_PROBS,
    check_structure,
    check_values,
)
from megatron_rc.records.sampling import SamplingParams
from megatron_rc.records.storage import read_file, write_file
from megatron_rc.records.support import owners_of, sorted_support, take_support

__all__ = ["FINISH_REASONS", "SCHEMA_VERSION", "RolloutBatch", "SamplingParams", "load_rollouts", "save_rollouts"]

SCHEMA_VERSION = 1  # of RolloutBatch's fields in files and JSON lines; rises if the meaning of a field changes
NO_EXPERT = -1  # in routed_experts: unknown


@dataclass(frozen=True, eq=False)
class RolloutBatch:
    """Whole sequences of prompt and response, padded on the right, with all that the trainer needs of them.

    Tensors may also have any integer dtype, or float64; the dtypes below are those that this project's engines write.
    Columns after a row's last sampled token are padding: training does not depend on them.

    Attributes:
        tokens: [n, s] int64: prompt, response, padding. No text: a tokenizer may split it into other tokens.
        response_mask: [n, s] bool, True at sampled tokens (in token positions, not yet in label positions).
        rollout_log_probs: [n, s] float32, log π_rollout of the sampled tokens in nats; any value elsewhere.
        policy_versions: [n, s] int32, version of the weights that sampled each token; any value elsewhere.
        sample_ids: [n] int64, unique over all replicas, below 2²¹.
        group_ids: [n] int64, equal for the responses to one prompt.
        rewards: [n] float32.
        finish_reasons: [n] int64, index into ``FINISH_REASONS``.
        sampling: the sampling parameters.
        routed_experts: [n, s, layers, top_k] int32, for models with experts; None otherwise. Position t has the experts
            that read token t and so predict token t + 1; -1 if they are not known.
        support_ids: [ids] int32, the tokens that the engine kept by top-p, top-k or min-p at each position, one
            position after the other, row after row; None: not recorded, or the engine samples from all tokens.
        support_counts: [n, s] int32, the number of these tokens that belong to the token sampled at each position; 0:
            the whole vocabulary. None like ``support_ids``.
        old_log_probs: [n, s] float32, log π_old of the sampled tokens, by the trainer before the first optimizer step
            on the batch; NaN at tokens that it did not score; any value at tokens that were not sampled. None: not
            recorded.
        log_probs: [n, s] float32, log π_θ in the last optimizer step on each token, with NaN and other values as in
            old_log_probs. None: not recorded, or the batch made one step, in which π_θ is π_old.
        turn_rewards: [n, s] float32, the parts of the rewards that came with earlier turns, each at the last token of
            its turn; 0 at other sampled tokens; any value elsewhere. The rest of a reward comes with the last token.
            None: all of it does.
        rollout_ids: [n] int64, equal for rows of one prompt that are parts of one rollout, such as a sub-agent's
            conversations or the parts around a compaction of the context; these rows have the rollout's reward. None:
            each row is a rollout.
    """

    tokens: Tensor
    response_mask: Tensor
    rollout_log_probs: Tensor
    policy_versions: Tensor
    sample_ids: Tensor
    group_ids: Tensor
    rewards: Tensor
    finish_reasons: Tensor
    sampling: SamplingParams
    routed_experts: Tensor | None = None
    support_ids: Tensor | None = None
    support_counts: Tensor | None = None
    old_log_probs: Tensor | None = None
    log_probs: Tensor | None = None
    turn_rewards: Tensor | None = None
    rollout_ids: Tensor | None = None

    @property
    def num_sequences(self) -> int:
        """Number of rows."""
        return len(self.tokens)

    @property
    def has_split_rollouts(self) -> bool:
        """True if rows are parts of one rollout."""
        if self.rollout_ids is None:
            return False
        pairs = torch.stack([self.group_ids.long(), self.rollout_ids.long()], dim=1)
        return len(pairs.unique(dim=0)) < len(pairs)

    @property
    def turn_ids(self) -> Tensor:
        """[n, s] int64, the turn of each sampled token, from 0; -1 at other tokens.

        A turn is a run of sampled tokens between observations, as weights and criteria of turns take it.
        """
        begins = self.response_mask.clone()
        begins[:, 1:] &= ~self.response_mask[:, :-1]
        return torch.where(self.response_mask, begins.cumsum(dim=1) - 1, -1)

    def validate(
        self,
        *,
        allow_truncated_sampling: bool = False,
        vocab_size: int | None = None,
        allow_bad_log_probs: bool = False,
    ) -> None:
        """Check everything that one host can check, before the records are sent to other ranks.

        Args:
            allow_truncated_sampling: accept top_p < 1, top_k > 0 or min_p > 0, which sample from another distribution
                than the policy, although the tokens that the engine kept are not recorded.
            vocab_size: token ids must be below it; None: not checked.
            allow_bad_log_probs: accept NaN, infinite and positive log-probs, which a correction with ``bad_log_probs``
                rejects and counts.

        Raises:
            TypeError: a field is no tensor.
            ValueError: names the field, the sample and the position.
        """
        check_structure(self)
        self.sampling.check(allow_truncated_sampling or self.support_ids is not None)
        check_values(self.tensors(), self.sampling.top_k, vocab_size, allow_bad_log_probs=allow_bad_log_probs)

    def label_aligned(self) -> tuple[Tensor, Tensor, Tensor]:
        """(labels, response_mask, rollout_log_probs), each [n, s]: position t is about token t + 1.

        The shift is over whole sequences, before any sharding; the last position is never counted. Routed experts need
        no shift: the experts that read token t predict label t.
        """
        return tuple(map(_to_labels, (self.tokens, self.response_mask, self.rollout_log_probs)))  # type: ignore[return-value]

    def label_versions(self) -> Tensor:
        """``policy_versions`` at label positions, [n, s] int64."""
        return _to_labels(self.policy_versions).long()

    def label_turns(self) -> Tensor:
        """``turn_ids`` at label positions, [n, s] int64."""
        return _to_labels(self.turn_ids)

    def label_turn_rewards(self) -> Tensor | None:
        """``turn_rewards`` at label positions, [n, s], 0 at tokens that were not sampled; None if there are none."""
        if self.turn_rewards is None:
            return None
        return _to_labels(torch.where(self.response_mask, self.turn_rewards, 0))

    def label_support(self) -> tuple[Tensor, Tensor] | None:
        """(ids, counts [n, s]) of the supports at label positions of sampled tokens; None if there are none."""
        if self.support_ids is None or self.support_counts is None:
            return None
        labels = torch.where(_to_labels(self.response_mask), self._places + 1, -1)
        return take_support(self.support_ids, self.support_counts, labels)

    def with_sorted_support(self) -> RolloutBatch:
        """The batch with the kept tokens of sampled tokens alone, in ascending order, each id once."""
        if self.support_ids is None or self.support_counts is None:
            return self
        is_sampled = self.response_mask.flatten()[owners_of(self.support_counts)]
        sampled_ids = self.support_ids[is_sampled]
        sampled_counts = torch.where(self.response_mask, self.support_counts, 0)
        ids, counts = sorted_support(sampled_ids, sampled_counts)
        return replace(self, support_ids=ids, support_counts=counts)

    def support_of_rows(self) -> Sequence[tuple[Tensor, Tensor] | None]:
        """(ids, counts [s]) of each row's supports; None for each row if there are none."""
        if self.support_ids is None or self.support_counts is None:
            return [None] * self.num_sequences
        parts = self.support_ids.split(self.support_counts.sum(dim=1).tolist())
        return list(zip(parts, self.support_counts, strict=True))

    def tensors(self) -> dict[str, Tensor]:
        """The record's tensors by field name, without absent fields."""
        return {name: getattr(self, name) for name in FIELDS if getattr(self, name) is not None}

    def rows(self, index: Tensor | slice | Sequence[int]) -> RolloutBatch:
        """A part of the sequences, by a slice, indices in any order, or a mask [n] bool."""
        if not isinstance(index, (slice, Tensor)):
            index = torch.tensor(index, dtype=torch.int64, device=self.tokens.device)
        per_row = {name: value[index] for name, value in self.tensors().items() if not FIELDS[name].is_list}
        return replace(self, **(per_row | self._support_at(self._places[index])))

    @property
    def _places(self) -> Tensor:
        """[n, s], the position of each token in the flattened batch."""
        return torch.arange(self.tokens.numel(), device=self.tokens.device).view_as(self.tokens)

    def _support_at(self, place: Tensor) -> dict[str, Any]:
        """The fields of the supports for the positions ``place`` of the flattened batch, −1 for padding."""
        if self.support_ids is None or self.support_counts is None:
            return {}
        ids, counts = take_support(self.support_ids, self.support_counts, place)
        return {"support_ids": ids, "support_counts": counts}

    def at_length(self, length: int, pad_token_id: int = 0) -> RolloutBatch:
        """The sequences in ``length`` columns, with padding added or cut off.

        Raises:
            ValueError: a sampled token would be cut off; names the sample.
        """
        beyond = self.response_mask[:, length:].any(dim=1)
        if beyond.any():
            sample = int(self.sample_ids[beyond][0])
            raise ValueError(f"sample {sample} has sampled tokens after its first {length}: allow more columns")
        fillers = {"tokens": pad_token_id, "routed_experts": NO_EXPERT}
        changed: dict[str, Any] = {
            name: _pad(value[:, :length], length, fillers.get(name, 0))
            for name, value in self.tensors().items()
            if FIELDS[name].per_token
        }
        return replace(self, **(changed | self._support_at(_pad(self._places[:, :length], length, -1))))

    def to(self, device: torch.device | str) -> RolloutBatch:
        """The batch on another device."""
        moved: dict[str, Any] = {name: value.to(device) for name, value in self.tensors().items()}
        return replace(self, **moved)

    @classmethod
    def concatenate(cls, batches: Sequence[RolloutBatch], pad_token_id: int = 0) -> RolloutBatch:
        """The sequences of several batches, padded to the longest.

        Args:
            batches: at least one; all with the same sampling parameters, and all or none with routed experts and with
                supports. If only some have the trainer's log-probs, the others get NaN; turn rewards, 0; rollout ids,
                numbers of their own.
            pad_token_id: fills the shorter sequences.

        Raises:
            ValueError: no batch, or batches that differ in sampling parameters, routed experts or supports.
        """
        if not batches:
            raise ValueError("batches is empty: expected at least one rollout batch")
        batches = _with_same_fields(batches)
        first = batches[0]
        for batch in batches:
            _check_alike(first, batch)
        length = max(batch.tokens.shape[1] for batch in batches)
        padded = [batch.at_length(length, pad_token_id) for batch in batches]
        joined: dict[str, Any] = {name: torch.cat([getattr(one, name) for one in padded]) for name in first.tensors()}
        return replace(first, **joined)


def save_rollouts(batch: RolloutBatch, path: str | os.PathLike[str]) -> None:
    """Write a batch to one safetensors file, with the schema's version and the sampling parameters in its header.

    Every bit is kept, also of values that ``validate`` refuses. The file appears under its name when it is complete.

    Args:
        batch: the records, on any device.
        path: the file's path; an existing file is replaced. Its folder must exist.

    Raises:
        ImportError: safetensors is not installed.
        OSError: the file cannot be written; an existing file is unchanged.
        ValueError: shapes or dtypes are not the record's.
    """
    check_structure(batch)
    tensors = batch.tensors()
    shapes = {name: list(value.shape) for name, value in tensors.items()}
    write_file(path, tensors, {"schema_version": SCHEMA_VERSION, "sampling": asdict(batch.sampling), "shapes": shapes})


def load_rollouts(path: str | os.PathLike[str]) -> RolloutBatch:
    """The batch of a file of :func:`save_rollouts`, on the host. Call ``validate`` before training on it.

    Raises:
        ImportError: safetensors is not installed.
        FileNotFoundError: there is no such file.
        ValueError: the file is cut off, damaged, of another schema, or lacks the record's tensors.
    """
    tensors, header = read_file(path)
    try:
        return _assemble(tensors, header)
    except (TypeError, ValueError) as problem:
        raise ValueError(f"{path}: {problem}") from None


def _assemble(tensors: dict[str, Tensor], header: dict[str, Any]) -> RolloutBatch:
    check_schema_version(header)
    if set(header) != {"schema_version", "sampling", "shapes"}:
        raise ValueError(f"the header has {', '.join(sorted(header))}: expected schema_version, sampling, shapes")
    odd = (set(tensors) - set(FIELDS)) | (set(FIELDS) - OPTIONAL - set(tensors))
    if odd:
        raise ValueError(f"tensors unknown or missing: {', '.join(sorted(odd))}")
    if header["shapes"] != {name: list(value.shape) for name, value in tensors.items()}:
        raise ValueError("the tensors' shapes are not the header's: the file is damaged")
    batch = RolloutBatch(**tensors, sampling=SamplingParams.from_dict(header["sampling"]))
    check_structure(batch)
    return batch


def check_schema_version(header: Mapping[str, Any]) -> None:
    """Raise ValueError unless the header of a file, or a line, has the schema version that this release reads."""
    if "schema_version" not in header:
        raise ValueError("schema_version is missing: this is no record of --save-rollouts or save_rollouts")
    version = header["schema_version"]
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise ValueError(f"schema_version is {version!r}: this release reads version {SCHEMA_VERSION}")


def _with_same_fields(batches: Sequence[RolloutBatch]) -> list[RolloutBatch]:
    """The batches with the trainer's log-probs in all or in none, NaN (not scored) if only others have them.

    Turn rewards alike, with 0, and rollout ids, with numbers that no other row has.
    """
    batches = _with_rollout_ids(batches)
    fillers = dict.fromkeys(TRAINER_LOG_PROBS, torch.nan) | {"turn_rewards": 0.0}
    held = [name for name in fillers if any(getattr(batch, name) is not None for batch in batches)]
    filled = []
    for batch in batches:
        missing = [name for name in held if getattr(batch, name) is None]
        unknown: dict[str, Any] = {name: torch.full_like(batch.rollout_log_probs, fillers[name]) for name in missing}
        filled.append(replace(batch, **unknown))
    return filled


def _with_rollout_ids(batches: Sequence[RolloutBatch]) -> list[RolloutBatch]:
    """The batches with rollout ids in all or in none; rows without one get the numbers behind the largest."""
    known = [batch.rollout_ids for batch in batches if batch.rollout_ids is not None and batch.num_sequences]
    if not known:
        return list(batches)
    next_id = max(int(ids.max()) for ids in known) + 1
    filled = []
    for batch in batches:
        if batch.rollout_ids is None:
            ids = torch.arange(next_id, next_id + batch.num_sequences, device=batch.tokens.device)
            next_id += batch.num_sequences
            batch = replace(batch, rollout_ids=ids)
        filled.append(batch)
    return filled


def _check_alike(first: RolloutBatch, other: RolloutBatch) -> None:
    if other.sampling != first.sampling:
        raise ValueError(f"batches were sampled differently, {first.sampling} and {other.sampling}: keep them apart")
    shapes = [None if batch.routed_experts is None else batch.routed_experts.shape[2:] for batch in (first, other)]
    if shapes[0] != shapes[1]:
        words = ["none" if shape is None else f"[.., {shape[0]}, {shape[1]}]" for shape in shapes]
        raise ValueError(f"batches have different routed_experts, {words[0]} and {words[1]}: keep them apart")
    if (first.support_ids is None) != (other.support_ids is None):
        raise ValueError("only some batches have support_ids: keep them apart")


def _to_labels(value: Tensor) -> Tensor:
    return torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], dim=1)


def _pad(value: Tensor, length: int, filler: int) -> Tensor:
    """[n, s, ...] to [n, length, ...]."""
    missing = value.new_full((len(value), length - value.shape[1], *value.shape[2:]), filler)
    return torch.cat([value, missing], dim=1)
