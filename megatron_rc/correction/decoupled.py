"""Decoupled mode: everything is decided before the schedule, from log-probs of a forward-only pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rc.correction.header import HeaderFields
from megatron_rc.correction.header_fields import header_fields
from megatron_rc.correction.inputs import AgreedCounts, AnyInputs, OneMicroBatch
from megatron_rc.correction.micro_batch import CorrectedMicroBatch, MicroBatch
from megatron_rc.correction.misuse import StepError
from megatron_rc.correction.plans import Plan, PlannedStep, one_each
from megatron_rc.correction.result import CorrectionResult
from megatron_rc.correction.stages import corrected_batch
from megatron_rc.correction.step import StepResult, StepSums
from megatron_rc.correction.training_result import TrainingResult
from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.parallel.collectives import broadcast, first_text
from megatron_rc.parallel.groups import ParallelGroups, group_size
from megatron_rc.parallel.layout import SequenceLayout
from megatron_rc.settings.config import RolloutCorrectionConfig


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

    def _found(self, layouts: Sequence[SequenceLayout]) -> dict[str, list[Any]]:
        number = len(layouts)
        if self.sequence_lengths is None:
            raise ValueError("micro_batches() on a pipeline stage without log-probs: the loss is on the last one")
        return {
            "weights": one_each(self.weights, number),
            "mask": one_each(self.mask, number),
            "sequence_lengths": list(self.sequence_lengths.split([layout.num_sequences for layout in layouts])),
        }

    @property
    def counted(self) -> Tensor:
        """See :class:`Plan`."""
        accepted = self.config.rejection_denominator == "accepted"
        return self.denominators[:, 2:] if accepted else self.denominators[:, :2]


class Decoupled:
    """See :class:`Mode`. A step reduces what its losses measured, and nothing else."""

    needs_steps = False

    def __init__(
        self, config: RolloutCorrectionConfig, loss: PolicyLossConfig, groups: ParallelGroups, *, compile: bool
    ) -> None:
        self.config, self.loss, self.groups, self.compile = config, loss, groups, compile

    def plan(self, inputs: AnyInputs | None, counts: AgreedCounts, device: torch.device) -> DecoupledPlan:
        """The whole correction, and its header on every stage.

        The stages before the last wait for that header. So where the inputs are refused it is NaN, and all raise alike.
        """
        fields, refused = header_fields(self.config, counts), None
        result = CorrectionResult(self.config, fields, torch.zeros(len(fields), dtype=torch.float64, device=device))
        if inputs is not None:
            try:
                result = corrected_batch(inputs, self.config, counts, self.groups, compile=self.compile)
            except ValueError as error:
                if group_size(self.groups.pp) == 1:
                    raise
                refused, result.header = str(error), torch.full_like(result.header, torch.nan)
        result.header = broadcast(result.header, group_size(self.groups.pp) - 1, self.groups.pp)
        plan = DecoupledPlan(result, self.loss, self.groups, counts)
        if refused is not None or (inputs is None and math.isnan(plan.values[0])):
            raise ValueError(first_text(refused, self.groups.pp))
        return plan

    def newest_step(self, mini_batch: int | None) -> PlannedStep:
        """There is none: nothing is corrected from π_θ."""
        raise StepError("in_loss belongs to bypass_mode and proximal_interpolation, not to decoupled mode")

    def from_theta(self, inputs: OneMicroBatch, step: PlannedStep) -> CorrectedMicroBatch:
        """Likewise."""
        raise StepError("in_loss belongs to bypass_mode and proximal_interpolation, not to decoupled mode")

    def corrected(self, micro_batch: MicroBatch, log_probs: Tensor, step: PlannedStep) -> CorrectedMicroBatch:
        """What the plan gave, if it is all there."""
        old, mask, lengths = micro_batch.train_log_probs, micro_batch.mask, micro_batch.sequence_lengths
        if old is None or mask is None or lengths is None:
            raise ValueError(
                "decoupled mode needs train_log_probs (log π_old), and mask and sequence_lengths of the plan, in every "
                "micro-batch"
            )
        if micro_batch.weights is None and self.config.applies_weights:
            raise ValueError(
                f"rollout_is={self.config.rollout_is!r} applies weights, and the micro-batch has none: pass "
                "the plan's, MicroBatch(weights=...)"
            )
        if micro_batch.weights is not None and not self.config.applies_weights:
            raise ValueError(
                f"rollout_is={self.config.rollout_is!r}, rollout_is_apply={self.config.rollout_is_apply}: no weights "
                "are applied, and the micro-batch has some: leave MicroBatch(weights=...) out"
            )
        layout = micro_batch.layout
        for name, value, shape in (
            ("mask", mask, layout.shape),
            ("sequence_lengths", lengths, (layout.num_sequences,)),
        ):
            if tuple(value.shape) != shape:
                raise ValueError(
                    f"MicroBatch({name}=...) has shape {tuple(value.shape)}: expected {shape}, the part of the plan's "
                    "that belongs to this micro-batch"
                )
        if mask.dtype != torch.bool:
            raise ValueError(f"MicroBatch(mask=...) is {mask.dtype}: expected bool, as the plan has it")
        return CorrectedMicroBatch(micro_batch.weights, mask, lengths, old)

    def step_fields(self) -> HeaderFields | None:
        """None: the plan has reduced it all."""
        return None

    def factor(self, ended: StepSums, result: StepResult) -> Tensor:
        """1: the loss's denominator was known."""
        return result.header.new_ones(())

    def note_end(self, ended: StepSums, result: StepResult) -> None:
        """Nothing to note."""

    def metrics(self) -> dict[str, float]:
        """None: those of the plan are of the whole batch."""
        return {}
