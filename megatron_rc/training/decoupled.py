"""The plan of decoupled mode: the whole correction, before the schedule, from log π_old of a forward-only pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_rc.batch.chain import CorrectionResult, correct_rollouts, empty_header
from megatron_rc.correction.inputs import AgreedCounts, AnyInputs, CorrectionInputs
from megatron_rc.correction.weights import normalization
from megatron_rc.measures.header import BatchHeader
from megatron_rc.numerics import check_mask
from megatron_rc.parallel.arguments import check_alike
from megatron_rc.parallel.collectives import broadcast_record
from megatron_rc.parallel.groups import ParallelGroups
from megatron_rc.parallel.layout import SequenceLayout
from megatron_rc.training.micro_batch import CorrectedMicroBatch, MicroBatch
from megatron_rc.training.plan import OpenCounts, Plan, Progress, Setup, TrainingResult
from megatron_rc.training.step_sums import StepSums, micro_batch_sums


@dataclass(frozen=True, eq=False, kw_only=True)
class DecoupledPlan(TrainingResult, Plan):
    """The plan of decoupled mode, which is also the result of the correction.

    On pipeline stages without log-probs ``weights``, ``mask`` and ``sequence_lengths`` are None; these stages know
    everything else.
    """

    groups: ParallelGroups
    agreed: AgreedCounts
    open_step: OpenCounts
    has_sequence_ids: bool
    progress: Progress = field(default_factory=Progress)

    @property
    def counted(self) -> Tensor:
        """[num_mini_batches, 2] float64: numbers of tokens and of sequences, from which denominators are computed."""
        if self.config.rejection_denominator == "accepted":
            return self.denominators[:, 2:]
        return self.denominators[:, :2]

    def check(self) -> None:
        """Raise the same error on every rank if any rank has data that cannot be right."""
        super().check()
        self.progress.is_checked = True

    def step_sums(self, mini_batch: int) -> StepSums[Tensor]:
        """Return the sums over the accepted tokens of a mini-batch; ``weights`` is 0 if the loss applies none."""
        denominators = self.header.denominators
        weights = denominators.weights[mini_batch]
        if not self.config.applies_weights:
            weights = torch.zeros_like(weights)
        elif self.config.rollout_is_batch_normalize:
            weights = weights * normalization(denominators.total_weight, denominators.weight_count)
        return StepSums(
            tokens=denominators.counts[mini_batch, 2],
            ids=denominators.id_sums[mini_batch],
            weights=weights,
        )

    def gradient_factor(
        self, header: BatchHeader[Tensor] | None, mini_batch: int
    ) -> tuple[BatchHeader[Tensor] | None, Tensor]:
        """Return (``header``, 1): the losses were divided by the final denominator; ``header`` is always None."""
        return header, self.denominators.new_ones(())

    def corrected(self, micro_batch: MicroBatch, log_probs: Tensor) -> CorrectedMicroBatch:
        """Return the plan's results, which are fields of the micro-batch; ValueError if one is missing or unused."""
        old_log_probs = micro_batch.train_log_probs
        mask = micro_batch.mask
        lengths = micro_batch.sequence_lengths
        if old_log_probs is None or mask is None or lengths is None:
            raise ValueError(
                "decoupled mode needs train_log_probs (log π_old), and mask and sequence_lengths of the plan, in every "
                "micro-batch"
            )
        self._check_weights(micro_batch.weights)
        check_mask("response_mask", micro_batch.response_mask)
        check_mask("mask", mask)
        check_alike("response_mask", micro_batch.response_mask, mask=mask, weights=micro_batch.weights)
        if len(lengths) != micro_batch.layout.num_sequences:
            raise ValueError(
                f"sequence_lengths has {len(lengths)} values: expected one for each of "
                f"{micro_batch.layout.num_sequences} sequences, the part of the plan's that belongs to this micro-batch"
            )

        # If the mask is the plan's, all accepted tokens are in the response mask. If it is that of other tokens, some
        # may not be: they are not counted, so that the counts differ from the plan's, and finish_step raises.
        counted = mask & micro_batch.response_mask
        ids = self.ids_of_step(micro_batch.sequence_ids, micro_batch.plan_ids)
        return CorrectedMicroBatch(
            weights=micro_batch.weights,
            mask=mask,
            sequence_lengths=lengths,
            old_log_probs=old_log_probs,
            sums=micro_batch_sums(counted, micro_batch.layout, ids, micro_batch.weights),
        )

    def _check_weights(self, weights: Tensor | None) -> None:
        """Raise ValueError if a micro-batch has no weights but the config applies some, or has some but it does not."""
        if weights is None and self.config.applies_weights:
            raise ValueError(
                f"rollout_is={self.config.rollout_is!r} applies weights, and the micro-batch has none: pass the "
                "plan's, MicroBatch(weights=...)"
            )
        if weights is not None and not self.config.applies_weights:
            raise ValueError(
                f"rollout_is={self.config.rollout_is!r}, rollout_is_apply={self.config.rollout_is_apply}: no weights "
                "are applied, and the micro-batch has some: leave MicroBatch(weights=...) out"
            )

    def _results(self, layouts: Sequence[SequenceLayout]) -> dict[str, list[Any]]:
        if self.sequence_lengths is None:
            raise ValueError("micro_batches() on a pipeline stage without log-probs: the loss is on the last one")
        sizes = [layout.num_sequences for layout in layouts]
        return {
            "weights": self.weights if isinstance(self.weights, list) else [self.weights] * len(layouts),
            "mask": self.mask if isinstance(self.mask, list) else [self.mask] * len(layouts),
            "sequence_lengths": list(self.sequence_lengths.split(sizes)),
        }


def plan_decoupled(
    inputs: AnyInputs | None, counts: AgreedCounts, setup: Setup, open_step: OpenCounts, device: torch.device
) -> DecoupledPlan:
    """Make the plan of decoupled mode: correct on the last pipeline stage, and broadcast the header to every stage.

    Args:
        inputs: this rank's part of the rollout batch; None on the stages before the last.
        counts: the counts that all ranks agreed on.
        setup: the arguments of the correction.
        open_step: the open optimizer step of the RolloutCorrection.
        device: for the header on the stages before the last.

    Collectives: those of :func:`correct_rollouts` on the last stage, then one broadcast over ``pp``.

    Raises:
        ValueError: on the last stage, inputs that do not fit together; the other stages wait in the broadcast until
            torchrun ends them.
    """
    config = setup.config
    groups = setup.groups
    if inputs is None:
        result = CorrectionResult(config, empty_header(config, counts, device))
    else:
        arguments = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(CorrectionInputs)}
        result = correct_rollouts(**arguments, **vars(counts), config=config, groups=groups, compile=setup.compile)
    return DecoupledPlan(
        config=config,
        header=broadcast_record(result.header, groups.pp),
        weights=result.weights,
        measured_weights=result.measured_weights,
        mask=result.mask,
        sequence_lengths=result.sequence_lengths,
        allow_zero_log_probs=setup.allow_zero_log_probs,
        loss=setup.loss,
        groups=groups,
        agreed=counts,
        open_step=open_step,
        has_sequence_ids=inputs is not None and inputs.sequence_ids is not None,
    )
