"""One optimizer step: the counts of a rank while it is open, and its numbers when it has ended."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Generic

import torch
from torch import Tensor

from megatron_rc.correction.denominators import N
from megatron_rc.loss.metrics import MAXIMA, SUMS, LossStatistics, derive_loss_metrics
from megatron_rc.measures.header import BatchHeader
from megatron_rc.parallel.collectives import Pair, largest, on_host, pack, unpack
from megatron_rc.training.micro_batch import Counted
from megatron_rc.training.misuse import Misuse
from megatron_rc.training.plan import PlannedStep
from megatron_rc.training.result import TrainingResult


@dataclass(frozen=True)
class StepHeader(Generic[N]):
    """All numbers of an optimizer step, or of a micro-batch of it."""

    batch: BatchHeader[N] | None  # the numbers of the correction, if it is made in the loss; else None
    loss: LossStatistics  # the measures of the losses
    counted: Counted[N]  # the tokens that they were made from
    misuse: N = largest()  # the number of the Misuse that any rank found; 0 without one
    factor: N = largest()  # the factor of the gradients


@dataclass
class OpenStep:
    """The counts of one rank since the last step ended."""

    step: PlannedStep | None = None  # whose denominator the losses were divided by; None before the first of them
    sums: Pair | None = None  # of the headers of the micro-batches
    micro_batches: int = 0
    sequences: int = 0  # of these micro-batches
    found: set[Misuse] = field(default_factory=set)  # the mistakes that are known already
    refused: str | None = None  # the message of a loss that was refused

    def is_of(self, step: PlannedStep) -> bool:
        """Whether this step, if it has begun, is that one."""
        return self.step is None or (self.step.plan is step.plan and self.step.mini_batch == step.mini_batch)

    def holds_steps(self, number: int) -> bool:
        """Whether the micro-batches of so many whole steps have been counted: one that failed leaves fewer."""
        wanted = None if self.step is None else self.step.num_microbatches
        return wanted is not None and self.micro_batches >= number * wanted

    def count(self, step: PlannedStep, header: StepHeader[Tensor], sequences: int) -> None:
        """Add one micro-batch."""
        if not self.is_of(step):
            self.found.add(Misuse.SEVERAL_STEPS)
        self.step = self.step or step
        self.micro_batches += 1
        self.sequences += sequences
        pair = pack(header)
        if self.sums is None:
            self.sums = pair
        elif len(self.sums[0]) == len(pair[0]):  # else they are of two plans
            self.sums = self.sums[0] + pair[0], torch.maximum(self.sums[1], pair[1])

    def header(self, form: StepHeader[Tensor]) -> StepHeader[Tensor]:
        """The numbers of this rank, in the form that every rank's have."""
        found = set(self.found)
        if self.step is not None and self.step.num_microbatches not in (None, self.micro_batches):
            found.add(Misuse.UNFINISHED)
        header, counted = form, form.counted
        if self.sums is not None and len(self.sums[0]) != len(pack(form)[0]):
            found.add(Misuse.OTHER_PLAN)
        elif self.sums is not None:
            header = unpack(form, self.sums)
            number = torch.full_like(header.counted.tokens, self.micro_batches)
            counted = dataclasses.replace(header.counted, most=number, fewest=number)
        misuse = torch.full_like(form.misuse, max(found, default=0))
        return dataclasses.replace(header, counted=counted, misuse=misuse, factor=form.factor)


@dataclass(frozen=True, eq=False, kw_only=True)
class StepResult(TrainingResult):
    """An optimizer step that has ended, equal on every rank; ``header`` is None in decoupled mode: the plan has it."""

    step: StepHeader[Tensor]  # all numbers of the step, on the device

    @property
    def factor(self) -> Tensor:
        """0-D float64: the factor of the gradients; 0 if the step must be skipped."""
        return self.step.factor

    @property
    def misuse(self) -> Misuse | None:
        """The mistake that any rank found in the step; None without one."""
        number = self._step_on_host.misuse
        return list(Misuse)[int(number) - 1] if number > 0 else None

    @functools.cached_property
    def on_host(self) -> BatchHeader[float]:
        """The correction's numbers on the host, from the synchronisation that ends the step."""
        if self._step_on_host.batch is None:
            raise ValueError("the numbers of the correction are those of the plan in decoupled mode")
        return self._step_on_host.batch

    def loss_metrics(self) -> dict[str, float]:
        """Metrics of the loss."""
        ended = self._step_on_host
        sums, maxima = dict(zip(SUMS, ended.loss.sums, strict=True)), dict(zip(MAXIMA, ended.loss.maxima, strict=True))
        metrics = derive_loss_metrics(sums, maxima)
        # Each micro-batch was divided by D₀.
        return metrics | {"loss/total": metrics["loss/total"] * ended.factor}

    @functools.cached_property
    def _step_on_host(self) -> StepHeader[float]:
        """The one host synchronisation, made once."""
        step: StepHeader[float] = on_host(self.step)
        return step
