"""The correction inside the loss, from π_θ: bypass mode, one pass, and interpolation of the proximal policy."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.batch.chain import BatchSums, batch_sums, reduce_sequences, sequence_sums
from megatron_rc.correction.denominators import Denominators
from megatron_rc.correction.inputs import (
    PER_SEQUENCE,
    AgreedCounts,
    AnyInputs,
    OneMicroBatch,
    Shards,
    collect_shards,
)
from megatron_rc.correction.weights import normalization
from megatron_rc.loss.aggregation import denominator
from megatron_rc.loss.proximal import interpolate
from megatron_rc.measures.header import BatchHeader
from megatron_rc.parallel.collectives import all_reduce_sum
from megatron_rc.parallel.groups import ParallelGroups
from megatron_rc.parallel.softmax import arithmetic
from megatron_rc.settings.objective import ONE_STEP, check_left_out
from megatron_rc.training.micro_batch import CorrectedMicroBatch, MicroBatch
from megatron_rc.training.plan import OpenCounts, Plan, Progress, Setup, StepError, TrainingResult, index_of
from megatron_rc.training.step_sums import StepSums, micro_batch_sums

# The loss multiplies by weights before their mean w̄ is known, and its gradients are float32: if w̄ is smaller than this,
# they have few digits left, and are not divided by it.
LEAST_MEAN_IN_LOSS = 1e-25


@dataclass(frozen=True)
class MaskCounts:
    """Counts under the response masks of a rollout batch, over all ranks; float64."""

    counted: Tensor  # [num_mini_batches, 2] tokens, and sequences with such a token
    id_sums: Tensor  # [num_mini_batches] Σ over tokens of (sequence id + 1)
    bad_ids: Tensor  # 0-D, sequences among them whose mini-batch id is out of range; another mini-batch counts them


def count_masks(inputs: AnyInputs, counts: AgreedCounts, groups: ParallelGroups) -> MaskCounts:
    """Count the response masks of a rollout batch, checked as by :func:`collect_shards`.

    Collectives: one SUM of [n] over each CP group, one SUM of [3 num_mini_batches + 1] over ``dp_cp``.
    """
    # π_θ is not known yet, and only the masks are counted.
    shards = collect_shards(dataclasses.replace(inputs, train_log_probs=inputs.rollout_log_probs), counts, groups)
    layouts = [part.layout for part in shards.parts]
    local_tokens = torch.cat([part.layout.sum_sequences(part.mask) for part in shards.parts])
    no_maxima = local_tokens[:0]
    tokens, _ = reduce_sequences((local_tokens, no_maxima), groups, layouts)

    # Each sequence counts on the first rank of its CP group, since all ranks of the group know it whole.
    columns = torch.stack([tokens, tokens > 0, tokens * (shards.sequence_ids + 1)], dim=1)
    columns = torch.where(shards.counts_here.unsqueeze(1), columns, 0)
    local_sums = columns.new_zeros(counts.num_mini_batches, 3).index_add_(0, shards.mini_batch_ids, columns)
    is_out_of_range = shards.is_out_of_range("mini_batch_ids")
    local_bad_ids = (is_out_of_range & (columns[:, 1] > 0)).sum(dtype=torch.float64)

    total = all_reduce_sum(torch.cat([local_sums.flatten(), local_bad_ids.view(1)]), groups.dp_cp)
    sums = total[:-1].view(-1, 3)
    return MaskCounts(counted=sums[:, :2], id_sums=sums[:, 2], bad_ids=total[-1])


class InLossPlan(Plan):
    """The plan of a correction that is made in the loss: the facts that are known before π_θ is.

    Attributes:
        counts: counts under the response masks; None on pipeline stages without log-probs.
    """

    def __init__(
        self,
        setup: Setup,
        agreed: AgreedCounts,
        open_step: OpenCounts,
        counts: MaskCounts | None,
        has_sequence_ids: bool,
    ) -> None:
        self.setup = setup
        self.config = setup.config
        self.loss = setup.loss
        self.groups = setup.groups
        self.agreed = agreed
        self.open_step = open_step
        self.counts = counts
        self.has_sequence_ids = has_sequence_ids
        # Nothing is known to be wrong before π_θ is: the ``check()`` of each step's result raises.
        self.progress = Progress(is_checked=True)

    @property
    def counted(self) -> Tensor:
        """[num_mini_batches, 2] float64: tokens and sequences under the response mask; NaN on other stages."""
        if self.counts is None:
            return torch.full((self.num_mini_batches, 2), torch.nan, dtype=torch.float64)
        return self.counts.counted

    @property
    def skip(self) -> Tensor | None:
        """[num_mini_batches] bool: no token to train on; None without log-probs."""
        return None if self.counts is None else self.counts.counted[:, 0] == 0

    def check(self) -> None:
        """Raise nothing: the ``check()`` of each step's result raises, on every stage."""

    def metrics(self) -> dict[str, float]:
        """No metrics yet: a step has metrics after ``finish_step``."""
        return {}

    def skips(self, mini_batch: int | None = None) -> bool:
        """False: it is not known on every rank before the step, whose result says so."""
        index_of(mini_batch, self.num_mini_batches)
        return False

    @torch.no_grad()
    def corrected(self, micro_batch: MicroBatch, log_probs: Tensor) -> CorrectedMicroBatch:
        """The correction that is found from log π_θ."""
        check_left_out(self.config, self.setup.one_pass, micro_batch, "weights", "mask", "sequence_lengths")
        ids = self.ids_of_step(micro_batch.sequence_ids, micro_batch.plan_ids)
        return self.from_theta(dataclasses.replace(micro_batch, train_log_probs=log_probs), ids)

    def from_theta(self, inputs: OneMicroBatch, ids: Tensor | None) -> CorrectedMicroBatch:
        """Correct one micro-batch whose ``train_log_probs`` are log π_θ.

        Args:
            inputs: with ``proximal_interpolation`` log π_old is interpolated from them; else it is log π_rollout in
                bypass mode, and log π_θ with ``one_pass``.
            ids: [n] int64, by which the end of the step recognises the sequences; None: it does not.

        Collectives: those over ``cp`` of :func:`correct_rollouts`.

        Raises:
            ValueError: tensors that do not fit together.
            StepError: with ``one_pass``, the step of the plan has ended.
        """
        theta = inputs.train_log_probs
        if theta is None or not isinstance(inputs.rollout_log_probs, Tensor):
            raise ValueError("the loss takes one micro-batch, not a list of them")
        one_pass = self.setup.one_pass
        if one_pass and self.progress.steps_ended:
            raise StepError(f"the step of this plan has ended: {ONE_STEP}")

        # A model may have narrow log-probs; differences of them are taken in float32.
        used = self._used_inputs(dataclasses.replace(inputs, train_log_probs=theta.to(arithmetic(theta.dtype))))
        shards = self._shards(used)
        old_log_probs = theta.detach() if one_pass else inputs.rollout_log_probs
        if self.config.proximal_interpolation:
            old_log_probs = self._interpolated(shards)
            shards = self._shards(dataclasses.replace(used, train_log_probs=old_log_probs))

        batch = self._decided(shards)
        mean_log_ratio = None
        if self.config.bypass_mode:
            mean_log_ratio = batch.sums.mean_log_ratio
        elif one_pass:
            # π_old is π_θ.
            mean_log_ratio = torch.zeros_like(batch.sums.mean_log_ratio)
        weights = batch.weights() if self.config.applies_weights else None
        return CorrectedMicroBatch(
            weights=None if weights is None else weights[0],
            mask=batch.mask[0],
            sequence_lengths=batch.sequence_lengths,
            old_log_probs=old_log_probs,
            sums=micro_batch_sums(inputs.response_mask, shards.parts[0].layout, ids),
            mean_log_ratio=mean_log_ratio,
            batch=batch,
        )

    def _used_inputs(self, inputs: OneMicroBatch) -> OneMicroBatch:
        """The inputs without the tensors that a correction in the loss does not use."""
        unused = ["group_ids", "mini_batch_ids"]
        if not self.setup.one_pass:
            unused.append("rewards")
        if self.agreed.current_version is None:
            unused.append("policy_versions")
        return dataclasses.replace(inputs, **dict.fromkeys(unused))  # type: ignore[arg-type]

    def _shards(self, inputs: OneMicroBatch) -> Shards:
        """The checked inputs; sequences without ids are counted since the step began, as error messages name them."""
        shards = collect_shards(inputs, self.agreed.one_step, self.groups)
        if shards.has_default_ids:
            shards = dataclasses.replace(shards, sequence_ids=shards.sequence_ids + self.open_step.num_sequences)
        return shards

    def _decided(self, shards: Shards) -> BatchSums:
        """The decisions on a micro-batch. Collectives: those over ``cp`` of :func:`correct_rollouts`."""
        local = sequence_sums(shards, self.config, cp=self.groups.cp, compile=self.setup.compile)
        layouts = [part.layout for part in shards.parts]
        return batch_sums(local, reduce_sequences(local.pair, self.groups, layouts))

    def _interpolated(self, shards: Shards) -> Tensor:
        """The proximal policy's log-probs; its version is the current one of the plan, before the steps that ended."""
        part = shards.parts[0]
        versions = part.versions
        if versions is None:
            assert shards.policy_versions is not None  # the plan has a current version, and collect_shards checks it
            versions = part.layout.expand(shards.policy_versions)
        staleness = self.agreed.staleness(versions).clamp(min=0)
        return interpolate(part.train, part.rollout, staleness, updates=self.progress.steps_ended)

    def step_sums(self, mini_batch: int) -> StepSums[Tensor]:
        """The sums under the response mask; weights are not known before the loss."""
        if self.counts is None:
            raise RuntimeError("step_sums() on a pipeline stage without log-probs: steps are compared on the last one")
        tokens, ids = self.counts.counted[mini_batch, 0], self.counts.id_sums[mini_batch]
        unknown = torch.full_like(tokens, torch.nan)
        # Mini-batch ids out of range moved tokens to other mini-batches. The step's check() reports them.
        is_known = self.counts.bad_ids == 0
        return StepSums(
            tokens=torch.where(is_known, tokens, unknown),
            ids=torch.where(is_known, ids, unknown),
            weights=unknown,
        )

    def gradient_factor(
        self, header: BatchHeader[Tensor] | None, mini_batch: int
    ) -> tuple[BatchHeader[Tensor] | None, Tensor]:
        """D₀/G of a step, 0 if it must be skipped; the header also reports mini-batch ids that the plan found wrong."""
        if self.counts is None or header is None:
            raise RuntimeError("a step in the loss ends on the last pipeline stage, with the numbers of its batch")
        out_of_range = header.data.out_of_range.clone()
        out_of_range[PER_SEQUENCE.index("mini_batch_ids")] += self.counts.bad_ids
        header = dataclasses.replace(
            header,
            data=dataclasses.replace(header.data, out_of_range=out_of_range),
            denominators=_without_lost_weights(header.denominators),
        )
        skip = TrainingResult(config=self.config, header=header, loss=self.loss).skip[0]
        factor = self.denominator(mini_batch) / self._final_denominator(header.denominators)
        return header, torch.where(skip, 0.0, factor)

    def _final_denominator(self, denominators: Denominators[Tensor]) -> Tensor:
        """0-D: G of a step, (the aggregation's denominator) · w̄."""
        tokens, sequences, accepted_tokens, accepted_sequences = denominators.counts[0]
        if self.config.rejection_denominator == "accepted":
            tokens, sequences = accepted_tokens, accepted_sequences
        final = denominator(self.loss.aggregation, self.loss.loss_scale_factor, tokens, sequences)
        if self.config.rollout_is_batch_normalize:
            final = final / normalization(denominators.total_weight, denominators.weight_count)
        return final


def _without_lost_weights(denominators: Denominators[Tensor]) -> Denominators[Tensor]:
    """The denominators, with Σ w = 0, by which nothing is divided, if w̄ is below ``LEAST_MEAN_IN_LOSS``."""
    total, count = denominators.total_weight, denominators.weight_count
    is_lost = total < LEAST_MEAN_IN_LOSS * count
    return dataclasses.replace(denominators, total_weight=torch.where(is_lost, 0.0, total))


def plan_in_loss(inputs: AnyInputs | None, agreed: AgreedCounts, setup: Setup, open_step: OpenCounts) -> InLossPlan:
    """The plan of a correction in the loss; ``inputs`` are None on the stages before the last.

    Collectives: those of :func:`count_masks`, on the last stage.
    """
    counts = None
    if inputs is not None:
        check_left_out(setup.config, setup.one_pass, inputs)
        counts = count_masks(inputs, agreed, setup.groups)
    return InLossPlan(
        setup=setup,
        agreed=agreed,
        open_step=open_step,
        counts=counts,
        has_sequence_ids=inputs is not None and inputs.sequence_ids is not None,
    )
