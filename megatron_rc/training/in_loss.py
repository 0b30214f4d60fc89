"""The correction inside the loss, from π_θ: bypass mode, and interpolation of the proximal policy."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.batch.sums import local_batch
from megatron_rc.correction.inputs import PER_SEQUENCE, AgreedCounts, AnyInputs, OneMicroBatch, collect_shards
from megatron_rc.correction.weights import normalization
from megatron_rc.loss.aggregation import denominator
from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.measures.header import BatchHeader
from megatron_rc.parallel.collectives import all_reduce_sum
from megatron_rc.parallel.groups import ParallelGroups
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.training.micro_batch import CorrectedMicroBatch, MicroBatch
from megatron_rc.training.plan import Plan, PlannedStep, Progress, StepOwner
from megatron_rc.training.proximal import interpolate
from megatron_rc.training.result import index_of


@dataclass(frozen=True)
class MaskCounts:
    """Counts under the response masks of a rollout batch, over all ranks.

    Attributes:
        tokens: [num_mini_batches] float64.
        sequences: [num_mini_batches] float64, with such a token.
        bad_ids: 0-D float64, sequences among them whose mini-batch id is out of range, and which another one counts.
    """

    tokens: Tensor
    sequences: Tensor
    bad_ids: Tensor


def count_masks(inputs: AnyInputs, counts: AgreedCounts, groups: ParallelGroups) -> MaskCounts:
    """Count the response masks of a rollout batch, which are checked as :func:`collect_shards` does.

    Collectives: one SUM of [n] over ``cp``, one SUM of [2 num_mini_batches + 1] over ``dp_cp``.
    """
    # π_θ is not known yet, and only the masks are counted.
    shards = collect_shards(dataclasses.replace(inputs, train_log_probs=inputs.rollout_log_probs), counts, groups)
    tokens = all_reduce_sum(shards.sum_sequences([part.mask for part in shards.parts]), groups.cp)
    has_tokens = tokens > 0
    # Whole sequences are counted once: on the first CP rank.
    rows = torch.stack([tokens, has_tokens.double()]) * shards.is_first_cp_rank
    counted = rows.new_zeros(2, counts.num_mini_batches).index_add_(1, shards.mini_batch_ids, rows)
    bad_ids = (shards.out_of_range[PER_SEQUENCE.index("mini_batch_ids")] * rows[1]).sum()
    total = all_reduce_sum(torch.cat([counted.view(-1), bad_ids.view(1)]), groups.dp_cp)
    num_tokens, num_sequences = total[:-1].chunk(2)
    return MaskCounts(num_tokens, num_sequences, total[-1])


class InLossPlan(Plan):
    """The plan of a correction that is made in the loss: the facts that are known before π_θ is.

    Attributes:
        counts: under the response mask; None on pipeline stages without log-probs.
    """

    def __init__(
        self,
        config: RolloutCorrectionConfig,
        agreed: AgreedCounts,
        groups: ParallelGroups,
        counts: MaskCounts | None,
        *,
        loss: PolicyLossConfig,
        steps: StepOwner,
        compile: bool,
    ) -> None:
        self.config, self.loss, self.agreed, self.groups, self.steps = config, loss, agreed, groups, steps
        self.counts, self._compile = counts, compile
        # Nothing is known to be wrong before π_θ is: the ``check()`` of each step's result raises.
        self.progress = Progress(is_checked=True)

    @property
    def counted(self) -> Tensor:
        """[num_mini_batches, 2] float64: tokens and sequences under the response mask; NaN on other stages."""
        if self.counts is None:
            return torch.full((self.num_mini_batches, 2), torch.nan, dtype=torch.float64)
        return torch.stack([self.counts.tokens, self.counts.sequences], dim=1)

    @property
    def skip(self) -> Tensor | None:
        """[num_mini_batches] bool: nothing to train on, known before the schedule; None without log-probs."""
        return None if self.counts is None else self.counts.tokens == 0

    def check(self) -> None:
        """Raise nothing: the ``check()`` of each step's result raises, on every stage."""

    def metrics(self) -> dict[str, float]:
        """No metrics yet: those of a step follow ``finish_step``."""
        return {}

    def skips(self, mini_batch: int | None = None) -> bool:
        """False: it is not known on every rank before the step, whose result says so."""
        index_of(mini_batch, self.num_mini_batches)
        return False

    @torch.no_grad()
    def corrected(self, micro_batch: MicroBatch, log_probs: Tensor, step: PlannedStep) -> CorrectedMicroBatch:
        """The correction that is found from log π_θ."""
        check_left_out(self.config, micro_batch, "train_log_probs", "weights", "mask", "sequence_lengths")
        return self.from_theta(dataclasses.replace(micro_batch, train_log_probs=log_probs))

    def from_theta(self, inputs: OneMicroBatch) -> CorrectedMicroBatch:
        """Correct one micro-batch whose ``train_log_probs`` are log π_θ, or from which log π_old is interpolated."""
        counts, old = of_one_step(self.agreed), inputs.rollout_log_probs
        inputs = _without_others(inputs, counts)
        if self.config.proximal_interpolation:
            old = self._interpolated(inputs)
            inputs = dataclasses.replace(inputs, train_log_probs=old)
        first = self.steps.num_sequences
        batch = local_batch(inputs, self.config, counts, self.groups, compile=self._compile, first_sequence=first)
        weights = batch.weights() if self.config.applies_weights else None
        return CorrectedMicroBatch(
            weights=None if weights is None else weights[0],
            mask=batch.mask[0],
            sequence_lengths=batch.sequence_lengths,
            old_log_probs=old,
            # In bypass mode the two ratios are one.
            mean_log_ratio=batch.sums.mean_log_ratio if self.config.bypass_mode else None,
            header=batch.header,
        )

    def factor(self, header: BatchHeader[Tensor], mini_batch: int) -> Tensor:
        """0-D: D₀/G of a step; G = (the aggregation's denominator) · w̄."""
        tokens, sequences, accepted_tokens, accepted_sequences = header.denominators.counts[0]
        if self.config.rejection_denominator == "accepted":
            tokens, sequences = accepted_tokens, accepted_sequences
        unknown = denominator(self.loss.aggregation, self.loss.loss_scale_factor, tokens, sequences)
        factor = self.step(mini_batch).denominator / unknown
        if self.config.rollout_is_batch_normalize:
            factor = factor * normalization(header.denominators.total_weight, header.denominators.weight_count)
        return factor

    def _interpolated(self, inputs: OneMicroBatch) -> Tensor:
        """The proximal policy's log-probs: its version is that of the batch's start, before the steps that ended."""
        shards = collect_shards(inputs, of_one_step(self.agreed), self.groups)
        (part,) = shards.parts
        versions = part.versions
        if versions is None and shards.versions is not None:
            versions = part.layout.expand(shards.versions)
        if versions is None or self.agreed.current_version is None:
            raise RuntimeError("proximal_interpolation needs versions, which the plan asked for")
        staleness = (self.agreed.current_version - versions).clamp(min=0)
        return interpolate(part.train, part.rollout, staleness, updates=self.progress.steps_ended)


def plan_in_loss(
    inputs: AnyInputs | None,
    config: RolloutCorrectionConfig,
    agreed: AgreedCounts,
    groups: ParallelGroups,
    *,
    loss: PolicyLossConfig,
    steps: StepOwner,
    compile: bool,
) -> InLossPlan:
    """Tokens and sequences under the response mask, on the last stage. Collectives: see :func:`count_masks`."""
    if inputs is not None:
        check_left_out(config, inputs, "train_log_probs")
    counts = None if inputs is None else count_masks(inputs, agreed, groups)
    return InLossPlan(config, agreed, groups, counts, loss=loss, steps=steps, compile=compile)


def of_one_step(counts: AgreedCounts) -> AgreedCounts:
    """The counts of a single mini-batch, without prompts."""
    return dataclasses.replace(counts, num_mini_batches=1, num_groups=None)


def check_left_out(config: RolloutCorrectionConfig, given: AnyInputs, *names: str) -> None:
    """Raise ValueError for inputs that decoupled mode takes and the loss would find for itself and ignore."""
    mode, old = "proximal_interpolation", "interpolates log π_old from log π_θ and rollout_log_probs"
    if config.bypass_mode:
        mode, old = "bypass_mode", "takes rollout_log_probs for log π_old"
    for name in names:
        if getattr(given, name) is not None:
            why = old if name == "train_log_probs" else f"finds the {name} in the loss"
            raise ValueError(f"{name} would be ignored: {mode}=True {why}: pass {name}=None, or use decoupled mode")


def _without_others(inputs: OneMicroBatch, counts: AgreedCounts) -> OneMicroBatch:
    """The inputs without the fields on several mini-batches or prompts, and without versions that are not looked at."""
    if not isinstance(inputs.rollout_log_probs, Tensor):
        raise ValueError("the loss takes one micro-batch, not a list of them")
    versions = None if counts.current_version is None else inputs.policy_versions
    return dataclasses.replace(inputs, rewards=None, group_ids=None, mini_batch_ids=None, policy_versions=versions)
