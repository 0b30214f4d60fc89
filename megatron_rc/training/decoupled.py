"""Decoupled mode: everything is decided before the schedule, from log-probs of a forward-only pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_rc.batch.result import CorrectionResult
from megatron_rc.batch.sums import correct_batch, empty_header
from megatron_rc.correction.inputs import AgreedCounts, AnyInputs
from megatron_rc.correction.weights import normalization
from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.parallel.collectives import broadcast, first_text, pack, unpack
from megatron_rc.parallel.groups import ParallelGroups, group_size
from megatron_rc.parallel.layout import SequenceLayout
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.training.micro_batch import CorrectedMicroBatch, MicroBatch
from megatron_rc.training.plan import Plan, PlannedStep, Progress, StepOwner, one_each
from megatron_rc.training.result import TrainingResult


@dataclass(frozen=True, eq=False, kw_only=True)
class DecoupledPlan(TrainingResult, Plan):
    """Decoupled mode decides everything before the schedule: the plan is the result.

    On pipeline stages without log-probs weights, mask and lengths are None; everything else is known there too.
    """

    groups: ParallelGroups
    agreed: AgreedCounts
    steps: StepOwner
    progress: Progress = field(default_factory=Progress)

    @property
    def counted(self) -> Tensor:
        """[num_mini_batches, 2] float64: tokens and sequences that the loss is divided by."""
        accepted = self.config.rejection_denominator == "accepted"
        return self.denominators[:, 2:] if accepted else self.denominators[:, :2]

    def check(self) -> None:
        """Raise the same error on every rank if any rank held data that cannot be right."""
        super().check()
        self.progress.is_checked = True

    def accepted(self, mini_batch: int) -> tuple[Tensor, Tensor]:
        """0-D float64 each: the accepted tokens of a mini-batch, and the sum of their weights as they are applied."""
        found = self.header.denominators
        weight: Tensor = found.weights[mini_batch]
        if self.config.rollout_is_batch_normalize:
            weight = weight * normalization(found.total_weight, found.weight_count)
        return found.counts[mini_batch, 2], weight if self.config.applies_weights else torch.zeros_like(weight)

    def corrected(self, micro_batch: MicroBatch, log_probs: Tensor, step: PlannedStep) -> CorrectedMicroBatch:
        """The results of the plan, if they are all there."""
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

    def _found(self, layouts: Sequence[SequenceLayout]) -> dict[str, list[Any]]:
        number = len(layouts)
        if self.sequence_lengths is None:
            raise ValueError("micro_batches() on a pipeline stage without log-probs: the loss is on the last one")
        return {
            "weights": one_each(self.weights, number),
            "mask": one_each(self.mask, number),
            "sequence_lengths": list(self.sequence_lengths.split([layout.num_sequences for layout in layouts])),
        }


def plan_decoupled(
    inputs: AnyInputs | None,
    config: RolloutCorrectionConfig,
    counts: AgreedCounts,
    groups: ParallelGroups,
    *,
    loss: PolicyLossConfig,
    steps: StepOwner,
    device: torch.device,
    compile: bool,
    allow_zero_log_probs: bool,
) -> DecoupledPlan:
    """The whole correction on the last pipeline stage, and its header on every stage.

    The stages before the last wait for that header. So it is NaN if the inputs are refused, and all raise alike.
    """
    result, refused = None, None
    if inputs is not None:
        try:
            result = correct_batch(inputs, config, counts, groups, compile=compile)
        except ValueError as error:
            if group_size(groups.pp) == 1:
                raise
            refused = str(error)
    result = result or CorrectionResult(config, empty_header(config, counts, device))
    sums, maxima = pack(result.header)
    numbers = torch.cat([sums, maxima])
    numbers = numbers if refused is None else torch.full_like(numbers, torch.nan)
    numbers = broadcast(numbers, group_size(groups.pp) - 1, groups.pp)
    plan = DecoupledPlan(
        config=config,
        header=unpack(result.header, (numbers[: len(sums)], numbers[len(sums) :])),
        weights=result.weights,
        measured_weights=result.measured_weights,
        mask=result.mask,
        sequence_lengths=result.sequence_lengths,
        allow_zero_log_probs=allow_zero_log_probs,
        loss=loss,
        groups=groups,
        agreed=counts,
        steps=steps,
    )
    if refused is not None or (inputs is None and math.isnan(plan.on_host.denominators.counts[0][0])):
        raise ValueError(first_text(refused, groups.pp))
    return plan
