"""The open step: the counts of one rank since the last optimizer step ended."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.loss.metrics import LossStatistics
from megatron_rc.parallel.collectives import Pair, pack, unpack
from megatron_rc.training.micro_batch import CorrectedMicroBatch
from megatron_rc.training.misuse import Misuse
from megatron_rc.training.plan import PlannedStep
from megatron_rc.training.step_result import Counted, StepHeader


@dataclass
class OpenStep:
    """The counts of one rank since the last step ended.

    Attributes:
        step: whose denominator the losses were divided by; None before the first of them.
        batch: sums and maxima of the micro-batches that were corrected in the loss.
        statistics: the measures of the losses.
        counted: the tokens of the losses.
        micro_batches: how many were counted.
        sequences: how many sequences they have.
        found: the mistakes that are known already.
        refused: the message of a loss that was refused.
    """

    step: PlannedStep | None = None
    batch: Pair | None = None
    statistics: LossStatistics | None = None
    counted: Pair | None = None
    micro_batches: int = 0
    sequences: int = 0
    found: frozenset[Misuse] = frozenset()
    refused: str | None = None

    def is_of(self, step: PlannedStep) -> bool:
        """Whether this step, if it has begun, is that one."""
        return self.step is None or (self.step.plan is step.plan and self.step.mini_batch == step.mini_batch)

    def holds_steps(self, number: int) -> bool:
        """Whether the micro-batches of so many whole steps have been counted: one that failed leaves fewer."""
        return self._wanted is not None and self.micro_batches >= number * self._wanted

    def count(self, step: PlannedStep, counted: Counted[Tensor], found: CorrectedMicroBatch) -> None:
        """Add one micro-batch."""
        if not self.is_of(step):
            self.note(Misuse.SEVERAL_STEPS)
        self.step = self.step or step
        self.micro_batches += 1
        self.sequences += len(found.sequence_lengths)
        self.counted = _merged(self.counted, pack(counted))
        if found.header is not None:
            self.batch = _merged(self.batch, pack(found.header))

    def record(self, statistics: LossStatistics) -> None:
        """Add the measures of the loss of a micro-batch."""
        self.statistics = statistics if self.statistics is None else self.statistics.merge(statistics)

    def note(self, misuse: Misuse) -> None:
        """Note something wrong with the step, for its end to raise on every rank."""
        self.found |= {misuse}

    def header(self, form: StepHeader[Tensor]) -> tuple[StepHeader[Tensor], int]:
        """(the numbers of this rank in the form of every rank's, the number of the mistake in them or 0)."""
        found = set(self.found)
        if self._wanted not in (None, self.micro_batches):
            found.add(Misuse.UNFINISHED)
        batch = form.batch
        if self.batch is not None and batch is not None:
            if len(self.batch[0]) == len(pack(batch)[0]):
                batch = unpack(batch, self.batch)
            else:
                found.add(Misuse.OTHER_PLAN)
        counted = form.counted
        if self.counted is not None:
            each = unpack(counted, self.counted)
            number = torch.full_like(each.tokens, self.micro_batches)
            counted = dataclasses.replace(each, most=number, fewest=number)
        statistics = form.loss if self.statistics is None else self.statistics
        header = dataclasses.replace(form, batch=batch, loss=statistics, counted=counted)
        return header, max(found, default=0)

    @property
    def _wanted(self) -> int | None:
        return None if self.step is None else self.step.num_microbatches


def _merged(one: Pair | None, other: Pair) -> Pair:
    """The pair of both; of pairs of different lengths, the first."""
    if one is None:
        return other
    if len(one[0]) != len(other[0]):
        return one
    return one[0] + other[0], torch.maximum(one[1], other[1])
