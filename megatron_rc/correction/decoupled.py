"""Decoupled mode: everything is decided before the schedule, from log-probs of a forward-only pass."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rc.correction.header import header_fields
from megatron_rc.correction.inputs import AgreedCounts, PlanInputs
from megatron_rc.correction.micro_batch import CorrectedMicroBatch, MicroBatch
from megatron_rc.correction.plans import DecoupledPlan, PlannedStep
from megatron_rc.correction.result import CorrectionResult
from megatron_rc.correction.rollout_correction import RolloutCorrection
from megatron_rc.correction.stages import corrected_batch


class DecoupledCorrection(RolloutCorrection, corrects_in_loss=False):
    """See :class:`RolloutCorrection`."""

    def _plan(self, inputs: PlanInputs | None, counts: AgreedCounts, device: torch.device | None) -> DecoupledPlan:
        if inputs is None:
            fields = header_fields(self.config, counts)
            result = CorrectionResult(self.config, fields, torch.zeros(len(fields), dtype=torch.float64, device=device))
        else:
            result = corrected_batch(inputs, self.config, counts, self.groups, compile=self.compile)
        result.allow_zero_log_probs = self.allow_zero_log_probs
        result.header = self._broadcast(result.header)
        return DecoupledPlan(result, self.loss, self.groups, counts)

    def _corrected(self, micro_batch: MicroBatch, log_probs: Tensor, step: PlannedStep) -> CorrectedMicroBatch:
        old, mask, lengths = micro_batch.old_log_probs, micro_batch.mask, micro_batch.lengths
        if old is None or mask is None or lengths is None:
            raise ValueError(
                "decoupled mode needs old_log_probs, and mask and lengths of the plan, in every micro-batch"
            )
        if micro_batch.weights is None and self.config.applies_weights:
            raise ValueError(
                f"rollout_is={self.config.rollout_is!r} applies weights, and the micro-batch has none: pass "
                "the plan's, MicroBatch(weights=...)"
            )
        return CorrectedMicroBatch(micro_batch.weights, mask, lengths, old)
