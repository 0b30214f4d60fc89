"""An optimizer step: its losses count their micro-batches, and at its end the counts are compared with the plan.

A step is *open* from its first micro-batch until ``finish_step``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from megatron_rc.batch.chain import reduce_batch
from megatron_rc.correction.denominators import N
from megatron_rc.correction.inputs import AgreedCounts
from megatron_rc.loss.metrics import MAXIMA, SUMS, LossStatistics, derive_loss_metrics
from megatron_rc.measures.header import BatchHeader
from megatron_rc.parallel.collectives import largest, merged, on_host, pack, unpack
from megatron_rc.parallel.groups import ParallelGroups
from megatron_rc.training.micro_batch import CorrectedMicroBatch
from megatron_rc.training.plan import PlannedStep, StepError, TrainingResult
from megatron_rc.training.step_sums import StepSums

# Relative difference by which two sums of the same float32 weights may differ, because of the order of addition.
_TOLERANCE = 1e-5
# Absolute difference for each token: float32 weights below this have fewer digits, and may be rounded to 0.
_LEAST_WEIGHT = torch.finfo(torch.float32).tiny
_RESET = "zero the gradients and call reset_step() on every rank before a schedule is run again"


@dataclass(frozen=True)
class StepCounts(Generic[N]):
    """The numbers that a micro-batch adds to its optimizer step; merged over micro-batches, the numbers of a rank.

    A few thousand float64 numbers, however many tokens there are: the end of the step needs no token.
    """

    header: BatchHeader[N] | None  # numbers of a correction that is made in the loss; None: the plan has them
    loss: LossStatistics  # numbers for the metrics of the loss
    sums: StepSums[N]  # sums that are compared with those of the plan

    @classmethod
    def of(cls, corrected: CorrectedMicroBatch, statistics: LossStatistics | None = None) -> StepCounts[Tensor]:
        """Return the counts of one micro-batch; without ``statistics`` its loss has no metrics. Collectives: none."""
        return StepCounts(
            header=None if corrected.batch is None else corrected.batch.header,
            loss=statistics or LossStatistics.nothing(corrected.mask.device),
            sums=corrected.sums,
        )

    @classmethod
    def nothing(cls, header: BatchHeader[Tensor] | None, device: torch.device) -> StepCounts[Tensor]:
        """Return counts of 0, for a rank without a micro-batch; ``header`` is that of a correction of no token."""
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return StepCounts(
            header=header,
            loss=LossStatistics.nothing(device),
            sums=StepSums(tokens=zero, ids=zero, weights=zero),
        )


@dataclass(frozen=True)
class StepHeader(Generic[N]):
    """All numbers of an optimizer step at its end, equal on every rank.

    They are sums over the ranks of the last pipeline stage; ``planned`` and ``factor`` come from the plan.
    """

    counts: StepCounts[N]
    micro_batches: N  # number of micro-batches that were counted
    expected_micro_batches: N  # number that the LossScale was made for; without a LossScale, the number counted
    idle_ranks: N  # number of ranks that counted no micro-batch
    planned: StepSums[N]  # the sums that the plan expects; NaN if not known
    divisor: N = largest()  # number of tokens that Megatron divided the gradients by; 0: it did not divide
    expected_divisor: N = largest()  # number of tokens that the LossScale was made for; 0: none
    factor: N = largest()  # factor by which the gradients must be multiplied


class OpenStep:
    """The micro-batches that this rank has counted since the last optimizer step ended.

    Attributes:
        agreed: the counts of the plan whose ``plan`` or ``loss_scale`` was called last, on every stage: the shapes in
            headers follow from them.
        step: the step of the micro-batches; None before the first of them.
        num_micro_batches: number of the micro-batches.
        num_sequences: number of sequences in the micro-batches.
    """

    def __init__(self) -> None:
        self.agreed = AgreedCounts()
        self.reset()

    def reset(self) -> None:
        """Forget all micro-batches."""
        self.step: PlannedStep | None = None
        self.num_micro_batches = 0
        self.num_sequences = 0
        self._counts: StepCounts[Tensor] | None = None
        self._divisor: int | Tensor | None = None

    def check_ended(self) -> None:
        """Raise StepError if all micro-batches of the open step were counted, so that it should have been ended."""
        expected = None if self.step is None else self.step.num_microbatches
        if expected is not None and self.num_micro_batches >= expected:
            raise StepError(
                "all micro-batches of a step were counted, and nothing has ended it or scaled its gradients: before a "
                "schedule, set finalize_model_grads_func=wrap_finalize(correction) in this model's config, on every "
                f"pipeline stage; if the end of the step was refused, {_RESET}"
            )

    def count(self, step: PlannedStep, counts: StepCounts[Tensor], num_sequences: int) -> None:
        """Add one micro-batch. Collectives: none.

        Raises StepError if another step is still open.
        """
        if self.step is not None and not self.step.is_same(step):
            raise StepError(
                f"a loss of mini_batch={step.mini_batch} in the open step of mini-batch {self.step.mini_batch} of "
                f"{'this' if self.step.plan is step.plan else 'another'} plan: end each step with finish_step(), as "
                f"wrap_finalize() does; if that step is given up, {_RESET}"
            )
        self.step = step
        self.num_micro_batches += 1
        self.num_sequences += num_sequences
        self._counts = counts if self._counts is None else merged([self._counts, counts])

    def note_divisor(self, num_tokens: int | Tensor | None) -> None:
        """Remember the number of tokens that Megatron has divided the gradients by; None: it has not divided them."""
        self._divisor = 0 if num_tokens is None else num_tokens

    def header(self, nothing: StepCounts[Tensor], groups: ParallelGroups) -> StepHeader[Tensor]:
        """Return the numbers of the step over all ranks of the last stage, with the sums and the factor of the plan.

        On other stages the numbers mean nothing: the record only has the shapes that a broadcast needs. ``nothing`` are
        the counts of a rank without a micro-batch, on the device of the header.

        Collectives: one SUM and one MAX over ``dp_cp``, on the last stage.
        """
        local = self._local_header(nothing)
        if not groups.is_last_stage:
            return local
        local = dataclasses.replace(local, idle_ranks=local.idle_ranks + (self.num_micro_batches == 0))
        header = unpack(local, reduce_batch(pack(local), groups))
        if self.step is None:
            return header
        plan = self.step.plan
        mini_batch = self.step.mini_batch
        batch_header, factor = plan.gradient_factor(header.counts.header, mini_batch)
        return dataclasses.replace(
            header,
            counts=dataclasses.replace(header.counts, header=batch_header),
            planned=plan.step_sums(mini_batch),
            factor=factor,
        )

    def _local_header(self, nothing: StepCounts[Tensor]) -> StepHeader[Tensor]:
        """Return the numbers of this rank; NaN and a factor of 1 take the place of those that the plan must give."""
        counts = nothing if self._counts is None else self._counts
        number = functools.partial(torch.full_like, counts.sums.tokens)

        expected_micro_batches = self.num_micro_batches
        expected_divisor = 0
        if self.step is not None:
            expected_micro_batches = self.step.num_microbatches or self.num_micro_batches
            expected_divisor = self.step.total_tokens or 0
        if isinstance(self._divisor, Tensor):
            # Megatron's own sum, on the device: the host must not wait for it.
            divisor = self._divisor.to(torch.float64).reshape(())
        else:
            divisor = number(expected_divisor if self._divisor is None else self._divisor)

        return StepHeader(
            counts=counts,
            micro_batches=number(self.num_micro_batches),
            expected_micro_batches=number(expected_micro_batches),
            idle_ranks=number(0),
            planned=StepSums(tokens=number(math.nan), ids=number(math.nan), weights=number(math.nan)),
            divisor=divisor,
            expected_divisor=number(expected_divisor),
            factor=number(1),
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class StepResult(TrainingResult):
    """The result of an optimizer step that has ended, equal on every rank.

    ``header`` has the numbers of the step's correction. In decoupled mode it is None, because the plan has them.
    """

    step: StepHeader[Tensor]  # all numbers of the step, on the device

    @property
    def factor(self) -> Tensor:
        """0-D float64: the factor by which the gradients must be multiplied; 0 if the step must be skipped."""
        return self.step.factor

    @functools.cached_property
    def on_host(self) -> BatchHeader[float]:
        """The correction's numbers on the host, from the synchronisation that ends the step."""
        header = self.step_on_host.counts.header
        if header is None:
            raise ValueError("in decoupled mode a step has no numbers of the correction: the plan has them")
        return header

    def loss_metrics(self) -> dict[str, float]:
        """Metrics of the loss."""
        loss = self.step_on_host.counts.loss
        sums = dict(zip(SUMS, loss.sums, strict=True))
        maxima = dict(zip(MAXIMA, loss.maxima, strict=True))
        metrics = derive_loss_metrics(sums, maxima)
        # Each micro-batch's loss was divided by D₀; times D₀/G it is that of the step.
        metrics["loss/total"] *= self.step_on_host.factor
        return metrics

    @functools.cached_property
    def step_on_host(self) -> StepHeader[float]:
        """All numbers of the step on the host; the first access is the step's one host synchronisation."""
        step: StepHeader[float] = on_host(self.step)
        return step


def check_step(step: StepHeader[float]) -> None:
    """Raise StepError unless the losses of a step were run on exactly the tokens of its mini-batch in the plan.

    A micro-batch may be missing, counted twice, or of another mini-batch. ``step`` is equal on all ranks, so that all
    of them raise alike.
    """
    # In decoupled mode, a trainer that computes its own loss counts no micro-batch on any rank: no rank is missing.
    corrects_in_loss = step.counts.header is not None
    if step.idle_ranks and (corrects_in_loss or step.micro_batches):
        raise StepError(
            f"finish_step() without a micro-batch on {step.idle_ranks:.0f} ranks: no loss of this step was run "
            "backward there: make it with masked_loss() in a schedule that is not forward-only, or call in_loss()"
        )

    counted = step.counts.sums
    planned = step.planned
    # If any micro-batch came without ids, the counted sum of ids is NaN, and cannot be compared.
    planned_ids = math.nan if math.isnan(counted.ids) else planned.ids
    weight_tolerance = _TOLERANCE * planned.weights + _LEAST_WEIGHT * counted.tokens
    comparisons = [
        ("micro-batches", step.micro_batches, step.expected_micro_batches, 0.0),
        ("tokens", counted.tokens, planned.tokens, 0.0),
        ("sum of (sequence id + 1) over tokens", counted.ids, planned_ids, 0.0),
        ("sum of weights over tokens", counted.weights, planned.weights, weight_tolerance),
        ("total_tokens of calculate_per_token_loss", step.divisor, step.expected_divisor, 0.0),
    ]
    differences = [
        f"{name} {count:.10g} instead of {expected:.10g}"
        for name, count, expected, tolerance in comparisons
        if not _agree(count, expected, tolerance)
    ]
    if differences:
        raise StepError(
            "the micro-batches that this step has counted are not those of its mini-batch in the plan "
            f"({', '.join(differences)}): one is missing, was counted twice (as after a schedule that failed) or "
            "belongs to another mini-batch; or one has the mask or the weights of other tokens; or plan.loss_scale() "
            "was told another num_microbatches, local_microbatches, calculate_per_token_loss or total_tokens than "
            f"Megatron's schedule has: {_RESET}"
        )


def _agree(counted: float, expected: float, tolerance: float) -> bool:
    """Return True if a counted number equals the expected one within ``tolerance``, or the expected one is NaN.

    An expected number is NaN if the plan does not know it. A counted number that is NaN differs from any expected one.
    """
    return math.isnan(expected) or abs(counted - expected) <= tolerance
