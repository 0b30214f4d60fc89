"""A plan: the facts about a rollout batch before its optimizer steps, and the factors of each step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_rc.batch.result import CorrectionResult
from megatron_rc.correction.inputs import PER_SEQUENCE, AgreedCounts, AnyInputs, is_one_a_sequence, split_inputs
from megatron_rc.loss.aggregation import denominator
from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.measures.header import BatchHeader
from megatron_rc.parallel.arguments import check_integer
from megatron_rc.parallel.groups import ParallelGroups, group_size
from megatron_rc.parallel.layout import SequenceLayout
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.training.micro_batch import CorrectedMicroBatch, MicroBatch
from megatron_rc.training.step_sums import StepSums


class StepError(ValueError, RuntimeError):
    """An optimizer step that is not the one that its plan describes, or a call at the wrong moment of a step."""


@dataclass(frozen=True)
class Setup:
    """The arguments of a :class:`RolloutCorrection`, the objective's algorithm filled in."""

    config: RolloutCorrectionConfig
    groups: ParallelGroups
    loss: PolicyLossConfig
    allow_zero_log_probs: bool = False
    compile: bool = False
    one_pass: bool = False

    @property
    def corrects_in_loss(self) -> bool:
        """Whether the correction is made inside the loss, from π_θ."""
        return self.config.corrects_in_loss or self.one_pass


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """One optimizer step: a mini-batch of a plan."""

    plan: Plan
    mini_batch: int
    num_microbatches: int | None = None  # of this step, on this rank; None if the caller did not say it
    total_tokens: int | None = None  # Megatron's divisor of the gradients, with calculate_per_token_loss; else None

    def is_same(self, other: PlannedStep) -> bool:
        """Whether both are the same mini-batch of the same plan."""
        return self.plan is other.plan and self.mini_batch == other.mini_batch


@dataclass(frozen=True, eq=False)
class LossScale:
    """The global factors of one optimizer step, from ``plan.loss_scale()``: equal on all ranks that share them.

    Attributes:
        denominator: 0-D float64, above 0: the sum of the loss over the whole mini-batch is divided by it; under the
            response mask if the final one follows after the step. NaN on pipeline stages that compute no loss.
        num_microbatches: of this step, Megatron's divisor.
        dp_cp_size: number of ranks that hold different tokens.
        calculate_per_token_loss: Megatron's setting of that name.
        local_tokens: tokens of a micro-batch on this rank, padding included; 0: each one has its own number.
        total_tokens: their sum over all micro-batches and ranks of the step, below 2³¹.
        step: the optimizer step: ``masked_loss`` counts for it, and its end compares the counts with its plan.
    """

    denominator: Tensor
    num_microbatches: int
    dp_cp_size: int
    calculate_per_token_loss: bool
    local_tokens: int
    total_tokens: int
    step: PlannedStep | None = None


class OpenCounts(Protocol):
    """The open optimizer step of a correction, as its plans see it."""

    agreed: AgreedCounts  # of the plan that was made or gave a scale last
    num_sequences: int  # sequences of the micro-batches that were counted so far

    def check_ended(self) -> None:
        """Raise StepError if a whole step was counted, and nothing has ended it."""


@dataclass
class Progress:
    """The history of a plan since it was made."""

    is_checked: bool = False  # ``check()`` was called and found nothing wrong
    steps_ended: int = 0  # the optimizer steps that have ended, the skipped ones too; known on the last stage


class Plan(ABC):
    """The facts about a rollout batch before the schedule, in both modes."""

    config: RolloutCorrectionConfig
    loss: PolicyLossConfig  # the objective: its aggregation decides the denominators
    agreed: AgreedCounts  # the counts that all ranks agreed on
    groups: ParallelGroups
    open_step: OpenCounts  # of the correction that the plan belongs to
    progress: Progress
    has_sequence_ids: bool  # the plan's inputs had ``sequence_ids``

    @property
    def num_mini_batches(self) -> int:
        """Optimizer steps that share the batch."""
        return self.agreed.num_mini_batches

    @property
    @abstractmethod
    def counted(self) -> Tensor:
        """[num_mini_batches, 2] float64: tokens and sequences that the loss is divided by; NaN if not known."""

    @abstractmethod
    def check(self) -> None:
        """Raise ValueError on every rank alike if the data cannot be right."""

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Metrics that are known already, equal on every rank."""

    @abstractmethod
    def skips(self, mini_batch: int | None = None) -> bool:
        """Whether it is known already, on every rank, that the optimizer step must not be made."""

    @abstractmethod
    def corrected(self, micro_batch: MicroBatch, log_probs: Tensor) -> CorrectedMicroBatch:
        """The correction of one micro-batch; ValueError for something that the mode needs, or would ignore."""

    @abstractmethod
    def step_sums(self, mini_batch: int) -> StepSums[Tensor]:
        """The sums that the micro-batches of an optimizer step must have, over all ranks, 0-D float64."""

    @abstractmethod
    def gradient_factor(
        self, header: BatchHeader[Tensor] | None, mini_batch: int
    ) -> tuple[BatchHeader[Tensor] | None, Tensor]:
        """The factor of the gradients of a step, 0-D float64, and the step's header as it is to be reported.

        ``header`` has the numbers of the step's correction over all ranks; None in decoupled mode: the plan has them.
        """

    def loss_scale(
        self,
        mini_batch: int | None = None,
        *,
        num_microbatches: int,
        local_microbatches: int = 0,
        calculate_per_token_loss: bool = False,
        local_tokens: int = 0,
        total_tokens: int = 0,
    ) -> LossScale:
        """The factors of one optimizer step, for the losses of all its micro-batches. Collectives: none.

        Args:
            mini_batch: its index; may be left out if there is one.
            num_microbatches: of this step, as Megatron's schedule is told, which divides by them.
            local_microbatches: of this step on this rank. Default: as many; CP groups of their own may need others.
            calculate_per_token_loss: Megatron's setting of that name, which needs ``total_tokens``.
            local_tokens: tokens that each micro-batch on this rank must have, padding included. Default: any number.
            total_tokens: tokens of all micro-batches of the step on all ranks with different tokens.

        Raises:
            ValueError: a mini-batch that is not there, or none named although there are several; impossible counts.
            StepError: ``check()`` was never called; or a whole step was counted and nothing has ended it, because
                ``wrap_finalize`` is not in the model's config. Only the last stage sees the latter; on every stage
                ``loss_metrics()`` raises.
        """
        self.open_step.check_ended()
        if not self.progress.is_checked:
            raise StepError("plan.loss_scale() before plan.check(): call check() first, which raises for bad data")
        check_integer("num_microbatches", num_microbatches, least=1)
        check_integer("local_microbatches", local_microbatches, least=0)
        # Megatron counts tokens in int32.
        if calculate_per_token_loss and not max(local_tokens, 1) <= total_tokens < 2**31:
            raise ValueError(
                f"local_tokens={local_tokens}, total_tokens={total_tokens}: calculate_per_token_loss needs the tokens "
                "of the whole step, padding included, below 2³¹, and not fewer than those of a micro-batch on this rank"
            )
        index = index_of(mini_batch, self.num_mini_batches)
        self.open_step.agreed = self.agreed
        step = PlannedStep(
            plan=self,
            mini_batch=index,
            num_microbatches=local_microbatches or num_microbatches,
            total_tokens=total_tokens if calculate_per_token_loss else None,
        )
        return LossScale(
            denominator=self.denominator(index),
            num_microbatches=num_microbatches,
            dp_cp_size=group_size(self.groups.dp_cp),
            calculate_per_token_loss=calculate_per_token_loss,
            local_tokens=local_tokens,
            total_tokens=total_tokens,
            step=step,
        )

    def micro_batches(self, inputs: AnyInputs) -> list[MicroBatch]:
        """The inputs of the loss of each micro-batch, from the plan's inputs and its results; on the last stage.

        ``inputs`` are the plan's, in lists with one entry a micro-batch (or of a single one), with advantages.
        """
        if inputs.advantages is None:
            raise ValueError("advantages are missing: the loss needs PlanInputs(advantages=...)")
        inputs_of_each = split_inputs(inputs, self.groups)
        for name in PER_SEQUENCE:
            if getattr(inputs, name) is not None:
                is_one_a_sequence(name, inputs_of_each)
        layouts = [each.layout for each in inputs_of_each if each.layout is not None]
        results = self._results(layouts)
        if not self.has_sequence_ids:
            results["plan_ids"] = _local_indices(layouts, inputs_of_each[0].response_mask.device)

        micro_batches = []
        for index, each in enumerate(inputs_of_each):
            results_of_each = {name: values[index] for name, values in results.items()}
            micro_batches.append(MicroBatch(**vars(each), **results_of_each))
        return micro_batches

    def _results(self, layouts: Sequence[SequenceLayout]) -> dict[str, list[Any]]:
        """The plan's results for each micro-batch, by the names of MicroBatch's fields."""
        return {}

    def ids_of_step(self, sequence_ids: Tensor | None, plan_ids: Tensor | None = None) -> Tensor | None:
        """The ids by which the end of a step recognises a micro-batch's sequences, [n]; None if it cannot.

        Both arguments are fields of the micro-batch. ``sequence_ids`` that the plan does not know are not compared.
        """
        return sequence_ids if self.has_sequence_ids else plan_ids

    def denominator(self, mini_batch: int) -> Tensor:
        """0-D float64, above 0: the loss of a mini-batch is divided by it."""
        # A mini-batch without tokens has a loss of 0, whatever it is divided by.
        tokens, sequences = self.counted[mini_batch].clamp(min=1)
        return denominator(self.loss.aggregation, self.loss.loss_scale_factor, tokens, sequences)


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainingResult(CorrectionResult):
    """A result whose objective is known, and so which optimizer steps would move the model by momentum alone."""

    loss: PolicyLossConfig

    @property
    def skip(self) -> Tensor:
        """[num_mini_batches] bool: no token is accepted, or none has a weight and the objective has no other term."""
        skip = super().skip
        if self._needs_weights:
            skip = skip | (self.header.denominators.weights == 0)
        return skip

    def skips(self, mini_batch: int | None = None) -> bool:
        """``skip`` of one mini-batch on the host, from the synchronisation that ``check()`` makes."""
        counts = self.on_host.denominators.counts
        index = index_of(mini_batch, len(counts))
        return counts[index][2] == 0 or self._is_weightless[index]

    @property
    def num_weightless(self) -> float:
        """Mini-batches with accepted tokens of which none has a weight."""
        counts = self.on_host.denominators.counts
        rows = zip(counts, self._is_weightless, strict=True)
        return float(sum(1 for row, is_weightless in rows if row[2] > 0 and is_weightless))

    def metrics(self) -> dict[str, float]:
        """Metrics of the correction; with the mode ``mask`` also how many mini-batches have no weight left."""
        metrics = super().metrics()
        if self.config.may_weigh_nothing:
            metrics[f"{self.config.metric_prefix}rollout_is_weightless_mini_batches"] = self.num_weightless
        return metrics

    @property
    def _needs_weights(self) -> bool:
        """The loss has no term without weights."""
        return self.config.may_weigh_nothing and not (self.loss.entropy_coef or self.loss.kl_coef)

    @property
    def _is_weightless(self) -> list[bool]:
        """For each mini-batch whether the loss needs weights, and no accepted token has one."""
        return [self._needs_weights and weight == 0 for weight in self.on_host.denominators.weights]


def index_of(mini_batch: int | None, number: int) -> int:
    """The index of a mini-batch; ValueError if it is not there, or if none is named although there are several."""
    if mini_batch is None and number > 1:
        raise ValueError(f"the plan has {number} mini-batches: say which with mini_batch=")
    index = mini_batch or 0
    if not 0 <= index < number:
        raise ValueError(f"mini_batch={index} is not in [0, {number}) of the plan")
    return index


def _local_indices(layouts: Sequence[SequenceLayout], device: torch.device) -> list[Tensor]:
    """For each micro-batch the indices of its sequences among those of all micro-batches of this rank, int64."""
    sizes = [layout.num_sequences for layout in layouts]
    return list(torch.arange(sum(sizes), device=device).split(sizes))
