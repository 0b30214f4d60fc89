"""What a plan knows of a rollout batch before its optimizer steps, and the factors of each step that follow from it.

``docs/design.md`` begins with the words and symbols that are used here.
"""

from __future__ import annotations

import dataclasses
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rc.correction.inputs import AgreedCounts, PlanInputs, layouts_of
from megatron_rc.correction.micro_batch import MicroBatch
from megatron_rc.correction.result import CorrectionResult
from megatron_rc.loss.aggregation import denominator
from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.parallel.groups import ParallelGroups, group_size
from megatron_rc.parallel.layout import SequenceLayout
from megatron_rc.settings.config import RolloutCorrectionConfig

_MOST_TOKENS = 2**31  # Megatron counts them in int32


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """One optimizer step: a mini-batch of a plan, and what its loss is divided by.

    Attributes:
        plan: the plan that knows the mini-batch.
        mini_batch: its index there.
        denominator: 0-D float64, above 0: what the sum of the loss over the whole mini-batch is divided by. It is the
            denominator of the loss; where that is known only after the step, the one under the response mask. NaN on
            pipeline stages that cannot know it and compute no loss.
        num_microbatches: of this step, on each data-parallel rank; None where nobody said.
    """

    plan: Plan
    mini_batch: int
    denominator: Tensor
    num_microbatches: int | None = None


@dataclass(frozen=True, eq=False)
class LossScale:
    """The global factors of one optimizer step, from ``plan.loss_scale()``: equal on all ranks that share them.

    Attributes:
        denominator: 0-D, what the sum of the loss over the whole mini-batch is divided by; above 0.
        num_microbatches: of this step, on each data-parallel rank.
        dp_cp_size: number of ranks that hold different tokens.
        calculate_per_token_loss: Megatron's setting of that name.
        local_tokens: tokens of a micro-batch on this rank, padding included.
        total_tokens: their sum over all micro-batches and ranks of the step, below 2³¹.
        step: what these are the factors of: ``masked_loss`` counts for it, and the end of the step divides by what it
            holds.
    """

    denominator: Tensor
    num_microbatches: int
    dp_cp_size: int
    calculate_per_token_loss: bool
    local_tokens: int
    total_tokens: int
    step: PlannedStep | None = None


class Plan(ABC):
    """What is known of a rollout batch before the schedule, in both modes.

    Attributes:
        config: what is corrected.
        loss: the objective: its aggregation decides the denominators.
        agreed: the counts that all ranks agreed on.
        is_wrapped: says whether there is a ``wrap_finalize``, which ends the steps; None where they need no end.
        groups: of this rank.
    """

    config: RolloutCorrectionConfig
    loss: PolicyLossConfig
    agreed: AgreedCounts
    groups: ParallelGroups
    is_wrapped: Callable[[], bool] | None = None

    @property
    def num_mini_batches(self) -> int:
        """Optimizer steps that share the batch."""
        return self.agreed.num_mini_batches

    @property
    @abstractmethod
    def counted(self) -> Tensor:
        """[num_mini_batches, 2] float64: tokens and sequences that the loss is divided by; NaN where not known."""

    @abstractmethod
    def check(self) -> None:
        """Raise ValueError on every rank alike if what is known already cannot be right."""

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Metrics of what is known already, equal on every rank."""

    @abstractmethod
    def skips(self, mini_batch: int | None = None) -> bool:
        """Whether it is known already, on every rank, that the optimizer step must not be made.

        Raises:
            ValueError: a mini-batch that is not there, or none named where there are several.
        """

    def loss_scale(
        self,
        mini_batch: int | None = None,
        *,
        num_microbatches: int,
        calculate_per_token_loss: bool = False,
        local_tokens: int = 0,
        total_tokens: int = 0,
    ) -> LossScale:
        """The factors of one optimizer step, for the losses of all its micro-batches. Collectives: none.

        Args:
            mini_batch: which one; may be left out where there is one.
            num_microbatches: of this step, on each data-parallel rank.
            calculate_per_token_loss: Megatron's setting of that name, which needs the two others.
            local_tokens: tokens of a micro-batch on this rank, padding included, equal for all its micro-batches.
            total_tokens: tokens of all micro-batches of the step on all ranks with different tokens.

        Raises:
            ValueError: a mini-batch that is not there, or none named where there are several; counts that cannot be; in
                the loss, no ``wrap_finalize``: nothing would end the step and scale its gradients.
        """
        if self.is_wrapped is not None and not self.is_wrapped():
            raise ValueError(
                "no step will be ended, and its gradients not be scaled: before the schedule set "
                "finalize_model_grads_func=wrap_finalize(correction) in Megatron's config, on every pipeline stage"
            )
        if not isinstance(num_microbatches, numbers.Integral) or num_microbatches < 1:
            raise ValueError(f"num_microbatches={num_microbatches!r} must be at least 1, and an integer")
        if calculate_per_token_loss and not 0 < local_tokens <= total_tokens < _MOST_TOKENS:
            raise ValueError(
                f"local_tokens={local_tokens}, total_tokens={total_tokens}: calculate_per_token_loss needs the tokens "
                "of a micro-batch on this rank and of the whole step, padding included, below 2³¹"
            )
        step = dataclasses.replace(self.step(mini_batch), num_microbatches=num_microbatches)
        return LossScale(
            denominator=step.denominator,
            num_microbatches=num_microbatches,
            dp_cp_size=group_size(self.groups.dp_cp),
            calculate_per_token_loss=calculate_per_token_loss,
            local_tokens=local_tokens,
            total_tokens=total_tokens,
            step=step,
        )

    def micro_batches(self, inputs: PlanInputs) -> list[MicroBatch]:
        """What the loss of each micro-batch needs, of what the plan was given and of what it found; on the last stage.

        Args:
            inputs: those of the plan, in lists with one entry a micro-batch (or of a single one).

        Raises:
            ValueError: there are no advantages.
        """
        if inputs.advantages is None:
            raise ValueError("advantages are missing: the loss needs PlanInputs(advantages=...)")
        masks = _one_each(inputs.response_mask, 1)
        is_list, number = not isinstance(inputs.response_mask, Tensor), len(masks)
        layouts = layouts_of(inputs.layout, masks, is_list, self.groups)
        names = ("rollout_log_probs", "advantages", "sequence_ids", "policy_versions")
        columns = {name: _one_each(getattr(inputs, name), number) for name in names}
        columns |= {"layout": layouts, "response_mask": masks} | self._found(inputs, layouts)
        return [MicroBatch(**{name: column[index] for name, column in columns.items()}) for index in range(number)]

    def _found(self, inputs: PlanInputs, layouts: Sequence[SequenceLayout]) -> dict[str, list[Any]]:
        """What the plan has found of each micro-batch, by the names of MicroBatch's fields."""
        return {}

    def step(self, mini_batch: int | None = None) -> PlannedStep:
        """The optimizer step of a mini-batch, which may be left out where there is one.

        Raises:
            ValueError: as :meth:`loss_scale`.
        """
        index = _index(mini_batch, self.num_mini_batches)
        return PlannedStep(self, index, self._denominator(index))

    def _denominator(self, mini_batch: int) -> Tensor:
        # A mini-batch without tokens has a loss of 0, whatever it is divided by.
        tokens, sequences = self.counted[mini_batch].clamp(min=1)
        return denominator(self.loss.aggregation, self.loss.loss_scale_factor, tokens, sequences)


class TrainingResult(CorrectionResult):
    """A result of which the objective is known, and so which optimizer steps would move the weights by momentum alone.

    Attributes:
        loss: the objective.
    """

    loss: PolicyLossConfig

    @property
    def skip(self) -> Tensor:
        """[num_mini_batches] bool: no token is accepted, or none has a weight and the objective has no other term."""
        skip = super().skip
        return skip | (self.fields.column(self.header, "weighed") == 0) if self._needs_weights else skip

    def skips(self, mini_batch: int | None = None) -> bool:
        """``skip`` of one mini-batch on the host, from the synchronisation that ``check()`` makes."""
        counts = self.denominators_on_host()
        index = _index(mini_batch, len(counts))
        return counts[index][2] == 0 or self._is_weightless[index]

    @property
    def num_weightless(self) -> float:
        """Mini-batches with accepted tokens of which none has a weight."""
        accepted = [counts[2] > 0 for counts in self.denominators_on_host()]
        return float(sum(one and other for one, other in zip(accepted, self._is_weightless, strict=True)))

    def metrics(self) -> dict[str, float]:
        """Metrics of the correction; with the mode ``mask`` also how many mini-batches have no weight left."""
        metrics = super().metrics()
        if self.config.may_weigh_nothing:
            metrics[f"{self.config.metric_prefix}rollout_is_weightless_mini_batches"] = self.num_weightless
        return metrics

    @property
    def _needs_weights(self) -> bool:
        """Whether without weights nothing is left of the loss."""
        return self.config.may_weigh_nothing and not (self.loss.entropy_coef or self.loss.kl_coef)

    @property
    def _is_weightless(self) -> list[bool]:
        if not self._needs_weights:
            return [False] * len(self.denominators_on_host())
        return [weighed == 0 for weighed in self.fields.table(self.values, "weighed")]


class DecoupledPlan(TrainingResult, Plan):
    """Decoupled mode decides everything before the schedule: the plan is the result.

    On pipeline stages without log-probs weights, mask and lengths are None; everything else is known there too.
    """

    def __init__(
        self, result: CorrectionResult, loss: PolicyLossConfig, groups: ParallelGroups, agreed: AgreedCounts
    ) -> None:
        super().__init__(
            result.config,
            result.fields,
            result.header,
            weights=result.weights,
            mask=result.mask,
            sequence_lengths=result.sequence_lengths,
            allow_zero_log_probs=result.allow_zero_log_probs,
        )
        self.loss, self.groups, self.agreed = loss, groups, agreed

    def _found(self, inputs: PlanInputs, layouts: Sequence[SequenceLayout]) -> dict[str, list[Any]]:
        number = len(layouts)
        if self.sequence_lengths is None:
            raise ValueError("micro_batches() on a pipeline stage without log-probs: the loss is on the last one")
        return {
            "old_log_probs": _one_each(inputs.train_log_probs, number),
            "weights": _one_each(self.weights, number),
            "mask": _one_each(self.mask, number),
            "lengths": list(self.sequence_lengths.split([layout.num_sequences for layout in layouts])),
        }

    @property
    def counted(self) -> Tensor:
        """See :class:`Plan`."""
        accepted = self.config.rejection_denominator == "accepted"
        return self.denominators[:, 2:] if accepted else self.denominators[:, :2]


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
        _index(mini_batch, self.num_mini_batches)
        return False

    @property
    def bad_ids(self) -> Tensor:
        """0-D float64: mini-batch ids that were out of range."""
        return torch.zeros(()) if self.counts is None else self.counts[0, 3]


def _index(mini_batch: int | None, number: int) -> int:
    """The mini-batch that is meant, of so many."""
    if mini_batch is None and number > 1:
        raise ValueError(f"the plan has {number} mini-batches: say which with mini_batch=")
    index = mini_batch or 0
    if not 0 <= index < number:
        raise ValueError(f"mini_batch={index} is not in [0, {number}) of the plan")
    return index


def _one_each(value: Any, number: int) -> list[Any]:
    """The entries of a list; else the value for each."""
    return list(value) if isinstance(value, (list, tuple)) else [value] * number
