"""Which responses an optimizer step trains: those with an accepted token that has a weight other than 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.batches.micro_batches import LocalBatch
from megatron_rc.parallel import ParallelGroups
from megatron_rc.parallel.groups import group_rank
from megatron_rc.training.micro_batch import CorrectedMicroBatch, MicroBatch
from megatron_rc.training.plan import PlannedStep
from megatron_rc.training.rollout_correction import RolloutCorrection


class CountingCorrection(RolloutCorrection):
    """A correction that counts the tokens which train, of each sequence.

    Attributes:
        num_training_tokens: for each micro-batch whose loss was computed, [n] float64, the number of this rank's tokens
            of each sequence that are accepted and have a weight other than 0. The trainer empties it before a step.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.num_training_tokens: list[Tensor] = []

    def corrected(self, micro_batch: MicroBatch, log_probs: Tensor, step: PlannedStep) -> CorrectedMicroBatch:
        """Return the correction of a micro-batch, as the base class does, and count its tokens."""
        corrected = super().corrected(micro_batch, log_probs, step)
        trains = corrected.mask
        if corrected.weights is not None:
            trains = trains & (corrected.weights != 0)
        self.num_training_tokens.append(micro_batch.layout.sum_sequences(trains))
        return corrected


class AcceptedResponses:
    """The responses of a mini-batch that train, on all ranks.

    They travel with the check of the gradient norm, a reduction over all ranks that is made anyway, and that returns
    element-wise maxima: each rank of the last stage fills its own places of a list of zeros.
    """

    def __init__(self, config: RunConfig, groups: ParallelGroups) -> None:
        self._size = config.training.global_batch_size
        self._rows = config.training.global_batch_size // config.data_parallel_size
        self._replica = group_rank(groups.dp)

    def numbers(self, batch: LocalBatch, mini_batch: int, num_training_tokens: Sequence[Tensor]) -> list[float]:
        """This rank's list for the reduction: 1 for a response with a token on this rank that trains, else 0.

        ``num_training_tokens``: of each micro-batch of the step, see :class:`CountingCorrection`; none on stages before
        the last. Host synchronisations: one.
        """
        is_accepted = torch.zeros(self._size, dtype=torch.float64)
        cuts = batch.cuts[mini_batch]
        if num_training_tokens:
            rows = torch.cat([batch.rows[cut.sequences] for cut in cuts])
            counts = torch.cat(list(num_training_tokens))
            # Padding, whose row is -1, has no token.
            rows_that_train = rows[counts > 0].cpu()
            is_accepted[rows_that_train + (self._replica - mini_batch) * self._rows] = 1
        return is_accepted.tolist()
