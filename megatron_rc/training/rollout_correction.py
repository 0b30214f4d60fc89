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
    """The correction for a trainer that runs Megatron's schedule.

    It works in one of two ways:

    - *Decoupled.* ``plan``, called before the schedule, decides weights, accepted tokens and denominators.
    - *In the loss*, with ``bypass_mode``, ``one_pass`` or ``proximal_interpolation``: ``plan`` only counts the trained
      tokens, and ``in_loss`` corrects each micro-batch inside the schedule, because the correction depends on π_θ.

    In both, ``plan.loss_scale`` gives the losses of an optimizer step their common factors, and ``finish_step`` ends
    the step.

    Args:
        config: the correction.
        groups: the last pipeline stage reduces over ``cp`` (or the groups of the layouts) and ``dp_cp``, and broadcasts
            the results, the header, to the other stages over ``pp``.
        loss: the objective: its aggregation decides the denominators.
        has_auxiliary_losses: the model adds losses of its own to the gradients (MoE balancing or z losses, multi-token
            prediction).
        one_pass: decoupled mode without a forward-only pass: the detached log π_θ of the loss is log π_old. This is
            exact only for the first optimizer step of a rollout batch, so a plan allows no second step.
        allow_zero_log_probs: as in :func:`correct_rollouts`.
        compile: as in :func:`correct_rollouts`.

    Raises:
        ValueError: settings with which the loss would not be exact; the message names them and the remedy.
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
        """Make the plan of a rollout batch, on all pipeline stages. Plans that were made before stay valid.

        The numbers must be equal on every rank; :func:`correct_rollouts` has the same ones.

        Args:
            inputs: a PlanInputs with this rank's part of the rollout batch; None on the pipeline stages before the
                last, which have no log-probs. If the correction is made in the loss, ``train_log_probs`` must be None.
            num_mini_batches: number of optimizer steps that share the batch.
            num_groups: number of prompts of the whole batch; needed by criteria that test prompts.
            current_version: version of the trainer's weights, for the staleness of tokens.
            max_staleness: metrics by staleness have one entry for all tokens that are this stale or more.
            device: for the plan's numbers if ``inputs`` is None. Default: the GPU if the backend of ``groups.pp`` is
                nccl.

        Returns:
            Decoupled: a plan with all results; stages without log-probs have the numbers, but None for weights and
            mask. In the loss: a plan with the denominators under the response mask; only the last stage knows them.

        Collectives: decoupled, those of :func:`correct_rollouts` on the last stage, then one broadcast over ``pp``. In
        the loss, one SUM over ``cp`` and one SUM over ``dp_cp``, on the last stage.

        Raises:
            ValueError: shapes or ids that do not fit, or ``train_log_probs`` for a correction in the loss, which would
                ignore them. The result's ``check()`` reports bad data.
        """
        counts = AgreedCounts(
            num_mini_batches=num_mini_batches,
            num_groups=num_groups,
            current_version=current_version,
            max_staleness=max_staleness,
        )
        # Every stage can make these checks: they come before a stage waits for another one.
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
        """Correct one micro-batch from π_θ, inside the loss.

        Unless gradients are switched off, the call also counts the micro-batch for the open optimizer step.

        Args:
            log_probs: log π_θ, of the layout's local shape, nats; only the values are used, not the gradient.
            rollout_log_probs: log π_rollout, like ``log_probs``.
            response_mask: bool, like ``log_probs``, True for trained tokens.
            layout: which tokens these are. Default: padded, rows of ``log_probs``.
            advantages: [n], or like ``log_probs``; the criterion ``opsm`` needs them.
            sequence_ids: [n], the ids of these sequences in the plan's inputs, if those had ids: ``finish_step``
                recognises the sequences by them, and error messages name them. Default: sequences are numbered from the
                beginning of the step.
            policy_versions: as in :func:`correct_rollouts`; needed if the plan has a ``current_version``, else not
                used.
            rewards: as in :func:`correct_rollouts`; used with ``one_pass`` alone, for metrics by reward.
            turn_ids: the turn of each token. Default: each run of trained tokens is one turn.
            mini_batch: index, in the newest plan, of the mini-batch of this optimizer step: the same for all
                micro-batches until ``finish_step``. May be left out if the plan has a single one.

        Collectives: those of :func:`correct_rollouts` over ``cp``.

        Raises:
            ValueError: shapes that do not fit, or no ``mini_batch`` although the plan has several.
            StepError: decoupled mode, no ``plan`` before, or another ``mini_batch`` than in the calls before
                ``finish_step``.
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
        """Return the correction of a micro-batch; ValueError if another RolloutCorrection planned the step."""
        if step.plan.open_step is not self.open_step:
            raise ValueError("scale: it is from the plan of another correction: take it from this one's plan()")
        return step.plan.corrected(micro_batch, log_probs)

    @torch.no_grad()
    def finish_step(self, device: torch.device | None = None) -> Tensor:
        """End one optimizer step, on every pipeline stage: reduce its counts, and compare them with the plan.

        Args:
            device: for the result on stages without log-probs. Default: as for :meth:`plan`.

        Returns:
            0-D float64: the factor by which the caller must multiply the gradients. In decoupled mode it is 1. If the
            correction is made in the loss, the losses were divided by D₀, the denominator under the response mask, and
            the factor is D₀/G, with the final denominator G; or 0 if the step must be skipped.

        Collectives: one SUM and one MAX over ``dp_cp`` on the last stage, then one broadcast over ``pp``. Host
        synchronisations: one; the metrics and checks of the step need no other.

        Raises:
            StepError: on every rank alike, if the micro-batches that all ranks have counted are not exactly those of
                the plan's mini-batch. They stay counted until ``reset_step``.
        """
        counts_of_idle_rank = self._no_counts(device or group_device(self.groups.pp))
        header = broadcast_record(self.open_step.header(counts_of_idle_rank, self.groups), self.groups.pp)
        batch_header: Any = header.counts.header
        result = StepResult(
            config=self.config,
            header=batch_header,
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
        """The result of the step that ``finish_step`` ended last; call its ``check()`` before the optimizer's step.

        None before the first step, and always in decoupled mode, where the plan has these results. StepError as for
        ``loss_metrics()``.
        """
        has_begun = self._last is not None or self.open_step.num_micro_batches > 0
        return self._last_step("step") if self.corrects_in_loss and has_begun else None

    @property
    def scales_gradients(self) -> bool:
        """True if ``finish_step`` may return a factor other than 1 and 0, because G is known only after the losses."""
        return denominator_is_unknown(self.config, self.loss, one_pass=self._setup.one_pass)

    def loss_metrics(self) -> dict[str, float]:
        """Metrics of the loss of the step that ``finish_step`` ended last, equal on all ranks.

        Raises:
            StepError: no step has ended yet, or micro-batches were counted since the last step ended.
        """
        return self._last_step("loss_metrics()").loss_metrics()

    def metrics(self) -> dict[str, float]:
        """Metrics over all steps since the newest plan, for a correction in the loss; {} in decoupled mode.

        Each of the steps has another π_θ: ``mixed_policies`` is their number.
        """
        if not self.corrects_in_loss or not self._since_plan:
            return {}
        header = merged([step.header for step in self._since_plan])
        metrics = TrainingResult(config=self.config, header=header, loss=self.loss).metrics()
        prefix = self.config.metric_prefix
        if self.config.may_weigh_nothing:
            # Added up over the steps: the merged header does not show a step without weights among others with some.
            num_weightless = sum(step.num_weightless for step in self._since_plan)
            metrics[f"{prefix}rollout_is_weightless_mini_batches"] = num_weightless
        metrics[f"{prefix}mixed_policies"] = float(len(self._since_plan))
        return metrics

    def _last_step(self, name: str) -> StepResult:
        """Return the step that ended last; StepError, with the ``name`` of the call, if none did or one is open."""
        if self._last is None or self.open_step.num_micro_batches:
            raise StepError(
                f"{name} before finish_step(): end every step, as wrap_finalize(correction) does as the "
                "finalize_model_grads_func of Megatron's config"
            )
        return self._last

    def _no_counts(self, device: torch.device) -> StepCounts[Tensor]:
        """Return the counts of a rank without a micro-batch: zeros, with the shapes that all other ranks have."""
        header = None
        if self.corrects_in_loss:
            header = empty_header(self.config, self.open_step.agreed.one_step, device)
        return StepCounts.nothing(header, device)
