"""What the two modes of the correction differ in, as :class:`RolloutCorrection` asks for it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megatron_rc.correction.header import HeaderFields
from megatron_rc.correction.inputs import AgreedCounts, AnyInputs, OneMicroBatch
from megatron_rc.correction.micro_batch import CorrectedMicroBatch, MicroBatch
from megatron_rc.correction.plans import Plan, PlannedStep
from megatron_rc.correction.step import StepResult, StepSums


class Mode(Protocol):
    """Where the correction is made: before the schedule, or in the loss.

    Attributes:
        needs_steps: weights, rejection and gradients are known to be right only when a step has ended.
    """

    needs_steps: bool

    def plan(self, inputs: AnyInputs | None, counts: AgreedCounts, device: torch.device) -> Plan:
        """Prepare a rollout batch, on every stage."""

    def newest_step(self, mini_batch: int | None) -> PlannedStep:
        """A step of the newest plan, for a correction from π_θ."""

    def from_theta(self, inputs: OneMicroBatch, step: PlannedStep) -> CorrectedMicroBatch:
        """Correct one micro-batch from π_θ, which stands in the place of π_train."""

    def corrected(self, micro_batch: MicroBatch, log_probs: Tensor, step: PlannedStep) -> CorrectedMicroBatch:
        """What the loss of a micro-batch is made from: of the plan, or what is found from π_θ."""

    def step_fields(self) -> HeaderFields | None:
        """What a step reduces besides what the losses measured; alike on all stages."""

    def factor(self, ended: StepSums, result: StepResult) -> Tensor:
        """0-D: what the gradients of a step that was just reduced are to be multiplied by; on the last stage."""

    def note_end(self, ended: StepSums, result: StepResult) -> None:
        """Take note of a step that has ended."""

    def metrics(self) -> dict[str, float]:
        """Of all steps since the newest plan."""
