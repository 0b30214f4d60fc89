"""The plan of a rollout batch: what is known before its optimizer steps, and the factors of each step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_rc.batch.chain import CorrectionResult
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
    """An optimizer step differs from its plan, or a function is called at the wrong moment of a step."""


@dataclass(frozen=True)
class Setup:
    """The arguments of a :class:`RolloutCorrection`; ``loss.algorithm`` is no longer None."""

    config: RolloutCorrectionConfig
    groups: ParallelGroups
    loss: PolicyLossConfig
    allow_zero_log_probs: bool = False
    compile: bool = False
    one_pass: bool = False

    @property
    def corrects_in_loss(self) -> bool:
        """True if the correction is made inside the loss, from π_θ."""
        return self.config.corrects_in_loss or self.one_pass


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """One optimizer step: a mini-batch of a plan."""

    plan: Plan
    mini_batch: int  # index in the plan
    num_microbatches: int | None = None  # number of this step's micro-batches on this rank; None if it is not known
    total_tokens: int | None = None  # Megatron's divisor of the gradients, with calculate_per_token_loss; else None

    def is_same(self, other: PlannedStep) -> bool:
        """Return True if both are the same mini-batch of the same plan."""
        return self.plan is other.plan and self.mini_batch == other.mini_batch


@dataclass(frozen=True, eq=False)
class LossScale:
    """The factors that all losses of one optimizer step need, from ``plan.loss_scale()``.

    Attributes:
        denominator: 0-D float64, above 0: the sum of the losses over the whole mini-batch is divided by it. If the
            final denominator is known only after the step, it is the one under the response mask. NaN on pipeline
            stages that compute no loss.
        num_microbatches: number of the step's micro-batches, by which Megatron divides.
        dp_cp_size: number of ranks that hold different tokens.
        calculate_per_token_loss: Megatron's setting of that name.
        local_tokens: number of tokens of each micro-batch on this rank, padding included; 0: the numbers differ.
        total_tokens: number of tokens of all micro-batches on all ranks, padding included; below 2³¹.
        step: the optimizer step. ``masked_loss`` counts its micro-batches for it; ``finish_step`` compares the counts
            with the plan.
    """

    denominator: Tensor
    num_microbatches: int
    dp_cp_size: int
    calculate_per_token_loss: bool
    local_tokens: int
    total_tokens: int
    step: PlannedStep | None = None


class OpenCounts(Protocol):
    """The parts of a correction's open optimizer step that its plans use."""

    agreed: AgreedCounts  # the counts of the plan whose ``plan`` or ``loss_scale`` was called last
    num_sequences: int  # number of sequences in the micro-batches that were counted so far

    def check_ended(self) -> None:
        """Raise StepError if all micro-batches of the open step were counted, so that it should have been ended."""


@dataclass
class Progress:
    """What has happened with a plan since it was made."""

    is_checked: bool = False  # ``check()`` was called and found nothing wrong
    steps_ended: int = 0  # number of optimizer steps that have ended, skipped ones included; known on the last stage


class Plan(ABC):
    """What is known of a rollout batch before the schedule; each of the two modes has a subclass."""

    config: RolloutCorrectionConfig
    loss: PolicyLossConfig  # the objective: its aggregation decides the denominators
    agreed: AgreedCounts  # the arguments of ``plan`` that are equal on all ranks
    groups: ParallelGroups
    open_step: OpenCounts  # the open step of the RolloutCorrection that has made the plan
    progress: Progress
    has_sequence_ids: bool  # True if the plan's inputs had ``sequence_ids``

    @property
    def num_mini_batches(self) -> int:
        """Number of optimizer steps that share the batch."""
        return self.agreed.num_mini_batches

    @property
    @abstractmethod
    def counted(self) -> Tensor:
        """[num_mini_batches, 2] float64: numbers of tokens and of sequences, from which denominators are computed.

        NaN on pipeline stages that do not know them.
        """

    @abstractmethod
    def check(self) -> None:
        """Raise ValueError on every rank alike if the data cannot be right."""

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Return the metrics that are known before the steps, equal on every rank."""

    @abstractmethod
    def skips(self, mini_batch: int | None = None) -> bool:
        """Return True if every rank knows before the optimizer step that it must be skipped."""

    @abstractmethod
    def corrected(self, micro_batch: MicroBatch, log_probs: Tensor) -> CorrectedMicroBatch:
        """Return the correction of one micro-batch; ValueError for an input that is missing, or would be ignored."""

    @abstractmethod
    def step_sums(self, mini_batch: int) -> StepSums[Tensor]:
        """Return the sums over all ranks that the micro-batches of an optimizer step must have, 0-D float64."""

    @abstractmethod
    def gradient_factor(
        self, header: BatchHeader[Tensor] | None, mini_batch: int
    ) -> tuple[BatchHeader[Tensor] | None, Tensor]:
        """Return (header, factor) at the end of a step: the header for the step's result, the factor of its gradients.

        Args:
            header: numbers of the step's correction, over all ranks. In decoupled mode it is None: the plan has them.
            mini_batch: the step's mini-batch.
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
        """Return the factors that the losses of all micro-batches of one optimizer step need. Collectives: none.

        Args:
            mini_batch: index of the step's mini-batch; may be left out if the plan has a single one.
            num_microbatches: number of the step's micro-batches, as it is passed to Megatron's schedule, which divides
                by it.
            local_microbatches: number of the step's micro-batches on this rank. Default: ``num_microbatches``. It may
                be another one if micro-batches have CP groups of their own.
            calculate_per_token_loss: Megatron's setting of that name; with it ``total_tokens`` is needed.
            local_tokens: number of tokens that each micro-batch on this rank must have, padding included. Default: any.
            total_tokens: number of tokens of all micro-batches of the step, padding included, on all ranks with
                different tokens.

        Raises:
            ValueError: a mini-batch that the plan does not have, no mini-batch although it has several, or impossible
                counts.
            StepError: ``check()`` was not called; or all micro-batches of the step before were counted, but
                ``finish_step`` was not called, because ``wrap_finalize`` is not in the model's config. Only the last
                stage can notice this here; ``loss_metrics()`` raises on every stage.
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
        """Return the inputs of the loss for each micro-batch: its part of the plan's inputs and of its results.

        To be called on the last pipeline stage. ``inputs`` are those that the plan was made from, and must contain
        advantages: lists with one entry for each micro-batch, or the tensors of a single one.
        """
        if inputs.advantages is None:
            raise ValueError("advantages are missing: the loss needs PlanInputs(advantages=...)")
        split = split_inputs(inputs, self.groups)
        for name in PER_SEQUENCE:
            if getattr(inputs, name) is not None:
                is_one_a_sequence(name, split)
        layouts = [micro_inputs.layout for micro_inputs in split if micro_inputs.layout is not None]
        results = self._results(layouts)
        if not self.has_sequence_ids:
            results["plan_ids"] = _local_indices(layouts, split[0].response_mask.device)

        micro_batches = []
        for index, micro_inputs in enumerate(split):
            micro_results = {name: values[index] for name, values in results.items()}
            micro_batches.append(MicroBatch(**vars(micro_inputs), **micro_results))
        return micro_batches

    def _results(self, layouts: Sequence[SequenceLayout]) -> dict[str, list[Any]]:
        """Return the plan's results for each micro-batch, in lists, by the names of MicroBatch's fields."""
        return {}

    def ids_of_step(self, sequence_ids: Tensor | None, plan_ids: Tensor | None = None) -> Tensor | None:
        """Return the ids, [n], by which the end of a step recognises a micro-batch's sequences; None if there are none.

        Both arguments are fields of the micro-batch. ``sequence_ids`` are used only if the plan's inputs had some.
        """
        return sequence_ids if self.has_sequence_ids else plan_ids

    def denominator(self, mini_batch: int) -> Tensor:
        """Return the number by which the loss of a mini-batch is divided: 0-D float64, above 0."""
        # Without tokens the loss of a mini-batch is 0 anyway: at least 1, so that nothing is divided by 0.
        tokens, sequences = self.counted[mini_batch].clamp(min=1)
        return denominator(self.loss.aggregation, self.loss.loss_scale_factor, tokens, sequences)


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainingResult(CorrectionResult):
    """The result of a correction together with its objective, which decides whether a step can have a gradient.

    A step without a gradient must be skipped: the optimizer would move the model by momentum alone.
    """

    loss: PolicyLossConfig

    @property
    def skip(self) -> Tensor:
        """[num_mini_batches] bool: True if no token is accepted, or all weights and all other loss terms are 0."""
        skip = super().skip
        if self._needs_weights:
            skip = skip | (self.header.denominators.weights == 0)
        return skip

    def skips(self, mini_batch: int | None = None) -> bool:
        """Return ``skip`` of one mini-batch as a bool, from the host synchronisation that ``check()`` makes."""
        counts = self.on_host.denominators.counts
        index = index_of(mini_batch, len(counts))
        return counts[index][2] == 0 or self._is_weightless[index]

    @property
    def num_weightless(self) -> float:
        """Number of mini-batches that have accepted tokens, all of them with weight 0."""
        counts = self.on_host.denominators.counts
        rows = zip(counts, self._is_weightless, strict=True)
        return float(sum(1 for row, is_weightless in rows if row[2] > 0 and is_weightless))

    def metrics(self) -> dict[str, float]:
        """Return the correction's metrics; with the mode ``mask`` also the number of mini-batches without weights."""
        metrics = super().metrics()
        if self.config.may_weigh_nothing:
            metrics[f"{self.config.metric_prefix}rollout_is_weightless_mini_batches"] = self.num_weightless
        return metrics

    @property
    def _needs_weights(self) -> bool:
        """True if weights may be 0, and every term of the loss is multiplied by them."""
        return self.config.may_weigh_nothing and not (self.loss.entropy_coef or self.loss.kl_coef)

    @property
    def _is_weightless(self) -> list[bool]:
        """For each mini-batch, True if the loss needs weights, and those of all accepted tokens are 0."""
        return [self._needs_weights and weight == 0 for weight in self.on_host.denominators.weights]


def index_of(mini_batch: int | None, number: int) -> int:
    """Return the index of a mini-batch, 0 for None; ValueError if it is out of range, or None but there are several."""
    if mini_batch is None and number > 1:
        raise ValueError(f"the plan has {number} mini-batches: say which with mini_batch=")
    index = mini_batch or 0
    if not 0 <= index < number:
        raise ValueError(f"mini_batch={index} is not in [0, {number}) of the plan")
    return index


def _local_indices(layouts: Sequence[SequenceLayout], device: torch.device) -> list[Tensor]:
    """Number the sequences of all micro-batches of this rank from 0: the int64 numbers for each micro-batch."""
    sizes = [layout.num_sequences for layout in layouts]
    return list(torch.arange(sum(sizes), device=device).split(sizes))
