"""The correction inside the loss, from π_θ: bypass mode, one pass, and interpolation of the proximal policy.

Before the schedule only the response masks are known. The losses of a step are divided by D₀, the denominator under the
response mask; at the end of the step, when the final denominator G is known, the gradients are multiplied by D₀/G.
"""

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

# Smallest mean weight w̄ that gradients are divided by. The loss multiplies by the weights before w̄ is known: with a
# smaller w̄ the float32 gradients are so small that few correct digits are left.
LEAST_MEAN_IN_LOSS = 1e-25


@dataclass(frozen=True)
class MaskCounts:
    """Counts under the response masks of a rollout batch, over all ranks; float64."""

    counted: Tensor  # [num_mini_batches, 2] number of tokens, and number of sequences with at least one of them
    id_sums: Tensor  # [num_mini_batches] Σ over tokens of (sequence id + 1)
    # 0-D, number of these sequences whose mini-batch id is out of range. They are counted in a mini-batch all the same,
    # because an error can only be raised later, on all ranks alike.
    bad_ids: Tensor


def count_masks(inputs: AnyInputs, counts: AgreedCounts, groups: ParallelGroups) -> MaskCounts:
    """Count the tokens and sequences under the response masks of a rollout batch, over all ranks.

    The inputs are checked as by :func:`collect_shards`.

    Collectives: one SUM of [n] over each CP group, one SUM of [3 num_mini_batches + 1] over ``dp_cp``.
    """
    # collect_shards needs some train_log_probs. log π_θ is not known yet, and only the masks are read here.
    shards = collect_shards(dataclasses.replace(inputs, train_log_probs=inputs.rollout_log_probs), counts, groups)
    layouts = [part.layout for part in shards.parts]
    local_tokens = torch.cat([part.layout.sum_sequences(part.mask) for part in shards.parts])
    no_maxima = local_tokens[:0]
    tokens, _ = reduce_sequences((local_tokens, no_maxima), groups, layouts)

    # All ranks of a CP group have the sums of the whole sequences: only the group's first rank counts them.
    columns = torch.stack([tokens, tokens > 0, tokens * (shards.sequence_ids + 1)], dim=1)
    columns = torch.where(shards.counts_here.unsqueeze(1), columns, 0)
    local_sums = columns.new_zeros(counts.num_mini_batches, 3).index_add_(0, shards.mini_batch_ids, columns)
    is_out_of_range = shards.is_out_of_range("mini_batch_ids")
    local_bad_ids = (is_out_of_range & (columns[:, 1] > 0)).sum(dtype=torch.float64)

    total = all_reduce_sum(torch.cat([local_sums.flatten(), local_bad_ids.view(1)]), groups.dp_cp)
    sums = total[:-1].view(-1, 3)
    return MaskCounts(counted=sums[:, :2], id_sums=sums[:, 2], bad_ids=total[-1])


class InLossPlan(Plan):
    """The plan of a correction that is made in the loss: the numbers that are known before π_θ.

    Attributes:
        counts: the counts under the response masks; None on pipeline stages without log-probs.
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
        # The data can be checked only with π_θ: the ``check()`` of each step's result does it, not the plan's.
        self.progress = Progress(is_checked=True)

    @property
    def counted(self) -> Tensor:
        """[num_mini_batches, 2] float64: tokens and sequences under the response mask; NaN on other stages."""
        if self.counts is None:
            return torch.full((self.num_mini_batches, 2), torch.nan, dtype=torch.float64)
        return self.counts.counted

    @property
    def skip(self) -> Tensor | None:
        """[num_mini_batches] bool: True if no token trains; None on pipeline stages without log-probs."""
        return None if self.counts is None else self.counts.counted[:, 0] == 0

    def check(self) -> None:
        """Do nothing: the ``check()`` of each step's result raises for bad data, on every stage."""

    def metrics(self) -> dict[str, float]:
        """Return {}: there are no metrics before ``finish_step``."""
        return {}

    def skips(self, mini_batch: int | None = None) -> bool:
        """Return False: before a step not every rank knows that it must be skipped; the step's result says so."""
        index_of(mini_batch, self.num_mini_batches)
        return False

    @torch.no_grad()
    def corrected(self, micro_batch: MicroBatch, log_probs: Tensor) -> CorrectedMicroBatch:
        """Correct one micro-batch from its log π_θ, ``log_probs``; ValueError for inputs that would be ignored."""
        check_left_out(self.config, self.setup.one_pass, micro_batch, "weights", "mask", "sequence_lengths")
        ids = self.ids_of_step(micro_batch.sequence_ids, micro_batch.plan_ids)
        return self.from_theta(dataclasses.replace(micro_batch, train_log_probs=log_probs), ids)

    def from_theta(self, inputs: OneMicroBatch, ids: Tensor | None) -> CorrectedMicroBatch:
        """Correct one micro-batch whose ``train_log_probs`` are log π_θ.

        Args:
            inputs: the micro-batch. log π_old is not among them: in bypass mode it is log π_rollout, with ``one_pass``
                log π_θ, with ``proximal_interpolation`` it lies between the two.
            ids: [n] int64: the end of the step recognises the sequences by these ids. None: it cannot recognise them.

        Collectives: those of :func:`correct_rollouts` over ``cp``.

        Raises:
            ValueError: tensors that do not fit together.
            StepError: with ``one_pass``, the step of the plan has ended.
        """
        log_probs = inputs.train_log_probs
        if log_probs is None or not isinstance(inputs.rollout_log_probs, Tensor):
            raise ValueError("the loss takes one micro-batch, not a list of them")
        one_pass = self.setup.one_pass
        if one_pass and self.progress.steps_ended:
            raise StepError(f"the step of this plan has ended: {ONE_STEP}")

        # A model may give bfloat16 log-probs: the differences of log-probs are taken in float32.
        wide_log_probs = log_probs.to(arithmetic(log_probs.dtype))
        used = self._used_inputs(dataclasses.replace(inputs, train_log_probs=wide_log_probs))
        shards = self._shards(used)
        old_log_probs = log_probs.detach() if one_pass else inputs.rollout_log_probs
        if self.config.proximal_interpolation:
            old_log_probs = self._interpolated(shards)
            shards = self._shards(dataclasses.replace(used, train_log_probs=old_log_probs))

        batch = self._decided(shards)
        mean_log_ratio = None
        if self.config.bypass_mode:
            mean_log_ratio = batch.sums.mean_log_ratio
        elif one_pass:
            # log π_θ/π_old is 0, because π_old is π_θ.
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
        """Return the inputs without the tensors that a correction in the loss does not use."""
        unused = ["group_ids", "mini_batch_ids"]
        if not self.setup.one_pass:
            unused.append("rewards")
        if self.agreed.current_version is None:
            unused.append("policy_versions")
        return dataclasses.replace(inputs, **dict.fromkeys(unused))  # type: ignore[arg-type]

    def _shards(self, inputs: OneMicroBatch) -> Shards:
        """Return the checked inputs as shards; without ids, sequences are numbered from the beginning of the step.

        Error messages name sequences by these numbers.
        """
        shards = collect_shards(inputs, self.agreed.one_step, self.groups)
        if shards.has_default_ids:
            shards = dataclasses.replace(shards, sequence_ids=shards.sequence_ids + self.open_step.num_sequences)
        return shards

    def _decided(self, shards: Shards) -> BatchSums:
        """Decide weights and accepted tokens. Collectives: those of :func:`correct_rollouts` over ``cp``."""
        local = sequence_sums(shards, self.config, cp=self.groups.cp, compile=self.setup.compile)
        layouts = [part.layout for part in shards.parts]
        return batch_sums(local, reduce_sequences(local.pair, self.groups, layouts))

    def _interpolated(self, shards: Shards) -> Tensor:
        """Return the proximal policy's log-probs, interpolated between π_rollout and π_θ.

        The version of the proximal policy is the plan's ``current_version``: that of the trainer's weights before the
        first step of the plan.
        """
        part = shards.parts[0]
        versions = part.versions
        if versions is None:
            assert shards.policy_versions is not None  # the plan has a current version, and collect_shards checks it
            versions = part.layout.expand(shards.policy_versions)
        staleness = self.agreed.staleness(versions).clamp(min=0)
        return interpolate(part.train, part.rollout, staleness, updates=self.progress.steps_ended)

    def step_sums(self, mini_batch: int) -> StepSums[Tensor]:
        """Return the sums that the step must have: under the response mask. The sum of weights is NaN, not known."""
        if self.counts is None:
            raise RuntimeError("step_sums() on a pipeline stage without log-probs: steps are compared on the last one")
        tokens = self.counts.counted[mini_batch, 0]
        ids = self.counts.id_sums[mini_batch]
        unknown = torch.full_like(tokens, torch.nan)
        # With mini-batch ids out of range, sequences were counted in a wrong mini-batch. The step's check() reports it.
        is_known = self.counts.bad_ids == 0
        return StepSums(
            tokens=torch.where(is_known, tokens, unknown),
            ids=torch.where(is_known, ids, unknown),
            weights=unknown,
        )

    def gradient_factor(
        self, header: BatchHeader[Tensor] | None, mini_batch: int
    ) -> tuple[BatchHeader[Tensor] | None, Tensor]:
        """Return (the step's header, D₀/G); the factor is 0 if the step must be skipped.

        To the header's errors it adds the mini-batch ids that the plan has found out of range.
        """
        if self.counts is None or header is None:
            raise RuntimeError("gradient_factor() needs the last pipeline stage, and a header from the step's losses")
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
        """Return G of a step, 0-D: the denominator of the aggregation, times w̄ with batch normalisation."""
        tokens, sequences, accepted_tokens, accepted_sequences = denominators.counts[0]
        if self.config.rejection_denominator == "accepted":
            tokens = accepted_tokens
            sequences = accepted_sequences
        final = denominator(self.loss.aggregation, self.loss.loss_scale_factor, tokens, sequences)
        if self.config.rollout_is_batch_normalize:
            # The normalization is 1 / w̄.
            final = final / normalization(denominators.total_weight, denominators.weight_count)
        return final


def _without_lost_weights(denominators: Denominators[Tensor]) -> Denominators[Tensor]:
    """Return the denominators with Σ w set to 0 if the mean weight w̄ is below ``LEAST_MEAN_IN_LOSS``.

    Nothing is divided by a Σ w of 0.
    """
    total_weight = denominators.total_weight
    is_too_small = total_weight < LEAST_MEAN_IN_LOSS * denominators.weight_count
    return dataclasses.replace(denominators, total_weight=torch.where(is_too_small, 0.0, total_weight))


def plan_in_loss(inputs: AnyInputs | None, agreed: AgreedCounts, setup: Setup, open_step: OpenCounts) -> InLossPlan:
    """Make the plan of a correction in the loss, with the counts that are known before the schedule.

    Args:
        inputs: this rank's part of the rollout batch; None on the pipeline stages before the last.
        agreed: the counts that are equal on every rank.
        setup: the arguments of the RolloutCorrection.
        open_step: the RolloutCorrection's open optimizer step, for which the plan's losses count.

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
