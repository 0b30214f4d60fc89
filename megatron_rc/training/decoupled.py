"""Decoupled mode: everything is decided before the schedule, from log-probs of a forward-only pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_rc.batch.chain import empty_header, finish, local_batch, reduce_batch
from megatron_rc.batch.result import CorrectionResult
from megatron_rc.correction.inputs import AgreedCounts, AnyInputs
from megatron_rc.correction.weights import normalization
from megatron_rc.measures.header import BatchHeader
from megatron_rc.numerics import check_mask
from megatron_rc.parallel.collectives import broadcast_record, first_text, map_record
from megatron_rc.parallel.groups import ParallelGroups, group_size
from megatron_rc.parallel.layout import SequenceLayout
from megatron_rc.training.micro_batch import CorrectedMicroBatch, Counted, MicroBatch
from megatron_rc.training.plan import Plan, Progress, Setup, StepOwner, TrainingResult

_TOLERANCE = 1e-5  # relative, of sums of float32 weights in another order
_LEAST_WEIGHT = torch.finfo(torch.float32).tiny  # the loss's float32 weights lose digits below, and may be 0


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

    def ended(
        self, batch: BatchHeader[Tensor] | None, counted: Counted[Tensor], mini_batch: int
    ) -> tuple[BatchHeader[Tensor] | None, Tensor, Tensor]:
        """Compare the accepted tokens, and the sum of their weights as they are applied; the factor is 1."""
        found = self.header.denominators
        accepted, weight = found.counts[mini_batch, 2], found.weights[mini_batch]
        if self.config.rollout_is_batch_normalize:
            weight = weight * normalization(found.total_weight, found.weight_count)
        if not self.config.applies_weights:
            weight = torch.zeros_like(weight)
        # False for NaN.
        is_equal = (counted.weights - weight).abs() <= _TOLERANCE * weight + _LEAST_WEIGHT * accepted
        return batch, (counted.tokens != accepted) | ~is_equal, torch.ones_like(weight)

    def corrected(self, micro_batch: MicroBatch, log_probs: Tensor) -> CorrectedMicroBatch:
        """The results of the plan, if they are all there."""
        old, mask, lengths = micro_batch.train_log_probs, micro_batch.mask, micro_batch.sequence_lengths
        if old is None or mask is None or lengths is None:
            raise ValueError(
                "decoupled mode needs train_log_probs (log π_old), and mask and sequence_lengths of the plan, in every "
                "micro-batch"
            )
        if micro_batch.weights is None and self.config.applies_weights:
            raise ValueError(
                f"rollout_is={self.config.rollout_is!r} applies weights, and the micro-batch has none: pass the "
                "plan's, MicroBatch(weights=...)"
            )
        if micro_batch.weights is not None and not self.config.applies_weights:
            raise ValueError(
                f"rollout_is={self.config.rollout_is!r}, rollout_is_apply={self.config.rollout_is_apply}: no weights "
                "are applied, and the micro-batch has some: leave MicroBatch(weights=...) out"
            )
        layout = micro_batch.layout
        shapes = ("mask", mask, layout.shape), ("sequence_lengths", lengths, (layout.num_sequences,))
        for name, value, shape in shapes:
            if tuple(value.shape) != shape:
                raise ValueError(
                    f"MicroBatch({name}=...) has shape {tuple(value.shape)}: expected {shape}, the part of the plan's "
                    "that belongs to this micro-batch"
                )
        check_mask("MicroBatch(mask=...)", mask)
        return CorrectedMicroBatch(micro_batch.weights, mask, lengths, old)

    def _found(self, layouts: Sequence[SequenceLayout]) -> dict[str, list[Any]]:
        if self.sequence_lengths is None:
            raise ValueError("micro_batches() on a pipeline stage without log-probs: the loss is on the last one")
        weights, mask = (
            found if isinstance(found, list) else [found] * len(layouts) for found in (self.weights, self.mask)
        )
        lengths = list(self.sequence_lengths.split([layout.num_sequences for layout in layouts]))
        return {"weights": weights, "mask": mask, "sequence_lengths": lengths}


def plan_decoupled(
    inputs: AnyInputs | None, counts: AgreedCounts, setup: Setup, steps: StepOwner, device: torch.device
) -> DecoupledPlan:
    """The whole correction on the last pipeline stage, and its header on every stage.

    The stages before the last wait for that header. So it is NaN if the inputs are refused, and all raise alike.
    """
    config, groups, result, refused = setup.config, setup.groups, None, None
    if inputs is not None:
        try:
            batch = local_batch(inputs, config, counts, groups, compile=setup.compile)
            result = finish(batch, reduce_batch(batch.pair, groups))
        except ValueError as error:
            if group_size(groups.pp) == 1:
                raise
            refused = str(error)
    result = result or CorrectionResult(config, empty_header(config, counts, device))
    header = result.header
    if refused is not None:
        header = map_record(header, lambda value: torch.full_like(value, torch.nan, dtype=torch.float64))
    known = {"header": broadcast_record(header, groups.pp), "allow_zero_log_probs": setup.allow_zero_log_probs}
    plan = DecoupledPlan(**vars(result) | known, loss=setup.loss, groups=groups, agreed=counts, steps=steps)
    if refused is not None or (inputs is None and math.isnan(plan.on_host.denominators.counts[0][0])):
        raise ValueError(first_text(refused, groups.pp))
    return plan
