"""The policy's trainer: for a rollout batch the forward-only pass, the plan, and the optimizer steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from megatron_rc.attribution import Attribution
from megatron_rc.batch.chain import CorrectionResult
from megatron_rc.launch import phases
from megatron_rc.launch.rollouts.open_rollouts import OpenRollouts
from megatron_rc.launch.rollouts.sampler import TeacherInput
from megatron_rc.launch.rollouts.samples import dropped, without_overlong
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.passes import is_one_pass
from megatron_rc.launch.training.accepted import AcceptedResponses, CountingCorrection
from megatron_rc.launch.training.attribution import attribute_batch, rounded_weights
from megatron_rc.launch.training.batches.advantages import Advantages, Estimated, Scores
from megatron_rc.launch.training.batches.micro_batches import LocalBatch, LocalTokens, cut_batch
from megatron_rc.launch.training.batches.reward_scaling import RewardScaler
from megatron_rc.launch.training.checkpoints.contents import Kept
from megatron_rc.launch.training.checkpoints.host_weights import Reference, SamplingWeights
from megatron_rc.launch.training.checkpoints.load import load_checkpoint, reference_reader, start_from
from megatron_rc.launch.training.checkpoints.save import CheckpointWriter
from megatron_rc.launch.training.checks.batch_check import BatchCheck
from megatron_rc.launch.training.checks.replay_check import ReplayCheck
from megatron_rc.launch.training.checks.step_checks import LeftOut, StepChecks, telling_bad_steps
from megatron_rc.launch.training.critic import Critic, PreparedValues
from megatron_rc.launch.training.models.build import build_chunks, transformer_config
from megatron_rc.launch.training.models.offload import Offload, tensors_of_optimizer
from megatron_rc.launch.training.models.passes import ModelPasses, Scoring
from megatron_rc.launch.training.models.routing_replay import RoutingReplay
from megatron_rc.launch.training.models.trained_model import TrainedModel
from megatron_rc.launch.training.teachers import Teachers
from megatron_rc.loss.objectives import objective_of
from megatron_rc.measures.histogram import Distribution
from megatron_rc.parallel import ParallelGroups
from megatron_rc.parallel.groups import group_rank
from megatron_rc.records.rollout import RolloutBatch
from megatron_rc.training.plan import LossScale, Plan
from megatron_rc.training.schedule import masked_loss, wrap_finalize


@dataclass(frozen=True)
class PreparedBatch:
    """A rollout batch that is ready for its optimizer steps."""

    batch: LocalBatch  # this rank's tokens
    plan: Plan  # plan of the correction
    scores: Scores | None  # inputs of the estimator of advantages; None on stages before the last
    estimated: Estimated | None  # the advantages; None on stages before the last
    values: PreparedValues | None = None  # the batch as the critic's steps need it; None without a critic
    without_signal: frozenset[int] = frozenset()  # mini-batches whose policy gradient is exactly 0, equal on all ranks


class Outcome(Enum):
    """What became of the policy's optimizer step."""

    MADE = "made"
    CRITIC_ONLY = "critic only"  # the critic alone learns in the first steps of the run
    NOT_ACCEPTED = "not accepted"  # no token was accepted, or none had a weight
    WITHOUT_SIGNAL = "without signal"  # every advantage was 0, so that the gradient would have been 0
    OVERFLOW = "overflow"  # gradients in float16 overflowed
    BAD = "bad"  # ``--bad-steps skip`` left it out


@dataclass(frozen=True)
class StepResult:
    """Result of an optimizer step that was made or left out, equal on all ranks."""

    metrics: dict[str, float]
    outcome: Outcome
    # For each response of the mini-batch, replica after replica, whether one of its tokens is accepted with a weight
    # other than 0. None: the step was left out before that counted.
    accepted: list[bool] | None = None


class Trainer(TrainedModel):
    """The policy on this rank, with its optimizer, reference, teachers, critic and correction.

    Attributes:
        iteration: number of optimizer steps; it and ``left_out`` count those before a loaded checkpoint too.
        loaded_from: folder of the checkpoint that the run began with; None: it began without one.
        sampling_weights: weights of the rollouts that are being sampled, kept for checkpoints.
        open_rollouts: their responses so far, kept for checkpoints; None without ``--rl-partial-rollouts``.
        routing_metrics: k3 of the newest rollout batch with and without routing replay; empty unless it was measured.
        replay_check: check of the replayed experts; None unless the rollouts' experts are replayed.
        kept_log_probs: log π_θ of each micro-batch of the last step if ``keeps_log_probs`` is set; empty on stages
            before the last.
    """

    def __init__(self, config: RunConfig, groups: ParallelGroups) -> None:
        self.config = config
        self.groups = groups
        transformer = transformer_config(config)
        chunks = build_chunks(config, transformer)
        if config.checkpoints.load_hf:
            start_from(config.checkpoints.load_hf, "--load-hf", config, groups, chunks)
        super().__init__(config, ModelPasses(config, groups), chunks)
        self.device = next(chunks[0].parameters()).device
        self.correction = _correction(config, groups)
        self.replay = RoutingReplay(config, groups, chunks) if config.routing else None
        self.replay_check = ReplayCheck(config, groups) if config.replays_rollouts else None
        transformer.finalize_model_grads_func = wrap_finalize(self.correction)
        self.checks = StepChecks(config)
        self.batch_check = BatchCheck(config, groups)
        # Megatron's optimizer calls get_grad_norm before it changes a weight.
        self._gradient_norm = self.optimizer.get_grad_norm
        self.optimizer.get_grad_norm = self._checked_gradient_norm
        reader = reference_reader(config, groups)
        self.reference = Reference(config, self.chunks, reader) if config.needs_reference else None
        self.teachers = Teachers(config, config.distillation, groups) if config.distillation else None
        self.advantages = Advantages(config, groups)
        self.rewards = RewardScaler(config.advantages, groups.dp)
        self.sampling_weights = SamplingWeights(config, self.chunks)
        self.writer = CheckpointWriter(config)
        self.open_rollouts = None
        if config.engine.rl_partial_rollouts:
            replica = group_rank(groups.dp) if groups.is_first_of_replica else None
            self.open_rollouts = OpenRollouts(config, replica)
        self.critic = Critic(config, config.critic, groups, self.passes) if config.critic else None
        self.iteration = 0
        self.left_out = LeftOut()
        self._scored_at = -1
        self.loaded_from: Path | None = None
        self.keeps_log_probs = False
        self.kept_log_probs: list[Tensor] = []
        self._accepted: list[bool] | None = None
        self._accepted_responses = AcceptedResponses(config, groups)
        self._accepted_numbers: list[float] = []
        self.routing_metrics: dict[str, float] = {}
        model = self.model
        optimizer = self.optimizer
        self._offload = Offload(lambda: tensors_of_optimizer(optimizer, model))
        self._start(chunks)

    def _start(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Start the critic from the policy, and load ``--load``."""
        files = self.config.checkpoints
        with self._all_here():
            if self.critic is not None:
                self.critic.start_from(chunks)
            if files.load:
                self.iteration, self.loaded_from = load_checkpoint(files.load, self.config, self._kept)
                if self.critic is not None and files.finetune:
                    self.critic.start_from(chunks)

    def save(self) -> None:
        """Write a checkpoint to ``--save``; with ``--async-save`` start to, and ``writer`` finishes it."""
        self.gather_weights()
        # A save in the background works on copies, which are made here.
        with self._all_here():
            if self.critic is not None:
                self.critic.gather_weights()
            self.writer.save(self.iteration, self._kept)

    @contextmanager
    def optimizer_here(self) -> Iterator[None]:
        """Context with the optimizer's state on the device in spite of ``--optimizer-offload``. Must not be nested."""
        with self._offload.here() if self.config.training.optimizer_offload else nullcontext():
            yield

    @contextmanager
    def _all_here(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self.optimizer_here())
            if self.critic is not None:
                stack.enter_context(self.critic.here())
            yield

    @property
    def _kept(self) -> Kept:
        return Kept(
            policy=self,
            critic=self.critic,
            reference=self.reference,
            sampling=self.sampling_weights,
            open_rollouts=self.open_rollouts,
            rewards=self.rewards,
            left_out=self.left_out,
        )

    @property
    def version(self) -> int | None:
        """Version of the current weights; None if the rollouts' versions count the steps of another run."""
        return self.iteration if self.config.rollouts.knows_versions else None

    @property
    def _steps(self) -> int:
        """Number of steps that changed the weights."""
        return self.iteration - self.left_out.steps

    def score(self, batch: LocalBatch, temperature: float | None = None) -> Tensor | None:
        """Log-probs of the labels, like the tokens, by a forward-only pass; None on stages before the last.

        ``temperature``: temperature of the distribution; default: the rollouts' temperature.
        """
        self.gather_weights()
        scored = self.passes.score(self.model, batch, temperature, replay=self.replay)
        return None if scored is None else scored.log_probs

    def prepare(
        self, batch: RolloutBatch, baselines: Tensor | None = None, teacher_input: TeacherInput | None = None
    ) -> PreparedBatch:
        """Prepare a whole rollout batch: advantages, micro-batches and the plan of the correction.

        A forward-only pass gives log π_old, unless the update's own pass does (``corrects_in_loss``). A KL
        penalty, in the loss or in the rewards, needs another pass for log π_ref.

        Args:
            batch: the replica's records.
            baselines: [rows], rewards of each prompt's greedy response, for ``--advantage-estimator remax``.
            teacher_input: as in SampledBatch.

        Raises:
            BadStepError: on every rank, if any has an unusable log-prob at a trained position.
            RunError: the replayed experts are not the rollouts'.
        """
        phases.enter(f"the scoring of step {self.iteration + 1}")
        if self.config.rewards.overlong == "mask":
            batch = without_overlong(batch)
        cut = cut_batch(batch, self.config, self.groups)
        self._scored_at = self._steps
        settings = self.config.advantages
        old = None
        squares = None
        if not self.correction.corrects_in_loss:
            self.gather_weights()
            scored = self.passes.score(self.model, cut, squares=settings.needs_squares, replay=self.replay)
            old, squares = scored or (None, None)
        self.batch_check.begin(self.iteration, old, cut.local)
        self.routing_metrics = self._check_replay(cut, old)
        ref = self._score_reference(cut)
        if self.teachers is not None:
            cut = self.teachers.scored(batch, cut, teacher_input)
        values = self.critic.score(cut) if self.critic else None
        rewards = self.rewards(batch.rewards, ~dropped(batch))
        baselines = None if baselines is None else self.rewards.scaled(baselines)
        scores = None
        estimated = None
        if self.groups.is_last_stage:
            scores = Scores(
                batch=batch,
                rewards=rewards,
                turn_scale=self.rewards.scale,
                cut=cut,
                old=old,
                squares=squares,
                ref=ref,
                values=values,
                baselines=baselines,
            )
            # The criterion opsm needs the signs of the advantages before the plan. Estimators that need the correction
            # estimate again below, when it is known.
            estimated = self.advantages.of(scores)
            cut = cut.with_advantages(estimated.advantages)

        # The plan's metrics are told apart by the sign of the reward as it was given, before any scaling.
        local = dataclasses.replace(cut.local, train_log_probs=old, ref_log_probs=ref, rewards=cut.sides(batch.rewards))
        plan = self._plan(batch, dataclasses.replace(cut, local=local))
        cut = dataclasses.replace(cut, local=_corrected(local, plan))
        # Some estimators count accepted tokens alone, or take the weights, which are known now.
        if scores is not None and settings.needs_the_correction:
            accepted = cut.local.mask if settings.advantage_scope == "accepted" else None
            estimated = self.advantages.of(scores, accepted, cut.local.weights)
            cut = cut.with_advantages(estimated.advantages)
        returns = estimated.returns if estimated else None
        prepared_values = self.critic.prepare(cut, values, returns) if self.critic else None
        return PreparedBatch(batch=cut, plan=plan, scores=scores, estimated=estimated, values=prepared_values)

    @property
    def is_attribution_due(self) -> bool:
        """Whether ``--attribution-interval`` asks for the attribution of the batch that the next step begins."""
        interval = self.config.logging.attribution_interval
        return interval is not None and self.iteration % interval < self.config.updates_per_rollout

    def attribution(self, prepared: PreparedBatch) -> Attribution:
        """Attribution of the mismatch to the policy's parameters, equal on all ranks.

        Call it before the first update on the batch: the trainer still has the weights that the engine got.
        """
        logging = self.config.logging
        local = prepared.batch.local
        phases.enter(f"the attribution of step {self.iteration + 1}")
        self.gather_weights()
        train = self.score(prepared.batch) if self.correction.corrects_in_loss else local.train_log_probs
        return attribute_batch(
            self.model,
            self.passes,
            prepared.batch,
            train,
            rounded_weights(self.model, self.config.engine.rollout_dtype),
            replay=self.replay,
            nodes=logging.attribution_nodes,
            check=logging.attribution_check,
        )

    def _check_replay(self, cut: LocalBatch, old: Tensor | None) -> dict[str, float]:
        """Metrics of :meth:`ReplayCheck.measure` if the batch is due; empty if not.

        Collectives, if it is: one or two forward-only passes, and those of :meth:`ReplayCheck.measure`.
        """
        if self.replay_check is None or not self.replay_check.is_due(self.iteration):
            return {}
        # ``old`` is None on stages before the last as well, so it cannot say whether a pass was made.
        replayed = self.score(cut) if self.correction.corrects_in_loss else old
        scored = self.passes.score(self.model, cut)
        unreplayed = None if scored is None else scored.log_probs
        return self.replay_check.measure(self.iteration, cut.local, replayed, unreplayed)

    def _score_reference(self, batch: LocalBatch) -> Tensor | None:
        """Log-probs of the labels under the reference policy, after a refresh of its weights if one is due."""
        if self.reference is None:
            return None
        chunks = self.chunks
        self.reference.refresh(chunks, self.iteration)
        with self.reference.in_place_of(chunks):
            scored = self.passes.score(self.model, batch)
            return None if scored is None else scored.log_probs

    def _plan(self, batch: RolloutBatch, cut: LocalBatch) -> Plan:
        """Checked plan of the correction."""
        plan = self.correction.plan(
            self._plan_inputs(batch, cut) if self.groups.is_last_stage else None,
            num_mini_batches=len(cut.cuts),
            num_groups=None if self.correction.corrects_in_loss else self.config.rollouts.grpo_prompts_per_step,
            current_version=self.version,
            max_staleness=self.config.rollouts.rollout_staleness or 0,
            device=self.device,
        )
        with telling_bad_steps():
            plan.check()
        return plan

    def _plan_inputs(self, batch: RolloutBatch, cut: LocalBatch) -> LocalTokens:
        """The local tokens with all fields that the plan needs."""
        return dataclasses.replace(
            cut.local,
            group_ids=None if self.correction.corrects_in_loss else cut.sides(batch.group_ids),
            policy_versions=cut.local.policy_versions if self.config.rollouts.knows_versions else None,
            mini_batch_ids=cut.mini_batch_ids,
        )

    def update(self, prepared: PreparedBatch, mini_batch: int) -> StepResult:
        """Make one optimizer step of the policy, and of the critic if there is one.

        Without an accepted token, without a signal, or with ``--fp16`` gradients that overflow, the policy's step is
        skipped on all ranks; after an overflow Megatron lowers the loss scale. The critic's step is still made.

        Raises:
            BadStepError: on every rank, if the loss or the gradient norm is not finite, or the correction in the loss
                finds an unusable log-prob at a trained position; no weight has changed.
        """
        phases.enter(f"the training of step {self.iteration + 1}")
        critic = self.critic
        values = None
        if critic is not None and prepared.values is not None:
            values = critic.accumulate(prepared.values, mini_batch, self.iteration + 1)
        result = self._update_policy(prepared, mini_batch)
        if critic is None or values is None:
            return result
        # Step the critic last, so that a bad step of the policy changes neither model.
        return dataclasses.replace(result, metrics=result.metrics | values | critic.step())

    def _update_policy(self, prepared: PreparedBatch, mini_batch: int) -> StepResult:
        """Make the policy's step, unless one of five reasons, checked as soon as each is known, leaves it out."""
        critic = self.config.critic
        # 1. The critic alone learns in the first steps of the run.
        if critic is not None and self.iteration < critic.num_critic_only_steps:
            self.iteration += 1
            return StepResult(self._end_metrics(), Outcome.CRITIC_ONLY)
        # 2. The plan accepts no token.
        if prepared.plan.skips(mini_batch):
            return self.skip(Outcome.NOT_ACCEPTED)
        # 3. Every advantage is 0, so that the gradient would be 0.
        if mini_batch in prepared.without_signal:
            return self.skip(Outcome.WITHOUT_SIGNAL)
        is_first = self._steps == self._scored_at
        metrics = self.accumulate(prepared, mini_batch)
        # 4. The correction in the loss accepts no token.
        if metrics is None:
            return self.skip(Outcome.NOT_ACCEPTED, self._step_metrics())
        if self.config.loss.distils:
            # Named by its kind: those of two runs can be compared only if they are of one.
            kind = self.config.loss.distillation_kind
            metrics[f"distillation/{kind}"] = metrics.pop("policy/divergence")
        self._accepted_numbers = self._accepted_responses.numbers(
            prepared.batch, mini_batch, self.correction.num_training_tokens
        )
        if is_first and not self.correction.corrects_in_loss:
            # Both passes have equal weights, so that only their arithmetic differs.
            metrics["policy/noise_floor"] = metrics["policy/abs_log_ratio"]
        correction = self._correction_of(prepared)
        factor = 1.0
        if self.config.schedule.lr_ess_scaling and correction is not None:
            metrics["lr_ess"] = correction.sequence_eff_sample_size
            factor = self.config.schedule.ess_factor(metrics["lr_ess"])
            metrics["lr_ess_factor"] = factor
        learning_rate = self.learning_rate * factor
        self._accepted = None  # the check of the gradient norm sets it
        with self.optimizer_here():
            grad_norm = self.optimizer_step(factor)
        if self.config.compute.fp16:
            metrics["loss_scale"] = float(self.optimizer.get_loss_scale())
        # 5. Gradients in float16 overflow.
        if grad_norm is None:
            return self.skip(Outcome.OVERFLOW, metrics)
        self.iteration += 1
        metrics |= {"grad_norm": grad_norm} | self._end_metrics() | {"lr": learning_rate}
        return StepResult(metrics, Outcome.MADE, self._accepted)

    def skip(self, outcome: Outcome, metrics: Mapping[str, float] = MappingProxyType({})) -> StepResult:
        """Leave a step out; weights, optimizer and learning rate stay. ``metrics``: those that the step has so far."""
        self.iteration += 1
        self.left_out.steps += 1
        self.left_out.bad += outcome is Outcome.BAD
        self.left_out.without_signal += outcome is Outcome.WITHOUT_SIGNAL
        accepted = None
        if outcome is Outcome.NOT_ACCEPTED:
            accepted = [False] * self.config.training.global_batch_size
        return StepResult({**metrics, **self._end_metrics()}, outcome, accepted)

    def _end_metrics(self) -> dict[str, float]:
        """Metrics of every step, made or left out."""
        left = self.left_out
        counts = {"skipped_steps": left.steps, "bad_steps": left.bad, "steps_without_signal": left.without_signal}
        return {"lr": self.learning_rate} | {name: float(count) for name, count in counts.items()}

    def accumulate(self, prepared: PreparedBatch, mini_batch: int) -> dict[str, float] | None:
        """Compute the final gradients of one mini-batch, which the plan does not skip; makes no optimizer step.

        Returns:
            Metrics of the loss and of a correction in the loss, equal on all ranks. None if the correction in the loss
            accepts no token, so that the step must not be made.

        Raises:
            BadStepError: see :meth:`update`.
        """
        self.kept_log_probs = []
        self.clear_gradients()
        self.correction.num_training_tokens = []
        cuts = prepared.batch.cuts[mini_batch]
        scale = prepared.plan.loss_scale(
            mini_batch,
            num_microbatches=len(cuts),
            calculate_per_token_loss=self.config.compute.calculate_per_token_loss,
            local_tokens=math.prod(cuts[0].layout.shape),
            total_tokens=prepared.batch.total_tokens[mini_batch],
        )
        function = partial(self._loss, scale)
        teacher = self.teachers.of_micro_batch if self.teachers and self.config.loss.distils else None
        self.passes.run(
            self.model, prepared.batch, cuts, function, scoring=Scoring(), replay=self.replay, teacher=teacher
        )
        routing = {} if self.replay is None else self.replay.metrics()
        if self.replay_check is not None:
            self.replay_check.hear_unknown(routing["routing/unknown"])
        if self.correction.step is not None:
            with telling_bad_steps():
                self.correction.step.check()
            if self.correction.step.skips():
                return None
        metrics = self._step_metrics() | self.correction.loss_metrics() | routing
        self.checks.loss(self.iteration + 1, metrics["loss/total"])
        loss = self.correction.loss
        if loss.dual_clip is None and objective_of(str(loss.algorithm)).default_dual_clip is None:
            del metrics["policy/dual_clip_fraction"]
        if self.reference is None:
            del metrics["policy/reference_kl"]
        if not loss.distils:
            del metrics["policy/divergence"]
        return metrics

    def distributions(self, prepared: PreparedBatch) -> dict[str, Distribution]:
        """Histograms of log ρ and of the weights, equal on all ranks.

        They cover the rollout batch; if the correction is made in the loss, the last step.
        """
        correction = self._correction_of(prepared)
        return {} if correction is None else correction.distributions()

    def _correction_of(self, prepared: PreparedBatch) -> CorrectionResult | None:
        """The correction of the rollout batch; if it is made in the loss, of the step that ended last, if any."""
        correction = self.correction.step if self.correction.corrects_in_loss else prepared.plan
        return correction if isinstance(correction, CorrectionResult) else None

    def _loss(
        self, scale: LossScale, model: torch.nn.Module, local: LocalTokens, output: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Loss of a micro-batch on the last stage; local arithmetic, because ``scale`` has all global factors."""
        log_probs, entropy, *divergence = output
        if self.keeps_log_probs:
            self.kept_log_probs.append(log_probs.detach())
        if self.batch_check.is_open and self._steps == self._scored_at:
            self.batch_check.add(log_probs, local)
        return masked_loss(
            self.correction, local, log_probs, entropy, scale, divergence=divergence[0] if divergence else None
        )

    def _checked_gradient_norm(self) -> float:
        norm = float(self._gradient_norm())
        numbers = self._accepted_numbers
        shared = self.checks.gradient(self.iteration + 1, norm, [*numbers, *self.batch_check.numbers])
        self._accepted = [number > 0 for number in shared[: len(numbers)]]
        self.batch_check.hear(shared[len(numbers) :])
        return norm

    def _step_metrics(self) -> dict[str, float]:
        """Metrics of a correction in the loss, which belong to one step."""
        return {} if self.correction.step is None else self.correction.step.metrics()


def _correction(config: RunConfig, groups: ParallelGroups) -> CountingCorrection:
    return CountingCorrection(
        config.correction,
        groups,
        loss=config.loss,
        has_auxiliary_losses=config.has_auxiliary_losses,
        one_pass=is_one_pass(config),
        # A token that was sampled from itself alone has log-prob 0; the reader of records has checked them.
        allow_zero_log_probs=config.rollouts.allow_truncated_sampling or config.rollouts.replays_sampling,
    )


def _corrected(local: LocalTokens, plan: Plan) -> LocalTokens:
    """The tokens with the plan's weights, mask and lengths, if the plan knows them."""
    if not isinstance(plan, CorrectionResult):
        return local
    if isinstance(plan.mask, list) or isinstance(plan.weights, list):
        raise TypeError("the trainer corrects a whole rollout batch at once")
    return dataclasses.replace(local, weights=plan.weights, mask=plan.mask, sequence_lengths=plan.sequence_lengths)
