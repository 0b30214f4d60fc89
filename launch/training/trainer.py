"""One rollout batch through Megatron's schedule: the forward-only pass, the plan, and the optimizer steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_rc.batch.result import CorrectionResult
from megatron_rc.launch import phases
from megatron_rc.launch.rollouts.samples import dropped, without_overlong
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.megatron_configs import build_transformer_config
from megatron_rc.launch.run_config.passes import is_one_pass
from megatron_rc.launch.training.advantages import Advantages, Estimated, Scores
from megatron_rc.launch.training.batch_check import BatchCheck
from megatron_rc.launch.training.checkpoints.kept import Kept
from megatron_rc.launch.training.checkpoints.load import load_checkpoint
from megatron_rc.launch.training.checkpoints.reference import Reference
from megatron_rc.launch.training.checkpoints.sampling_weights import SamplingWeights
from megatron_rc.launch.training.checkpoints.save import CheckpointWriter
from megatron_rc.launch.training.critic import Critic, PreparedValues
from megatron_rc.launch.training.left_out import LeftOut
from megatron_rc.launch.training.micro_batches import LocalBatch, LocalTokens, cut_batch
from megatron_rc.launch.training.model import build_chunks
from megatron_rc.launch.training.offload import Offload, tensors_of_optimizer
from megatron_rc.launch.training.passes import ModelPasses
from megatron_rc.launch.training.rewards import RewardScaler
from megatron_rc.launch.training.starting_weights import reference_reader, start_from
from megatron_rc.launch.training.step_checks import StepChecks, telling_bad_steps
from megatron_rc.launch.training.trained_model import TrainedModel
from megatron_rc.measures.histogram import Distribution
from megatron_rc.parallel import ParallelGroups
from megatron_rc.records.rollout import RolloutBatch
from megatron_rc.training.plan import LossScale, Plan
from megatron_rc.training.rollout_correction import RolloutCorrection
from megatron_rc.training.schedule import masked_loss, wrap_finalize


@dataclass(frozen=True)
class PreparedBatch:
    """A rollout batch that is ready for its optimizer steps.

    Attributes:
        batch: this rank's tokens.
        plan: of the correction.
        scores: what the advantages were estimated from; None before the last stage, likewise the next.
        estimated: the advantages.
        values: for the critic's steps, where there is one.
        without_signal: the mini-batches whose policy gradient is exactly 0, equal on all ranks.
    """

    batch: LocalBatch
    plan: Plan
    scores: Scores | None
    estimated: Estimated | None
    values: PreparedValues | None = None
    without_signal: frozenset[int] = frozenset()


class Trainer(TrainedModel):
    """The policy on this rank: model chunks, optimizer, reference, correction.

    Args:
        config: of the run.
        groups: of this rank.

    Attributes:
        iteration: optimizer steps that lie behind, those of a loaded checkpoint included.
        sampling_weights: those of the rollouts under way, kept for checkpoints.
        writer: of checkpoints.
        batch_check: whether the engines sampled the newest rollout batch from the trainer's weights.
        critic: with ``--advantage-estimator gae``; else None.
        left_out: steps that were not made, those before a loaded checkpoint included.
        keeps_log_probs: whether steps keep what their losses computed.
        kept_log_probs: then log π_θ of the last step's micro-batches, in their order; empty before the last stage.
        on_scored: called on every rank once a rollout batch, before the optimizer's first step on it, with tokens whose
            ``train_log_probs`` are those of the weights at the start of the batch (None before the last stage): all
            tokens after a forward-only pass; those of the first step, micro-batch by micro-batch, if the correction is
            made in the loss. None: nothing is called.
    """

    def __init__(self, config: RunConfig, groups: ParallelGroups) -> None:
        self.config, self.groups = config, groups
        transformer = build_transformer_config(config)
        chunks = build_chunks(config, transformer)
        if config.checkpoints.load_hf:
            start_from(config.checkpoints.load_hf, "--load-hf", config, groups, chunks)
        super().__init__(config, ModelPasses(config, groups), chunks)
        self.checks, self.writer = StepChecks(config), CheckpointWriter(config)
        self.batch_check = BatchCheck(config, groups)
        # Megatron asks for it before it changes a weight.
        norm, self.optimizer.get_grad_norm = self.optimizer.get_grad_norm, self._checked_gradient_norm
        self._gradient_norm = norm
        # Of the initial policy.
        reader = reference_reader(config, groups)
        self.reference = Reference(config, self.chunks, reader) if config.needs_reference else None
        self.sampling_weights = SamplingWeights(config, self.chunks)
        self.correction = RolloutCorrection(
            config.correction,
            groups,
            loss=config.loss,
            has_auxiliary_losses=config.has_auxiliary_losses,
            one_pass=is_one_pass(config),
            # Recorded rollouts may be greedy, with log-probs of 0; they were checked when they were read.
            allow_zero_log_probs=config.rollouts.allow_truncated_sampling,
        )
        transformer.finalize_model_grads_func = wrap_finalize(self.correction)
        self.advantages, self.rewards = Advantages(config, groups), RewardScaler(config.advantages, groups.dp)
        self.device = next(chunks[0].parameters()).device
        self.iteration, self.left_out, self._scored_at = 0, LeftOut(), -1
        self.keeps_log_probs, self.kept_log_probs = False, list[Tensor]()
        self.on_scored: Callable[[Sequence[LocalTokens]], None] | None = None
        self.critic = Critic(config, groups, self.passes) if config.critic else None
        model, optimizer = self.model, self.optimizer
        self._offload = Offload(lambda: tensors_of_optimizer(optimizer, model))
        with self._all_here():
            if self.critic is not None:
                self.critic.start_from(chunks)
            if config.checkpoints.load:
                self.iteration = load_checkpoint(config.checkpoints.load, config, self._kept)
                if self.critic is not None and config.checkpoints.finetune:
                    self.critic.start_from(chunks)

    def save(self) -> None:
        """Write a checkpoint to ``--save``, or with ``--async-save`` begin to; ``writer`` knows how it goes on."""
        self.gather_weights()
        # What goes on in the background has copies of its own.
        with self._all_here():
            if self.critic is not None:
                self.critic.gather_weights()
            self.writer.save(self.iteration, self._kept)

    @contextmanager
    def optimizer_here(self) -> Iterator[None]:
        """Inside, with ``--optimizer-offload``, what the optimizer keeps is on the device; not to be nested."""
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
            rewards=self.rewards,
            left_out=self.left_out,
        )

    def score(self, batch: LocalBatch, temperature: float | None = None) -> Tensor | None:
        """Log-probs of the labels, like the tokens, by a forward-only pass; None on stages before the last.

        ``temperature``: of the distribution; default: the one that rollouts are sampled at.
        """
        self.gather_weights()
        return self.passes.score(self.model, batch, temperature)

    def prepare(self, batch: RolloutBatch, baselines: Tensor | None = None) -> PreparedBatch:
        """Advantages, micro-batches and the plan of the correction, for a whole rollout batch.

        A forward-only pass gives log π_old, unless the loss finds it (``RolloutCorrection.corrects_in_loss``). A KL
        penalty, in the loss or in the rewards, makes one for log π_ref.

        Args:
            batch: the records of this replica.
            baselines: [rows], the reward of each prompt's greedy response, for the estimator that needs them.

        Raises:
            BadStepError: on every rank, if a log-prob at a trained position is unusable on any.
        """
        phases.enter(f"the scoring of step {self.iteration + 1}")
        if self.config.rewards.overlong == "mask":
            batch = without_overlong(batch)
        cut = cut_batch(batch, self.config, self.groups)
        self._scored_at = self._steps
        in_loss = self.correction.corrects_in_loss
        old = None if in_loss else self.score(cut)
        self.batch_check.begin(self.iteration, old, cut.local)
        ref = self._score_reference(cut)
        values = self.critic.score(cut) if self.critic else None
        rewards = self.rewards(batch.rewards, ~dropped(batch))
        baselines = None if baselines is None else self.rewards.scaled(baselines)
        scores = estimated = None
        if self.groups.is_last_stage:
            scores = Scores(batch=batch, rewards=rewards, cut=cut, old=old, ref=ref, values=values, baselines=baselines)
            estimated = self.advantages.of(scores)
            cut = cut.with_advantages(estimated.advantages)
        plan = self.correction.plan(
            self._plan_inputs(batch, cut, old) if self.groups.is_last_stage else None,
            num_mini_batches=len(cut.cuts),
            num_groups=None if in_loss else self.config.rollouts.grpo_prompts_per_step,
            current_version=self.version,
            max_staleness=self.config.rollouts.rollout_staleness or 0,
            device=self.device,
        )
        with telling_bad_steps():
            plan.check()
        local = dataclasses.replace(cut.local, train_log_probs=old, ref_log_probs=ref, rewards=cut.sides(batch.rewards))
        if isinstance(plan, CorrectionResult):
            if isinstance(plan.mask, list) or isinstance(plan.weights, list):
                raise TypeError("the trainer corrects a whole rollout batch at once")
            local = dataclasses.replace(
                local, weights=plan.weights, mask=plan.mask, sequence_lengths=plan.sequence_lengths
            )
        cut = dataclasses.replace(cut, local=local)
        if self.on_scored is not None and not in_loss:
            self.on_scored([local])
        if scores is not None and self.config.advantages.advantage_scope == "accepted":
            estimated = self.advantages.of(scores, accepted=local.mask)
            cut = cut.with_advantages(estimated.advantages)
        returns = estimated.returns if estimated else None
        to_learn = self.critic.prepare(cut, values, returns) if self.critic else None
        return PreparedBatch(cut, plan, scores, estimated, to_learn)

    def update(self, prepared: PreparedBatch, mini_batch: int) -> dict[str, float]:
        """One optimizer step on one mini-batch of a rollout batch.

        A mini-batch without an accepted token is skipped on all ranks alike: the optimizer is not touched. So is, with
        --fp16, a step whose scaled gradients are out of range; Megatron lowers the scale for the next ones. So is a
        mini-batch without a signal, before the schedule; a critic's step is made.

        Returns:
            Metrics of the step, equal on all ranks.

        Raises:
            BadStepError: on every rank, if the loss or the norm of the gradient is not finite, or the correction in
                the loss finds a log-prob that is unusable at a trained position; the weights are as before the step.
        """
        phases.enter(f"the training of step {self.iteration + 1}")
        critic, values = self.critic, None
        if critic is not None and prepared.values is not None:
            values = critic.accumulate(prepared.values, mini_batch, self.iteration + 1)
        metrics = self._update_policy(prepared, mini_batch)
        # Behind everything that can be wrong with the step: where it is not made, neither model has changed.
        return metrics if critic is None or values is None else metrics | values | critic.step()

    def _update_policy(self, prepared: PreparedBatch, mini_batch: int) -> dict[str, float]:
        if self.config.critic is not None and self.iteration < self.config.critic.num_critic_only_steps:
            self.iteration, self.kept_log_probs = self.iteration + 1, []
            return {"lr": self.learning_rate} | self._left_out_metrics()
        if mini_batch in prepared.without_signal and not prepared.plan.skips(mini_batch):
            self.kept_log_probs = []
            return self.skip(is_without_signal=True)
        is_first = self._steps == self._scored_at
        metrics = self.accumulate(prepared, mini_batch)
        if self.on_scored is not None and is_first and self.correction.corrects_in_loss:
            self.on_scored(self._scored_in_loss(prepared.batch, mini_batch))
        if metrics is None:
            return self._step_metrics() | self.skip()
        if is_first and not self.correction.corrects_in_loss:
            # Both passes had the same weights: what differs is how they compute.
            metrics["policy/noise_floor"] = metrics["policy/abs_log_ratio"]
        with self.optimizer_here():
            learning_rate, grad_norm = self.learning_rate, self.optimizer_step()
        if self.config.compute.fp16:
            metrics["loss_scale"] = float(self.optimizer.get_loss_scale())
        if grad_norm is None:
            return metrics | self.skip()
        self.iteration += 1
        return metrics | {"grad_norm": grad_norm, "lr": learning_rate} | self._left_out_metrics()

    def distributions(self, prepared: PreparedBatch) -> dict[str, Distribution]:
        """Histograms of log ρ and of the weights, equal on all ranks.

        They are of the rollout batch; if the correction is made in the loss, of the step that ended last.
        """
        found = self.correction.step if self.correction.corrects_in_loss else prepared.plan
        return found.distributions() if isinstance(found, CorrectionResult) else {}

    def skip(self, *, is_bad: bool = False, is_without_signal: bool = False) -> dict[str, float]:
        """Leave a step out: weights, optimizer and learning rate stay as they are. Metrics of the step, likewise."""
        self.iteration += 1
        self.left_out.steps += 1
        self.left_out.bad += is_bad
        self.left_out.without_signal += is_without_signal
        return {"lr": self.learning_rate} | self._left_out_metrics()

    def accumulate(self, prepared: PreparedBatch, mini_batch: int) -> dict[str, float] | None:
        """The gradients of one mini-batch, finished, in the model's gradient buffers; no optimizer step.

        Returns:
            Metrics of the loss and of a correction in the loss, equal on all ranks. None if no token is accepted: the
            step must not be made. The plan knows that before the schedule; a correction in the loss, after it.

        Raises:
            BadStepError: see :meth:`update`.
        """
        self.kept_log_probs = []
        if prepared.plan.skips(mini_batch):
            return None
        self.clear_gradients()
        cuts = prepared.batch.cuts[mini_batch]
        scale = prepared.plan.loss_scale(
            mini_batch,
            num_microbatches=len(cuts),
            calculate_per_token_loss=self.config.compute.calculate_per_token_loss,
            local_tokens=math.prod(cuts[0].layout.shape),
            total_tokens=prepared.batch.total_tokens[mini_batch],
        )
        self.passes.run(self.model, prepared.batch, cuts, partial(self._loss, scale))
        if self.correction.step is not None:
            with telling_bad_steps():
                self.correction.step.check()
            if self.correction.step.skips():
                return None
        metrics = self.correction.loss_metrics()
        self.checks.loss(self.iteration + 1, metrics["loss/total"])
        return self._step_metrics() | self._asked_for(metrics)

    @property
    def version(self) -> int | None:
        """Version of the weights that train; None where the versions of the rollouts count the steps of another run."""
        return self.iteration if self.config.rollouts.knows_versions else None

    @property
    def _steps(self) -> int:
        """Number of steps that changed the weights."""
        return self.iteration - self.left_out.steps

    def _left_out_metrics(self) -> dict[str, float]:
        left = self.left_out
        counts = {"skipped_steps": left.steps, "bad_steps": left.bad, "steps_without_signal": left.without_signal}
        return {name: float(count) for name, count in counts.items()}

    def _checked_gradient_norm(self) -> float:
        norm = float(self._gradient_norm())
        self.batch_check.hear(self.checks.gradient(self.iteration + 1, norm, self.batch_check.numbers))
        return norm

    def _score_reference(self, batch: LocalBatch) -> Tensor | None:
        """Log-probs of the labels under the reference policy, which is refreshed first where that is due."""
        if self.reference is None:
            return None
        chunks = self.chunks
        self.reference.refresh(chunks, self.iteration)
        with self.reference.in_place_of(chunks):
            return self.passes.score(self.model, batch)

    def _plan_inputs(self, batch: RolloutBatch, cut: LocalBatch, old: Tensor | None) -> LocalTokens:
        """The local tokens with what the plan alone looks at."""
        return dataclasses.replace(
            cut.local,
            train_log_probs=old,
            rewards=cut.sides(batch.rewards),
            group_ids=None if self.correction.corrects_in_loss else cut.sides(batch.group_ids),
            policy_versions=cut.local.policy_versions if self.config.rollouts.knows_versions else None,
            mini_batch_ids=cut.mini_batch_ids,
        )

    def _scored_in_loss(self, batch: LocalBatch, mini_batch: int) -> list[LocalTokens]:
        """The micro-batches of the last step with the log-probs that its losses computed."""
        parts = [batch.local.piece(cut) for cut in batch.cuts[mini_batch]]
        scored = self.kept_log_probs if self.groups.is_last_stage else [None] * len(parts)
        return [
            dataclasses.replace(part, train_log_probs=log_probs) for part, log_probs in zip(parts, scored, strict=True)
        ]

    def _step_metrics(self) -> dict[str, float]:
        """Metrics of a correction in the loss, which belong to one step."""
        return {} if self.correction.step is None else self.correction.step.metrics()

    def _asked_for(self, metrics: dict[str, float]) -> dict[str, float]:
        """Without the metrics of what is not there."""
        absent = set()
        if self.config.loss.dual_clip is None:
            absent.add("policy/dual_clip_fraction")
        if self.reference is None:
            absent.add("policy/reference_kl")
        return {name: value for name, value in metrics.items() if name not in absent}

    def _loss(
        self, scale: LossScale, model: torch.nn.Module, local: LocalTokens, output: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """On the last stage. Local arithmetic only: every global factor is in ``scale``."""
        log_probs, entropy = self.passes.log_probs_and_entropy(model, output, local)
        if self.keeps_log_probs or self.on_scored is not None:
            self.kept_log_probs.append(log_probs.detach())
        if self.batch_check.is_open and self._steps == self._scored_at:
            self.batch_check.add(log_probs, local)
        return masked_loss(self.correction, local, log_probs, entropy, scale)
