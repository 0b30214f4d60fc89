"""``RolloutCorrection``: the correction as a trainer uses it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_rc.batch.chain import empty_header
from megatron_rc.correction.inputs import AgreedCounts, AnyInputs, CorrectionInputs, OneMicroBatch, check_needs
from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.parallel.arguments import check_kind
from megatron_rc.parallel.collectives import broadcast_record, merged
from megatron_rc.parallel.groups import GROUPS_REMEDY, ParallelGroups, group_device
from megatron_rc.parallel.layout import SequenceLayout
from megatron_rc.settings.config import RolloutCorrectionConfig, wrong_config
from megatron_rc.settings.objective import ONE_STEP, denominator_is_unknown, resolve_objective
from megatron_rc.training.decoupled import plan_decoupled
from megatron_rc.training.in_loss import InLossPlan, plan_in_loss
from megatron_rc.training.micro_batch import CorrectedMicroBatch, MicroBatch
from megatron_rc.training.optimizer_step import OpenStep, StepCounts, StepResult, check_step
from megatron_rc.training.plan import Plan, PlannedStep, Setup, StepError, TrainingResult, index_of


class RolloutCorrection:
    """The correction for a trainer.

    Decoupled: ``plan`` before the schedule decides everything. In the loss (``bypass_mode``, ``one_pass`` and
    ``proximal_interpolation``): ``plan`` before the schedule, ``in_loss`` for every micro-batch inside it. In both,
    ``plan.loss_scale`` gives the factors of an optimizer step to its losses, and ``finish_step`` ends the step.

    Args:
        config: the correction.
        groups: ``cp`` (or layouts' own groups) and ``dp_cp`` carry the reductions of the last stage, ``pp`` the header.
        loss: the objective: its aggregation decides the denominators.
        has_auxiliary_losses: the model adds losses of its own to the gradients (MoE balancing or z losses, multi-token
            prediction).
        one_pass: decoupled mode without a forward-only pass: the detached log π_θ of the loss is log π_old. Exact for
            one optimizer step a rollout batch: a plan allows no second one.
        allow_zero_log_probs: as in :func:`correct_rollouts`.
        compile: as in :func:`correct_rollouts`.

    Raises:
        ValueError: settings that cannot be exact together; names them and the remedy.
    """

    def __init__(
        self,
        config: RolloutCorrectionConfig,
        groups: ParallelGroups,
        *,
        loss: PolicyLossConfig,
        has_auxiliary_losses: bool = False,
        one_pass: bool = False,
        allow_zero_log_probs: bool = False,
        compile: bool = False,
    ) -> None:
        if not isinstance(config, RolloutCorrectionConfig):
            raise wrong_config(config)
        check_kind("groups", groups, ParallelGroups, GROUPS_REMEDY)
        check_kind("loss", loss, PolicyLossConfig, "a PolicyLossConfig, for example PolicyLossConfig()")
        self.loss = resolve_objective(config, loss, has_auxiliary_losses=has_auxiliary_losses, one_pass=one_pass)
        self.config = config
        self.groups = groups
        self._setup = Setup(
            config=config,
            groups=groups,
            loss=self.loss,
            allow_zero_log_probs=allow_zero_log_probs,
            compile=compile,
            one_pass=one_pass,
        )
        self.corrects_in_loss = self._setup.corrects_in_loss
        self.open_step = OpenStep()
        self._newest: Plan | None = None
        self._last: StepResult | None = None
        self._since_plan: list[StepResult] = []  # the steps that have ended since the newest plan was made

    @torch.no_grad()
    def plan(
        self,
        inputs: AnyInputs | None,
        *,
        num_mini_batches: int = 1,
        num_groups: int | None = None,
        current_version: int | None = None,
        max_staleness: int = 0,
        device: torch.device | None = None,
    ) -> Plan:
        """Prepare a rollout batch, on all pipeline stages. Steps of earlier plans are not touched.

        Args:
            inputs: this rank's part, a PlanInputs, in the loss without ``train_log_probs``; None on the stages that
                hold no log-probs.
            num_mini_batches: as in :func:`correct_rollouts`, like the next three; equal on every rank.
            num_groups: prompts of the whole batch.
            current_version: of the weights that train.
            max_staleness: the last bucket of staleness.
            device: of the header, if ``inputs`` is None. Default: the GPU if the backend of ``groups.pp`` is nccl.

        Returns:
            Decoupled: the result, on stages without log-probs with weights and mask None. In the loss: the denominators
            under the response mask, known on the last stage alone.

        Collectives: decoupled, as :func:`correct_rollouts` on the last stage, then one broadcast over ``pp``; in
        the loss, one SUM over ``cp`` and one SUM over ``dp_cp``, on the last stage.

        Raises:
            ValueError: shapes or ids that do not fit; in the loss, ``train_log_probs``, which would be ignored. Bad
                data is reported by ``check()`` of the result.
        """
        counts = AgreedCounts(num_mini_batches, num_groups, current_version, max_staleness)
        # Checks that every stage can make, before any of them waits for another.
        check_needs(self.config, counts)
        if (inputs is None) == self.groups.is_last_stage:
            raise ValueError("plan() takes the inputs on the last pipeline stage, and None on all others")
        if inputs is not None:
            check_kind("inputs", inputs, CorrectionInputs, "PlanInputs(...)")
        if self._setup.one_pass and num_mini_batches > 1:
            raise ValueError(f"num_mini_batches={num_mini_batches} is more than 1: {ONE_STEP}")
        if self.corrects_in_loss:
            self._newest = plan_in_loss(inputs, counts, self._setup, self.open_step)
        else:
            device = device or group_device(self.groups.pp)
            self._newest = plan_decoupled(inputs, counts, self._setup, self.open_step, device)
        self.open_step.agreed = counts
        self._since_plan = []
        return self._newest

    def in_loss(
        self,
        log_probs: Tensor,
        rollout_log_probs: Tensor,
        response_mask: Tensor,
        *,
        layout: SequenceLayout | None = None,
        advantages: Tensor | None = None,
        sequence_ids: Tensor | None = None,
        policy_versions: Tensor | None = None,
        rewards: Tensor | None = None,
        turn_ids: Tensor | None = None,
        mini_batch: int | None = None,
    ) -> CorrectedMicroBatch:
        """Correct one micro-batch from π_θ, inside the loss; not in decoupled mode with a forward-only pass.

        Args:
            log_probs: log π_θ, the layout's local shape, nats; only its values are used.
            rollout_log_probs: as in :func:`correct_rollouts`, of this micro-batch, like the next seven.
            response_mask: bool.
            layout: which tokens these are.
            advantages: ``opsm`` needs them.
            sequence_ids: the plan's, if it was given any: the end of the step compares them, and error messages name
                them. Default: sequences are counted since the step began.
            policy_versions: needed if the plan was given the current version, else not used.
            rewards: for metrics by reward with ``one_pass``, else not used.
            turn_ids: the turn of each token. Default: each run of trained tokens is one.
            mini_batch: the optimizer step, of the newest plan; one for all micro-batches until ``finish_step``. The
                micro-batch counts at once, unless gradients are switched off.

        Collectives: over ``cp`` as in :func:`correct_rollouts`.

        Raises:
            ValueError: shapes that do not fit, or no mini-batch named although there are several.
            StepError: decoupled mode, no ``plan`` before, or another mini-batch than the step has so far.
        """
        plan = self._newest
        if not isinstance(plan, InLossPlan) or plan.counts is None:
            raise StepError(
                "in_loss belongs to bypass_mode, proximal_interpolation and one_pass, after plan() on the last stage"
            )
        step = PlannedStep(plan, index_of(mini_batch, plan.num_mini_batches))
        inputs = OneMicroBatch(
            train_log_probs=log_probs,
            rollout_log_probs=rollout_log_probs,
            response_mask=response_mask,
            layout=layout,
            advantages=advantages,
            rewards=rewards,
            sequence_ids=sequence_ids,
            policy_versions=policy_versions,
            turn_ids=turn_ids,
        )
        with torch.no_grad():
            corrected = plan.from_theta(inputs, plan.ids_of_step(sequence_ids))
        if torch.is_grad_enabled():
            self.open_step.count(step, StepCounts.of(corrected), len(corrected.sequence_lengths))
        return corrected

    def corrected(self, micro_batch: MicroBatch, log_probs: Tensor, step: PlannedStep) -> CorrectedMicroBatch:
        """The correction of a micro-batch in the loss; ValueError if the step is of a plan of another correction."""
        if step.plan.open_step is not self.open_step:
            raise ValueError("scale: it is from the plan of another correction: take it from this one's plan()")
        return step.plan.corrected(micro_batch, log_probs)

    @torch.no_grad()
    def finish_step(self, device: torch.device | None = None) -> Tensor:
        """End one optimizer step, on every pipeline stage: reduce its counts, and compare them with the plan.

        ``device`` holds the result on stages without log-probs; by default as for ``plan``.

        Returns:
            0-D float64, the factor of the gradients, which are not touched here. In the loss it is D₀/G (D₀ is the
            denominator under the response mask, which the losses were divided by), or 0 if the step must be skipped. In
            decoupled mode G was known before, and it is 1.

        Collectives: one SUM and one MAX over ``dp_cp`` on the last stage, then one broadcast over ``pp``. Host
        synchronisations: one, shared with all that is read of the step.

        Raises:
            StepError: on every rank alike, if the micro-batches of all ranks are not those of the mini-batch in the
                plan, each of them once. They are kept until ``reset_step``.
        """
        nothing = self._no_counts(device or group_device(self.groups.pp))
        header = broadcast_record(self.open_step.header(nothing, self.groups), self.groups.pp)
        measures: Any = header.counts.header
        result = StepResult(
            config=self.config,
            header=measures,
            loss=self.loss,
            allow_zero_log_probs=self._setup.allow_zero_log_probs,
            step=header,
        )
        check_step(result.step_on_host)

        if self.open_step.step is not None:
            self.open_step.step.plan.progress.steps_ended += 1
        self._last = result
        self._since_plan.append(result)
        self.open_step.reset()
        return result.factor

    def reset_step(self) -> None:
        """Forget the micro-batches since the last step, on every rank, before a failed schedule is run again.

        The gradients must be zeroed too.
        """
        self.open_step.reset()

    @property
    def step(self) -> StepResult | None:
        """The result of the step that ``finish_step`` ended last: call its ``check()`` before the optimizer's step.

        None before the first step, and in decoupled mode, because the plan knows it all. StepError as for
        ``loss_metrics()``.
        """
        has_begun = self._last is not None or self.open_step.num_micro_batches > 0
        return self._last_step("step") if self.corrects_in_loss and has_begun else None

    @property
    def scales_gradients(self) -> bool:
        """Whether ``finish_step`` can return anything but 1 for a step that is made: G is known only after it."""
        return denominator_is_unknown(self.config, self.loss, one_pass=self._setup.one_pass)

    def loss_metrics(self) -> dict[str, float]:
        """Metrics of the loss of the step that ``finish_step`` ended last, equal on all ranks.

        Raises:
            StepError: no step has ended yet, or micro-batches were counted that no ``finish_step`` has ended.
        """
        return self._last_step("loss_metrics()").loss_metrics()

    def metrics(self) -> dict[str, float]:
        """Metrics over all steps since the newest plan, in the loss; each step has another π_θ."""
        if not self.corrects_in_loss or not self._since_plan:
            return {}
        header = merged([step.header for step in self._since_plan])
        metrics = TrainingResult(config=self.config, header=header, loss=self.loss).metrics()
        prefix = self.config.metric_prefix
        if self.config.may_weigh_nothing:
            # Of several steps together that is not known: one of them may have weights.
            num_weightless = sum(step.num_weightless for step in self._since_plan)
            metrics[f"{prefix}rollout_is_weightless_mini_batches"] = num_weightless
        metrics[f"{prefix}mixed_policies"] = float(len(self._since_plan))
        return metrics

    def _last_step(self, name: str) -> StepResult:
        """The step that ended last, for a user's call of this name; StepError if none did, or another one is open."""
        if self._last is None or self.open_step.num_micro_batches:
            raise StepError(
                f"{name} before finish_step(): end every step, as wrap_finalize(correction) does as the "
                "finalize_model_grads_func of Megatron's config"
            )
        return self._last

    def _no_counts(self, device: torch.device) -> StepCounts[Tensor]:
        """The counts of a rank without a micro-batch, in the form that those of all ranks have."""
        header = None
        if self.corrects_in_loss:
            header = empty_header(self.config, self.open_step.agreed.one_step, device)
        return StepCounts.nothing(header, device)
