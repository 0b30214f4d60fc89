"""What is known of a rollout batch before π_θ is, where the correction is made in the loss."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.correction.inputs import AgreedCounts, AnyInputs
from megatron_rc.correction.plans import Plan
from megatron_rc.correction.shards import collect_shards
from megatron_rc.correction.training_result import index_of
from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.parallel.collectives import all_reduce_sum
from megatron_rc.parallel.groups import ParallelGroups
from megatron_rc.settings.config import RolloutCorrectionConfig


@dataclass(frozen=True)
class MaskCounts:
    """What the response masks of a rollout batch say, over all ranks.

    Attributes:
        tokens: [num_mini_batches] float64, under the response mask.
        sequences: [num_mini_batches] float64, that have such a token.
        bad_ids: 0-D float64, sequences among them whose mini-batch id is out of range, and which another one counts.
    """

    tokens: Tensor
    sequences: Tensor
    bad_ids: Tensor

    def summed(self, groups: ParallelGroups) -> MaskCounts:
        """The sum over ranks with other sequences. Collectives: one SUM of 2 num_mini_batches + 1 over ``dp_cp``."""
        total = all_reduce_sum(torch.cat([self.tokens, self.sequences, self.bad_ids.view(1)]), groups.dp_cp)
        tokens, sequences = total[:-1].chunk(2)
        return MaskCounts(tokens, sequences, total[-1])


def count_masks(inputs: AnyInputs, counts: AgreedCounts, groups: ParallelGroups) -> MaskCounts:
    """Count the response masks of a rollout batch, which are checked as :func:`collect_shards` does.

    Collectives: one SUM of [n] over ``cp``, then that of ``summed``.
    """
    # π_θ is not known yet, and only the masks are counted.
    shards = collect_shards(dataclasses.replace(inputs, train_log_probs=inputs.rollout_log_probs), counts, groups)
    tokens = torch.cat([part.layout.sum_sequences(part.mask) for part in shards.parts])
    tokens = all_reduce_sum(tokens, groups.cp)
    has_tokens = tokens > 0
    # Whole sequences are counted once: on the first CP rank.
    rows = torch.stack([tokens, has_tokens.double()]) * shards.is_first_cp_rank
    of_tokens, of_sequences = rows.new_zeros(2, counts.num_mini_batches).index_add_(1, shards.mini_batch_ids, rows)
    bad_ids = (shards.bad["mini_batch_ids"] & has_tokens).sum().double() * shards.is_first_cp_rank
    return MaskCounts(of_tokens, of_sequences, bad_ids).summed(groups)


class InLossPlan(Plan):
    """What is known of a rollout batch before π_θ is, where the correction is made in the loss.

    Attributes:
        counts: under the response mask; None on pipeline stages without log-probs.
        steps_ended: optimizer steps on this plan that lie behind, those that were skipped too; on the last stage.
    """

    def __init__(
        self,
        config: RolloutCorrectionConfig,
        loss: PolicyLossConfig,
        groups: ParallelGroups,
        agreed: AgreedCounts,
        counts: MaskCounts | None,
    ) -> None:
        self.config, self.loss, self.groups, self.agreed = config, loss, groups, agreed
        self.counts = counts
        self.steps_ended = 0

    @property
    def counted(self) -> Tensor:
        """See :class:`Plan`: under the response mask."""
        if self.counts is None:
            return torch.full((self.num_mini_batches, 2), torch.nan, dtype=torch.float64)
        return torch.stack([self.counts.tokens, self.counts.sequences], dim=1)

    @property
    def skip(self) -> Tensor | None:
        """[num_mini_batches] bool: nothing to train on, known before the schedule; None without log-probs."""
        return None if self.counts is None else self.counts.tokens == 0

    def check(self) -> None:
        """Nothing is known to be wrong before π_θ is: the ``check()`` of each step's result raises, on every stage."""

    def metrics(self) -> dict[str, float]:
        """No metrics yet: those of a step follow ``finish_step``."""
        return {}

    def skips(self, mini_batch: int | None = None) -> bool:
        """Not known on every rank before the step: its result says so."""
        index_of(mini_batch, self.num_mini_batches)
        return False
