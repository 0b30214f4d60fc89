"""The correction inside the loss, from π_θ: bypass mode, one pass, and interpolation of the proximal policy."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.batch.chain import local_batch, reduce_sequences
from megatron_rc.correction.denominators import Denominators
from megatron_rc.correction.inputs import PER_SEQUENCE, AgreedCounts, AnyInputs, OneMicroBatch, collect_shards
from megatron_rc.correction.weights import normalization
from megatron_rc.loss.aggregation import denominator
from megatron_rc.loss.proximal import interpolate
from megatron_rc.measures.header import BatchHeader
from megatron_rc.parallel.collectives import all_reduce_sum
from megatron_rc.parallel.groups import ParallelGroups
from megatron_rc.parallel.softmax import arithmetic
from megatron_rc.settings.objective import ONE_STEP, check_left_out
from megatron_rc.training.micro_batch import CorrectedMicroBatch, Counted, MicroBatch
from megatron_rc.training.misuse import StepError
from megatron_rc.training.plan import Plan, Progress, Setup, StepOwner, TrainingResult, index_of

# The loss multiplies by weights before their mean w̄ is known, and its gradients are float32: if w̄ is smaller than this,
# they have few digits left, and are not divided by it.
LEAST_MEAN_IN_LOSS = 1e-25


@dataclass(frozen=True)
class MaskCounts:
    """Counts under the response masks of a rollout batch, over all ranks; float64."""

    counted: Tensor  # [num_mini_batches, 2] tokens, and sequences with such a token
    bad_ids: Tensor  # 0-D, sequences among them whose mini-batch id is out of range; another mini-batch counts them


def count_masks(inputs: AnyInputs, counts: AgreedCounts, groups: ParallelGroups) -> MaskCounts:
    """Count the response masks of a rollout batch, checked as by :func:`collect_shards`.

    Collectives: one SUM of [n] over each CP group, one SUM of [2 num_mini_batches + 1] over ``dp_cp``.
    """
    # π_θ is not known yet, and only the masks are counted.
    shards = collect_shards(dataclasses.replace(inputs, train_log_probs=inputs.rollout_log_probs), counts, groups)
    local = torch.cat([part.layout.sum_sequences(part.mask) for part in shards.parts])
    tokens, _ = reduce_sequences((local, local[:0]), groups, [part.layout for part in shards.parts])
    rows = torch.stack([tokens, tokens > 0], dim=1) * shards.counts_here.unsqueeze(1)
    counted = rows.new_zeros(counts.num_mini_batches, 2).index_add_(0, shards.mini_batch_ids, rows)
    bad_ids = (shards.is_out_of_range("mini_batch_ids") * rows[:, 1]).sum()
    total = all_reduce_sum(torch.cat([counted.view(-1), bad_ids.view(1)]), groups.dp_cp)
    return MaskCounts(total[:-1].view(-1, 2), total[-1])


class InLossPlan(Plan):
    """The plan of a correction that is made in the loss: the facts that are known before π_θ is."""

    def __init__(self, setup: Setup, steps: StepOwner, agreed: AgreedCounts, counts: MaskCounts | None) -> None:
        self.config, self.loss, self.groups, self._compile = setup.config, setup.loss, setup.groups, setup.compile
        self.steps, self.agreed, self._one_pass = steps, agreed, setup.one_pass
        self.counts = counts  # None on pipeline stages without log-probs
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
        check_left_out(self.config, self._one_pass, micro_batch, "weights", "mask", "sequence_lengths")
        return self.from_theta(dataclasses.replace(micro_batch, train_log_probs=log_probs))

    def from_theta(self, inputs: OneMicroBatch) -> CorrectedMicroBatch:
        """Correct one micro-batch whose ``train_log_probs`` are log π_θ, or from which log π_old is interpolated."""
        if not isinstance(inputs.rollout_log_probs, Tensor):
            raise ValueError("the loss takes one micro-batch, not a list of them")
        one_pass, counts = self._one_pass, self.agreed.one_step
        old = inputs.train_log_probs.detach() if one_pass else inputs.rollout_log_probs  # type: ignore[union-attr]
        if one_pass and self.progress.steps_ended:
            raise StepError(f"the step of this plan has ended: {ONE_STEP}")
        without = {"rewards": not one_pass, "policy_versions": counts.current_version is None}
        without |= {"group_ids": True, "mini_batch_ids": True}
        # Copies, because the batch is measured when the step ends, and the caller may fill its tensors anew before.
        tensors = {name: value for name, value in vars(inputs).items() if isinstance(value, Tensor)}
        copies = {name: None if without.get(name) else value.clone() for name, value in tensors.items()}
        inputs = dataclasses.replace(inputs, **copies)  # type: ignore[arg-type]
        # A model may have narrow log-probs; differences of them are taken in float32.
        theta = inputs.train_log_probs
        inputs = dataclasses.replace(inputs, train_log_probs=theta.to(arithmetic(theta.dtype)))  # type: ignore[union-attr]
        if self.config.proximal_interpolation:
            old = self._interpolated(inputs, counts)
            inputs = dataclasses.replace(inputs, train_log_probs=old)
        batch = local_batch(inputs, self.config, counts, self.groups, compile=self._compile)
        mean = batch.sums.mean_log_ratio * self.config.bypass_mode  # r is ρ in bypass mode, and 1 in one pass
        weights = batch.weights() if self.config.applies_weights else None
        return CorrectedMicroBatch(
            weights=None if weights is None else weights[0],
            mask=batch.mask[0],
            sequence_lengths=batch.sequence_lengths,
            old_log_probs=old,
            mean_log_ratio=mean if self.config.bypass_mode or one_pass else None,
            batch=batch,
        )

    def ended(
        self, batch: BatchHeader[Tensor] | None, counted: Counted[Tensor], mini_batch: int
    ) -> tuple[BatchHeader[Tensor] | None, Tensor, Tensor]:
        """Compare the tokens under the response mask; the factor is D₀/G, 0 if the step must be skipped."""
        if self.counts is None or batch is None:
            raise RuntimeError("a step in the loss ends on the last pipeline stage, with the numbers of its batch")
        found: Tensor = batch.denominators.counts[0, 0]
        if self.config.bad_log_probs == "reject_token":
            # Bad tokens are not counted under the mask; the plan does not know them.
            found = found + batch.data.bad_tokens
        # Mini-batch ids out of range are an error of their own, and moved tokens to other mini-batches.
        differs = (found != self.counts.counted[mini_batch, 0]) & (self.counts.bad_ids == 0)
        # The plan found these, and the other stages did not see them.
        out_of_range = batch.data.out_of_range.clone()
        out_of_range[PER_SEQUENCE.index("mini_batch_ids")] += self.counts.bad_ids
        batch = dataclasses.replace(
            batch,
            data=dataclasses.replace(batch.data, out_of_range=out_of_range),
            denominators=_without_lost_weights(batch.denominators),
        )
        skip = TrainingResult(config=self.config, header=batch, loss=self.loss).skip[0]
        return batch, differs, torch.where(skip, 0.0, self._factor(batch, mini_batch))

    def _factor(self, batch: BatchHeader[Tensor], mini_batch: int) -> Tensor:
        """0-D: D₀/G of a step; G = (the aggregation's denominator) · w̄."""
        tokens, sequences, accepted_tokens, accepted_sequences = batch.denominators.counts[0]
        if self.config.rejection_denominator == "accepted":
            tokens, sequences = accepted_tokens, accepted_sequences
        unknown = denominator(self.loss.aggregation, self.loss.loss_scale_factor, tokens, sequences)
        factor = self.denominator(mini_batch) / unknown
        if self.config.rollout_is_batch_normalize:
            factor = factor * normalization(batch.denominators.total_weight, batch.denominators.weight_count)
        return factor

    def _interpolated(self, inputs: OneMicroBatch, counts: AgreedCounts) -> Tensor:
        """The proximal policy's log-probs; its version is the current one of the plan, before the steps that ended."""
        shards = collect_shards(inputs, counts, self.groups)
        (part,) = shards.parts
        versions = part.layout.expand(shards.policy_versions) if part.versions is None else part.versions  # type: ignore[arg-type]
        staleness = counts.staleness(versions).clamp(min=0)
        return interpolate(part.train, part.rollout, staleness, updates=self.progress.steps_ended)


def _without_lost_weights(denominators: Denominators[Tensor]) -> Denominators[Tensor]:
    """The denominators, with Σ w = 0, by which nothing is divided, if w̄ is below ``LEAST_MEAN_IN_LOSS``."""
    total, count = denominators.total_weight, denominators.weight_count
    is_lost = total < LEAST_MEAN_IN_LOSS * count
    return dataclasses.replace(denominators, total_weight=torch.where(is_lost, 0.0, total))


def plan_in_loss(inputs: AnyInputs | None, agreed: AgreedCounts, setup: Setup, steps: StepOwner) -> InLossPlan:
    """Tokens and sequences under the response mask, on the last stage. Collectives: see :func:`count_masks`."""
    counts = None
    if inputs is not None:
        check_left_out(setup.config, setup.one_pass, inputs)
        counts = count_masks(inputs, agreed, setup.groups)
    return InLossPlan(setup, steps, agreed, counts)
