"""What is known of a rollout batch before π_θ is, where the correction is made in the loss."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.correction.inputs import AgreedCounts, PlanInputs, Tensors
from megatron_rc.correction.plans import Plan
from megatron_rc.correction.shards import collect_shards
from megatron_rc.correction.training_result import index_of
from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.parallel.groups import ParallelGroups
from megatron_rc.settings.config import RolloutCorrectionConfig


@dataclass(frozen=True)
class Masks:
    """What bypass mode knows before the schedule.

    Attributes:
        tokens: [n] float64, local tokens of the response mask.
        padded: [n] float64, tokens of each whole sequence, padding included.
        mini_batch_ids: [n] int64.
        num_mini_batches: of the rollout batch.
        bad_ids: [n] bool, ids that were out of range.
        is_first_cp_rank: this rank counts whole sequences.
    """

    tokens: Tensor
    padded: Tensor
    mini_batch_ids: Tensor
    num_mini_batches: int
    bad_ids: Tensor
    is_first_cp_rank: bool

    def mini_batch_counts(self, tokens: Tensor) -> Tensor:
        """[num_mini_batches, 4] float64: tokens, sequences, padded tokens; ids out of range in the first row."""
        columns = torch.stack([tokens, (tokens > 0).double(), self.padded, torch.zeros_like(tokens)], dim=1)
        counts = torch.zeros(self.num_mini_batches, 4, dtype=torch.float64, device=tokens.device)
        counts.index_add_(0, self.mini_batch_ids, columns)
        counts[0, 3] = (self.bad_ids & (tokens > 0)).sum()
        return counts * self.is_first_cp_rank


def collect_masks(inputs: PlanInputs, counts: AgreedCounts, groups: ParallelGroups) -> Masks:
    """The response masks of a rollout batch, checked as :func:`collect_shards` does; π_θ is not known yet."""
    mask = inputs.response_mask
    stand_in: Tensors = mask.float() if isinstance(mask, Tensor) else [part.float() for part in mask]
    shards = collect_shards(dataclasses.replace(inputs, train_log_probs=stand_in), counts, groups)
    return Masks(
        tokens=torch.cat([part.layout.sum_sequences(part.mask) for part in shards.parts]),
        padded=torch.cat(
            [torch.tensor(part.layout.full_lengths, dtype=torch.float64, device=shards.device) for part in shards.parts]
        ),
        mini_batch_ids=shards.mini_batch_ids,
        num_mini_batches=counts.num_mini_batches,
        bad_ids=shards.bad["mini_batch_ids"],
        is_first_cp_rank=shards.is_first_cp_rank,
    )


class InLossPlan(Plan):
    """What is known of a rollout batch before π_θ is, where the correction is made in the loss.

    Attributes:
        counts: [num_mini_batches, 4] float64: tokens and sequences under the response mask, tokens with padding, and in
            the first row mini-batch ids that were out of range; None on pipeline stages without log-probs.
        steps_ended: optimizer steps on this plan that lie behind, those that were skipped too; on the last stage.
    """

    def __init__(
        self,
        config: RolloutCorrectionConfig,
        loss: PolicyLossConfig,
        groups: ParallelGroups,
        agreed: AgreedCounts,
        counts: Tensor | None,
    ) -> None:
        self.config, self.loss, self.groups, self.agreed = config, loss, groups, agreed
        self.counts = counts
        self.steps_ended = 0

    @property
    def counted(self) -> Tensor:
        """See :class:`Plan`: under the response mask."""
        if self.counts is None:
            return torch.full((self.num_mini_batches, 2), torch.nan, dtype=torch.float64)
        return self.counts[:, :2]

    @property
    def skip(self) -> Tensor | None:
        """[num_mini_batches] bool: nothing to train on, known before the schedule; None without log-probs."""
        return None if self.counts is None else self.counts[:, 0] == 0

    def check(self) -> None:
        """Nothing is known to be wrong before π_θ is: the ``check()`` of each step's result raises, on every stage."""

    def metrics(self) -> dict[str, float]:
        """No metrics yet: those of a step follow ``finish_step``."""
        return {}

    def skips(self, mini_batch: int | None = None) -> bool:
        """Not known on every rank before the step: its result says so."""
        index_of(mini_batch, self.num_mini_batches)
        return False

    @property
    def bad_ids(self) -> Tensor:
        """0-D float64: mini-batch ids that were out of range."""
        return torch.zeros(()) if self.counts is None else self.counts[0, 3]
