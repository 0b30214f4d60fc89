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
        # Rollout ids are only compared between rows of one prompt.
        pairs = torch.stack([self.group_ids.long(), self.rollout_ids.long()], dim=1)
        return len(pairs.unique(dim=0)) < len(pairs)

    @property
    def turn_ids(self) -> Tensor:
        """The turn of each sampled token, [n, s] int64, from 0; -1 at other tokens.

        A turn is a run of sampled tokens between observations, as weights and criteria of turns take it.
        """
        begins_turn = self.response_mask.clone()
        begins_turn[:, 1:] &= ~self.response_mask[:, :-1]
        return torch.where(self.response_mask, begins_turn.cumsum(dim=1) - 1, -1)

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
        """Return (labels, response_mask, rollout_log_probs), each [n, s], at label positions.

        Position t then holds the values of token t + 1, which the model predicts at t. The shift is over whole
        sequences, before any sharding; the last position is never counted. Routed experts need no shift: the experts
        that read token t predict label t.
        """
        return _to_labels(self.tokens), _to_labels(self.response_mask), _to_labels(self.rollout_log_probs)

    def label_old_log_probs(self) -> Tensor:
        """``old_log_probs`` at label positions, [n, s]; NaN where none is recorded, at the last position NaN or 0."""
        if self.old_log_probs is None:
            return torch.full_like(self.rollout_log_probs, torch.nan)
        return _to_labels(self.old_log_probs)

    def label_versions(self) -> Tensor:
        """``policy_versions`` at label positions, [n, s] int64."""
        return _to_labels(self.policy_versions).long()

    def label_turns(self) -> Tensor:
        """``turn_ids`` at label positions, [n, s] int64."""
        return _to_labels(self.turn_ids)

    def label_turn_rewards(self) -> Tensor | None:
        """``turn_rewards`` at label positions, [n, s], 0 at tokens that were not sampled; None without turn rewards."""
        if self.turn_rewards is None:
            return None
        return _to_labels(torch.where(self.response_mask, self.turn_rewards, 0))

    def label_support(self) -> tuple[Tensor, Tensor] | None:
        """Return (ids, counts [n, s]) of the supports at label positions of sampled tokens; None without supports."""
        if self.support_ids is None or self.support_counts is None:
            return None
        # A label is the token at the next place; -1 leaves a position without ids.
        label_places = torch.where(_to_labels(self.response_mask), self._places + 1, -1)
        return take_support(self.support_ids, self.support_counts, label_places)

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
        """Return (ids, counts [s]) of the supports of each row; a list of None without supports."""
        if self.support_ids is None or self.support_counts is None:
            return [None] * self.num_sequences
        ids_of_rows = self.support_ids.split(self.support_counts.sum(dim=1).tolist())
        return list(zip(ids_of_rows, self.support_counts, strict=True))

    def tensors(self) -> dict[str, Tensor]:
        """The record's tensors by field name, without absent fields."""
        return {name: getattr(self, name) for name in FIELDS if getattr(self, name) is not None}

    def rows(self, index: Tensor | slice | Sequence[int]) -> RolloutBatch:
        """The batch with some of its sequences: by a slice, indices in any order, or a mask [n] bool."""
        if not isinstance(index, (slice, Tensor)):
            index = torch.tensor(index, dtype=torch.int64, device=self.tokens.device)
        selected = {name: value[index] for name, value in self.tensors().items() if not FIELDS[name].is_list}
        return replace(self, **(selected | self._support_at(self._places[index])))

    @property
    def _places(self) -> Tensor:
        """The index of each token in the flattened batch, [n, s] int64."""
        return torch.arange(self.tokens.numel(), device=self.tokens.device).view_as(self.tokens)

    def _support_at(self, places: Tensor) -> dict[str, Any]:
        """The fields of the supports, by name, for tokens with these :attr:`_places`; -1 for padding."""
        if self.support_ids is None or self.support_counts is None:
            return {}
        ids, counts = take_support(self.support_ids, self.support_counts, places)
        return {"support_ids": ids, "support_counts": counts}

    def at_length(self, length: int, pad_token_id: int = 0) -> RolloutBatch:
        """The batch in ``length`` columns, with padding added or cut off.

        Raises:
            ValueError: a sampled token would be cut off; names the sample.
        """
        is_too_long = self.response_mask[:, length:].any(dim=1)
        if is_too_long.any():
            sample = int(self.sample_ids[is_too_long][0])
            raise ValueError(f"sample {sample} has sampled tokens after its first {length}: allow more columns")

        fillers = {"tokens": pad_token_id, "routed_experts": NO_EXPERT}
        padded: dict[str, Any] = {
            name: _pad(value[:, :length], length, fillers.get(name, 0))
            for name, value in self.tensors().items()
            if FIELDS[name].per_token
        }
        places = _pad(self._places[:, :length], length, -1)
        return replace(self, **(padded | self._support_at(places)))

    def to(self, device: torch.device | str) -> RolloutBatch:
        """The batch with its tensors on a device."""
        moved: dict[str, Any] = {name: value.to(device) for name, value in self.tensors().items()}
        return replace(self, **moved)

    @classmethod
    def concatenate(cls, batches: Sequence[RolloutBatch], pad_token_id: int = 0) -> RolloutBatch:
        """Join the sequences of several batches in one, padded to the longest.

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
        concatenated: dict[str, Any] = {
            name: torch.cat([getattr(batch, name) for batch in padded]) for name in first.tensors()
        }
        return replace(first, **concatenated)


def save_rollouts(batch: RolloutBatch, path: str | os.PathLike[str]) -> None:
    """Write a batch to one safetensors file, with the schema's version and the sampling parameters in its header.

    Every bit is written, also of values that ``validate`` refuses. The file appears under its name when it is complete.

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
    header = {
        "schema_version": SCHEMA_VERSION,
        "sampling": asdict(batch.sampling),
        "shapes": {name: list(value.shape) for name, value in tensors.items()},  # to find a damaged file
    }
    write_file(path, tensors, header)


def load_rollouts(path: str | os.PathLike[str]) -> RolloutBatch:
    """Read the batch of a file that :func:`save_rollouts` wrote, to the host. Call ``validate`` before training on it.

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
    """The batch from a file's tensors and header; TypeError or ValueError if they are not such a file's."""
    check_schema_version(header)
    if set(header) != {"schema_version", "sampling", "shapes"}:
        raise ValueError(f"the header has {', '.join(sorted(header))}: expected schema_version, sampling, shapes")
    unknown = set(tensors) - set(FIELDS)
    missing = set(FIELDS) - OPTIONAL - set(tensors)
    if unknown or missing:
        raise ValueError(f"tensors unknown or missing: {', '.join(sorted(unknown | missing))}")
    if header["shapes"] != {name: list(value.shape) for name, value in tensors.items()}:
        raise ValueError("the tensors' shapes are not the header's: the file is damaged")
    batch = RolloutBatch(**tensors, sampling=SamplingParams.from_dict(header["sampling"]))
    check_structure(batch)
    return batch


def check_schema_version(header: Mapping[str, Any]) -> None:
    """Raise ValueError unless a file's header, or a JSON line, has the schema version that this release reads."""
    if "schema_version" not in header:
        raise ValueError("schema_version is missing: this is no record of --save-rollouts or save_rollouts")
    version = header["schema_version"]
    if version != SCHEMA_VERSION or isinstance(version, bool):  # True is equal to 1
        raise ValueError(f"schema_version is {version!r}: this release reads version {SCHEMA_VERSION}")


def _with_same_fields(batches: Sequence[RolloutBatch]) -> list[RolloutBatch]:
    """The batches with those optional fields filled in that some of them have and others lack.

    The trainer's log-probs are filled with NaN (not scored), turn rewards with 0, and rollout ids with numbers that no
    other row has.
    """
    batches = _with_rollout_ids(batches)
    fillers = dict.fromkeys(TRAINER_LOG_PROBS, torch.nan) | {"turn_rewards": 0.0}
    present = [name for name in fillers if any(getattr(batch, name) is not None for batch in batches)]
    completed = []
    for batch in batches:
        missing = [name for name in present if getattr(batch, name) is None]
        filled: dict[str, Any] = {name: torch.full_like(batch.rollout_log_probs, fillers[name]) for name in missing}
        completed.append(replace(batch, **filled))
    return completed


def _with_rollout_ids(batches: Sequence[RolloutBatch]) -> list[RolloutBatch]:
    """The batches with rollout ids in all or in none; rows without one get the numbers behind the largest."""
    present = [batch.rollout_ids for batch in batches if batch.rollout_ids is not None and batch.num_sequences]
    if not present:
        return list(batches)
    next_id = max(int(ids.max()) for ids in present) + 1
    completed = []
    for batch in batches:
        if batch.rollout_ids is None:
            ids = torch.arange(next_id, next_id + batch.num_sequences, device=batch.tokens.device)
            next_id += batch.num_sequences
            batch = replace(batch, rollout_ids=ids)
        completed.append(batch)
    return completed


def _check_alike(first: RolloutBatch, other: RolloutBatch) -> None:
    """Raise ValueError for batches that differ in sampling parameters, or in the form of experts or supports."""
    if other.sampling != first.sampling:
        raise ValueError(f"batches were sampled differently, {first.sampling} and {other.sampling}: keep them apart")
    form = _form_of_experts(first)
    other_form = _form_of_experts(other)
    if form != other_form:
        raise ValueError(f"batches have different routed_experts, {form} and {other_form}: keep them apart")
    if (first.support_ids is None) != (other.support_ids is None):
        raise ValueError("only some batches have support_ids: keep them apart")


def _form_of_experts(batch: RolloutBatch) -> str:
    """The layers and experts of a batch's routed experts, as in "[.., 2, 8]"; "none" without."""
    if batch.routed_experts is None:
        return "none"
    layers, top_k = batch.routed_experts.shape[2:]
    return f"[.., {layers}, {top_k}]"


def _to_labels(value: Tensor) -> Tensor:
    """Values of tokens, [n, s], moved to label positions: those of token t + 1 at t, 0 at the last."""
    return torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], dim=1)


def _pad(value: Tensor, length: int, filler: int) -> Tensor:
    """Values of tokens, [n, s, ...], in ``length`` columns, [n, length, ...], of which the new ones are ``filler``."""
    padding = value.new_full((len(value), length - value.shape[1], *value.shape[2:]), filler)
    return torch.cat([value, padding], dim=1)
