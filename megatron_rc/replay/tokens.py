"""Sampled tokens of recorded batches with the log-probs of each policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.advantages.group import group_advantages
from megatron_rc.records.rollout import RolloutBatch
from megatron_rc.replay.reading import NamedBatch


@dataclass(frozen=True)
class Tokens:
    """Tokens of one batch, in token positions."""

    name: str  # of the batch
    records: RolloutBatch
    mask: Tensor  # [n, s] bool, sampled tokens that the trainer scored
    # [n, s] float64 each: sequence weights of long responses are smaller than any float32.
    rollout: Tensor  # log π_rollout
    old: Tensor  # log π_old
    theta: Tensor  # log π_θ in the batch's last optimizer step, or log π_old
    versions: Tensor  # [n, s] or [n] int64, minus the age of the sampling weights in steps

    @property
    def ages(self) -> Tensor:
        """[n] int64: age in steps of the oldest weights that sampled each sequence."""
        if self.versions.dim() == 1:
            return -self.versions
        return torch.where(self.mask, -self.versions, 0).amax(dim=1)


@dataclass(frozen=True)
class Recorded:
    """Several batches, replayed as one of n sequences."""

    parts: tuple[Tokens, ...]
    rewards: Tensor  # [n] float64
    group_ids: Tensor  # [n] int64, numbers of the prompts from 0
    advantages: Tensor  # [n] float32, GRPO's advantages: some criteria need their signs
    lengths: Tensor  # [n] int64, tokens of ``mask``
    ages: Tensor  # [n] int64, see Tokens
    unscored: int  # sampled tokens that the trainer did not score; they count nowhere
    notes: tuple[str, ...]  # sentences about what records lack, each with the batch's name

    def split(self, values: Tensor) -> list[Tensor]:
        """Split one value for each sequence by part."""
        return list(values.split([len(part.mask) for part in self.parts]))


def recorded(batches: Sequence[NamedBatch]) -> Recorded:
    """Join batches; ValueError if no sampled token has a log-prob of the trainer."""
    parts = tuple(_tokens(batch) for batch in batches)
    lengths = torch.cat([part.mask.sum(dim=1) for part in parts])
    sampled = sum(int(part.records.response_mask.sum()) for part in parts)
    if not lengths.any():
        more = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
        reason = "".join(f" ({note})" for note in batches[0].notes)
        raise ValueError(
            f"{parts[0].name}{more}: no sampled token has a log-prob of the trainer (old_log_probs){reason}: write "
            "them with --save-rollouts DIR --save-log-probs, or read another program's record that has them"
        )
    rewards = torch.cat([part.records.rewards.double() for part in parts])
    group_ids = _numbered([part.records.group_ids for part in parts])
    rollout_ids = torch.cat([_rollout_ids(part.records) for part in parts])
    advantages = group_advantages(rewards, group_ids, kept=lengths > 0, rollout_ids=rollout_ids)
    return Recorded(
        parts=parts,
        rewards=rewards,
        group_ids=group_ids,
        advantages=advantages.float(),
        lengths=lengths,
        ages=torch.cat([part.ages for part in parts]),
        unscored=sampled - int(lengths.sum()),
        notes=tuple(f"{batch.name}: {note}" for batch in batches for note in batch.notes),
    )


def _tokens(batch: NamedBatch) -> Tokens:
    records = batch.records
    # A run in bypass mode scores nothing before its steps: log π_θ replaces log π_old.
    old = records.log_probs if records.old_log_probs is None else records.old_log_probs
    if old is None:  # its steps were skipped, or the run stopped before them
        old = torch.full_like(records.rollout_log_probs, torch.nan)
    # Tokens of no step keep log π_old.
    theta = old if records.log_probs is None else torch.where(records.log_probs.isnan(), old, records.log_probs)
    mask = records.response_mask & ~old.isnan()
    return Tokens(
        name=batch.name,
        records=records,
        mask=mask,
        rollout=records.rollout_log_probs.double(),
        old=old.double(),
        theta=theta.double(),
        versions=_versions(batch, mask),
    )


def _versions(batch: NamedBatch, mask: Tensor) -> Tensor:
    versions = batch.records.policy_versions
    limits = torch.iinfo(versions.dtype)
    empty = ~mask.any(dim=1)
    newest = torch.where(mask, versions, limits.min).amax(dim=1)
    oldest = torch.where(mask, versions, limits.max).amin(dim=1)
    if empty.all():
        return torch.zeros_like(newest, dtype=torch.int64)
    current = max(int(newest[~empty].max()), batch.version or 0)
    if (newest == oldest)[~empty].all():
        return torch.where(empty, 0, newest.long() - current)
    return torch.where(mask, versions.long() - current, 0)


def _rollout_ids(records: RolloutBatch) -> Tensor:
    """[n] int64: the rollout of each row; without ids in the record each row is one."""
    if records.rollout_ids is None:
        return torch.arange(records.num_sequences)
    return records.rollout_ids.long()


def _numbered(group_ids: Sequence[Tensor]) -> Tensor:
    """[n]: prompts numbered from 0; equal numbers in different batches are different prompts."""
    numbers = []
    first = 0
    for ids in group_ids:
        distinct, index = ids.unique(return_inverse=True)
        numbers.append(index + first)
        first += len(distinct)
    return torch.cat(numbers)
