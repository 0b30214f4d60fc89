"""The numbers of one optimizer step, and their meaning when it has ended."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from megatron_rc.correction.denominators import N
from megatron_rc.loss.metrics import MAXIMA, SUMS, LossStatistics, derive_loss_metrics
from megatron_rc.measures.header import BatchHeader
from megatron_rc.parallel.collectives import largest, on_host, smallest
from megatron_rc.training.micro_batch import CorrectedMicroBatch
from megatron_rc.training.misuse import Misuse
from megatron_rc.training.result import TrainingResult


@dataclass(frozen=True)
class Counted(Generic[N]):
    """The tokens that the losses of a step were made from, to be compared with the plan's.

    Attributes:
        tokens: accepted tokens.
        weights: the sum of their weights; 0 if none are applied.
        outside: accepted tokens that are not in the response mask.
        strangers: sequences with trained tokens of another mini-batch than the step's.
        most: micro-batches of the rank that counted the most.
        fewest: micro-batches of the rank that counted the fewest.
    """

    tokens: N
    weights: N
    outside: N
    strangers: N
    most: N = largest()
    fewest: N = smallest()

    @classmethod
    def of(cls, response_mask: Tensor, found: CorrectedMicroBatch, strangers: Tensor | None = None) -> Counted[Tensor]:
        """The counts of one micro-batch, 0-D float64."""
        tokens = found.mask.sum(dtype=torch.float64)
        zero, one = torch.zeros_like(tokens), torch.ones_like(tokens)
        weights = None if found.weights is None else torch.where(found.mask, found.weights, 0)
        return Counted(
            tokens=tokens,
            weights=zero if weights is None else weights.sum(dtype=torch.float64),
            outside=(found.mask & ~response_mask).sum(),
            strangers=zero if strangers is None else strangers,
            most=one,
            fewest=one,
        )


@dataclass(frozen=True)
class StepHeader(Generic[N]):
    """All numbers of an optimizer step.

    Attributes:
        batch: the numbers of the correction, if it is made in the loss; else None.
        loss: the measures of the losses.
        counted: the tokens that they were made from.
        misuse: the number of the Misuse that any rank found; 0 without one.
        factor: the gradients are to be multiplied by it.
    """

    batch: BatchHeader[N] | None
    loss: LossStatistics
    counted: Counted[N]
    misuse: N = largest()
    factor: N = largest()


@dataclass(frozen=True, eq=False, kw_only=True)
class StepResult(TrainingResult):
    """An optimizer step that has ended, equal on every rank.

    Attributes:
        header: the numbers of the correction; None in decoupled mode: the plan has them.
        step: all numbers of the step, on the device.
    """

    step: StepHeader[Tensor]

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
