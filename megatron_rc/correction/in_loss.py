"""The correction inside the loss, from π_θ: bypass mode, and interpolation of the proximal policy."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from megatron_rc.correction.header import HeaderFields, merge_headers, normalization_sums
from megatron_rc.correction.header_fields import header_fields
from megatron_rc.correction.in_loss_plan import InLossPlan, MaskCounts, count_masks
from megatron_rc.correction.inputs import AgreedCounts, AnyInputs, OneMicroBatch
from megatron_rc.correction.joined import KeptTokens
from megatron_rc.correction.micro_batch import CorrectedMicroBatch, MicroBatch
from megatron_rc.correction.misuse import Misuse, StepError
from megatron_rc.correction.plans import PlannedStep
from megatron_rc.correction.proximal import interpolate
from megatron_rc.correction.shards import collect_shards
from megatron_rc.correction.stages import accepted_tokens
from megatron_rc.correction.step import StepResult, StepSums
from megatron_rc.correction.weights import normalization
from megatron_rc.loss.aggregation import denominator
from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.parallel.groups import ParallelGroups
from megatron_rc.settings.config import RolloutCorrectionConfig


class InLoss:
    """See :class:`Mode`."""

    needs_steps = True

    def __init__(
        self, config: RolloutCorrectionConfig, loss: PolicyLossConfig, groups: ParallelGroups, *, compile: bool
    ) -> None:
        self.config, self.loss, self.groups, self.compile = config, loss, groups, compile
        self._newest: InLossPlan | None = None
        # Since then, on every stage.
        self._steps: tuple[StepResult, ...] = ()

    def plan(self, inputs: AnyInputs | None, counts: AgreedCounts, device: torch.device) -> InLossPlan:
        """Tokens and sequences under the response mask, on the last stage."""
        if inputs is not None:
            _check_left_out(self.config, inputs, "train_log_probs")
        masks = None if inputs is None else count_masks(inputs, counts, self.groups)
        self._newest, self._steps = InLossPlan(self.config, self.loss, self.groups, counts, masks), ()
        return self._newest

    def newest_step(self, mini_batch: int | None) -> PlannedStep:
        """A step of the newest plan."""
        if self._newest is None or self._newest.counts is None:
            raise StepError(
                "in_loss belongs to bypass_mode and proximal_interpolation, after plan() on the last pipeline stage"
            )
        return self._newest.step(mini_batch)

    def from_theta(self, inputs: OneMicroBatch, step: PlannedStep) -> CorrectedMicroBatch:
        """One micro-batch, with π_θ in the place of π_train, or what is interpolated from it."""
        counts, old = _of_one_step(step.plan.agreed), inputs.rollout_log_probs
        inputs = _without_others(inputs, counts)
        if self.config.proximal_interpolation:
            old = self._interpolated(inputs, step)
            inputs = dataclasses.replace(inputs, train_log_probs=old)
        tokens = accepted_tokens(inputs, self.config, counts, self.groups, compile=self.compile)
        weights, (mask,), lengths = tokens.spread(None)
        return CorrectedMicroBatch(
            weights=weights[0] if weights and self.config.applies_weights else None,
            mask=mask,
            sequence_lengths=lengths,
            old_log_probs=old,
            # In bypass mode the two ratios are one.
            mean_log_ratio=tokens.named["mean_log_ratio"] if self.config.bypass_mode else None,
            tokens=KeptTokens.of(tokens),
        )

    @torch.no_grad()
    def corrected(self, micro_batch: MicroBatch, log_probs: Tensor, step: PlannedStep) -> CorrectedMicroBatch:
        """What is found from π_θ."""
        _check_left_out(self.config, micro_batch, "train_log_probs", "weights", "mask", "sequence_lengths")
        return self.from_theta(dataclasses.replace(micro_batch, train_log_probs=log_probs), step)

    def metrics(self) -> dict[str, float]:
        """Of all steps since the newest plan, each with a policy of its own. Host synchronisations: one."""
        if not self._steps:
            return {}
        fields, prefix = self._steps[0].fields, self.config.metric_prefix
        merged = merge_headers(fields, [step.header for step in self._steps])
        metrics = StepResult(self.config, self.loss, fields, merged).metrics()
        if self.config.may_weigh_nothing:
            # Of several steps together that is not known: one of them may have weights.
            weightless = sum(step.num_weightless for step in self._steps)
            metrics[f"{prefix}rollout_is_weightless_mini_batches"] = weightless
        return metrics | {f"{prefix}mixed_policies": float(len(self._steps))}

    def _interpolated(self, inputs: OneMicroBatch, step: PlannedStep) -> Tensor:
        """The proximal policy's log-probs of a micro-batch: the plan's weights are the steps behind that have ended."""
        counts = _of_one_step(step.plan.agreed)
        shards = collect_shards(inputs, counts, self.groups)
        (part,) = shards.parts
        versions = part.versions
        if versions is None and shards.versions is not None:
            versions = part.layout.expand(shards.versions)
        if versions is None or counts.current_version is None or not isinstance(step.plan, InLossPlan):
            raise RuntimeError("proximal_interpolation needs versions, which the plan asked for")
        staleness = (counts.current_version - versions).clamp(min=0)
        return interpolate(part.train, part.rollout, staleness, updates=step.plan.steps_ended)

    def step_fields(self) -> HeaderFields:
        """The batch's, of one mini-batch."""
        counts = AgreedCounts() if self._newest is None else self._newest.agreed
        return header_fields(self.config, _of_one_step(counts))

    def factor(self, ended: StepSums, result: StepResult) -> Tensor:
        """D₀/G; G = (the aggregation's denominator) · w̄."""
        plan = None if ended.step is None else ended.step.plan
        if ended.step is None or not isinstance(plan, InLossPlan) or plan.counts is None:
            return result.header.new_zeros(())
        fields, header = result.fields, result.header
        # Found by the plan, which the other stages did not see.
        fields.number(header, "data.mini_batch_ids").add_(plan.counts.bad_ids)
        tokens, sequences, accepted_tokens, accepted_sequences = result.denominators[0]
        self._compare(plan.counts, ended.step.mini_batch, fields, header)
        if self.config.rejection_denominator == "accepted":
            tokens, sequences = accepted_tokens, accepted_sequences
        unknown = denominator(self.loss.aggregation, self.loss.loss_scale_factor, tokens, sequences)
        factor = ended.step.denominator / unknown
        if self.config.rollout_is_batch_normalize:
            factor = factor * normalization(*normalization_sums(fields, header))
        return torch.where(result.skip[0], 0.0, factor)

    def _compare(self, planned: MaskCounts, mini_batch: int, fields: HeaderFields, header: Tensor) -> None:
        """Note in the header if a step has counted other tokens than its mini-batch in the plan has."""
        counted = fields.column(header, "mini_batches")[0, 0]
        if self.config.bad_log_probs == "reject_token":
            # Those are not counted as tokens under the mask; the plan does not know them.
            counted = counted + fields.number(header, "data.bad_tokens")
        # Mini-batch ids out of range are an error of their own, and moved tokens to other mini-batches.
        differs = (counted != planned.tokens[mini_batch]) & (planned.bad_ids == 0)
        # What a rank found by itself says more, and a rank without a micro-batch does not come here to say the same.
        misuse = fields.column(header, "misuse")
        misuse.copy_(torch.where(differs & (misuse == 0), float(Misuse.OTHER_TOKENS), misuse))

    def note_end(self, ended: StepSums, result: StepResult) -> None:
        """For ``metrics``, and for the weights' distance from the plan."""
        self._steps = (*self._steps, result)
        if ended.step is not None and isinstance(ended.step.plan, InLossPlan):
            ended.step.plan.steps_ended += 1


def _of_one_step(counts: AgreedCounts) -> AgreedCounts:
    """The counts of a single mini-batch, without prompts."""
    return dataclasses.replace(counts, num_mini_batches=1, num_groups=None)


def _check_left_out(config: RolloutCorrectionConfig, given: AnyInputs, *names: str) -> None:
    """Raise ValueError for what decoupled mode takes and the loss would find for itself: it would be ignored."""
    mode, old = "proximal_interpolation", "interpolates log π_old from log π_θ and rollout_log_probs"
    if config.bypass_mode:
        mode, old = "bypass_mode", "takes rollout_log_probs for log π_old"
    for name in names:
        if getattr(given, name) is not None:
            what = old if name == "train_log_probs" else f"finds the {name} in the loss"
            raise ValueError(f"{name} would be ignored: {mode}=True {what}: pass {name}=None, or use decoupled mode")


def _without_others(inputs: OneMicroBatch, counts: AgreedCounts) -> OneMicroBatch:
    """Without what is of several mini-batches or prompts, and without versions that nothing is compared with."""
    if not isinstance(inputs.rollout_log_probs, Tensor):
        raise ValueError("the loss takes one micro-batch, not a list of them")
    versions = None if counts.current_version is None else inputs.policy_versions
    return dataclasses.replace(inputs, rewards=None, group_ids=None, mini_batch_ids=None, policy_versions=versions)
