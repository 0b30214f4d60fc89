"""Steps that are left out on all ranks: records of bad batches, and the limit on steps that do not change the model."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from megatron_rc.launch.errors import RunError
from megatron_rc.launch.rollouts.collector import CollectedBatch, RolloutCollector
from megatron_rc.launch.rollouts.recorded import write_rollouts
from megatron_rc.launch.rollouts.samples import bad_folder
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.checks.step_checks import BadStepError
from megatron_rc.launch.training.trainer import Outcome, PreparedBatch, StepResult, Trainer

_log = logging.getLogger("megatron_rc")


class BadSteps:
    """Prepares batches and makes steps with the trainer, by ``--bad-steps`` and ``--max-skipped-steps``."""

    def __init__(self, config: RunConfig, trainer: Trainer, collector: RolloutCollector) -> None:
        self.config = config
        self.trainer = trainer
        self.collector = collector
        self.folder = bad_folder(config)
        self._begun = trainer.iteration
        self._left_out_before = trainer.left_out.steps
        self._why = "as before the checkpoint" if trainer.left_out.in_a_row else ""
        loss = config.loss
        # With these terms the gradient is not 0 although every advantage is.
        has_other_terms = loss.entropy_coef or loss.kl_coef or loss.distils or config.has_auxiliary_losses
        self._skips_without_signal = config.guards.skip_steps_without_signal and not has_other_terms

    def prepare(self, collected: CollectedBatch) -> PreparedBatch | None:
        """Prepare a batch for its steps; None if ``--bad-steps skip`` leaves them out.

        Raises BadStepError on every rank, with ``--bad-steps stop``.
        """
        try:
            return self.trainer.prepare(
                collected.batch, baselines=collected.baselines, teacher_input=collected.teacher_input
            )
        except BadStepError as error:
            self._write(collected, self.trainer.iteration, error)
            self._judge(error)
            return None

    def with_signals(self, prepared: PreparedBatch, nonzero: Sequence[float]) -> PreparedBatch:
        """Mark the mini-batches whose steps ``--skip-steps-without-signal`` skips.

        ``nonzero``: for each mini-batch the share of its responses, over all ranks, that have an advantage.
        """
        if not self._skips_without_signal:
            return prepared
        without_signal = frozenset(number for number, share in enumerate(nonzero) if share == 0)
        return dataclasses.replace(prepared, without_signal=without_signal)

    def update(
        self, collected: CollectedBatch, prepared: PreparedBatch | None, update: int, mini_batch: int
    ) -> StepResult:
        """Make the step after ``update`` earlier ones on the batch, or leave it out.

        ``prepared`` is None if all steps of the batch are left out. Raises BadStepError on every rank, with
        ``--bad-steps stop``.
        """
        if prepared is None:
            return self.trainer.skip(Outcome.BAD)
        try:
            result = self.trainer.update(prepared, mini_batch)
        except BadStepError as error:
            self._write(collected, self.trainer.iteration - update, error)
            self._judge(error)
            return self.trainer.skip(Outcome.BAD)
        if result.outcome is Outcome.NOT_ACCEPTED:
            self._why = "no token was accepted, or none had a weight: look at the metrics of the rejection"
        if result.outcome is Outcome.OVERFLOW:
            name = "loss-scale" if "loss_scale" in self.config.megatron.given else "initial-loss-scale"
            below = f"--{name} below {result.metrics['loss_scale']:g}"
            self._why = f"scaled gradients were out of float16's range: give {below}"
        return result

    def check(self, outcome: Outcome, row: Mapping[str, float]) -> None:
        """Check that the steps change the model; call this once for each step, made or left out.

        A step without signal, made or skipped, does not count: its gradient is rightly 0. ``row`` has all metrics of
        the step, equal on all ranks.

        Raises:
            RunError: on every rank, if they do not.
        """
        complaint = self._complaint(outcome, row)
        if complaint is not None:
            raise RunError(complaint)

    def _complaint(self, outcome: Outcome, row: Mapping[str, float]) -> str | None:
        """Error of a run whose steps do not change the model; None if it may go on."""
        left_out = self.trainer.left_out
        critic = self.config.critic
        limit = self.config.guards.max_skipped_steps
        if critic is not None and self.trainer.iteration <= critic.num_critic_only_steps:
            return None
        if outcome is Outcome.WITHOUT_SIGNAL:
            return self._complaint_at_the_end()
        if outcome is not Outcome.MADE:
            left_out.in_a_row += 1
        elif row["grad_norm"] != 0:
            left_out.in_a_row = 0
        elif row["reward/nonzero_advantages"] > 0:
            left_out.in_a_row += 1
            self._why = "their gradient was 0: a model that is ruined, as by --lr"
        if left_out.in_a_row >= limit and not self._searches_scale(row):
            return (
                f"the last {left_out.in_a_row} steps left the model as it was ({self._why}); --max-skipped-steps "
                f"{limit} allows no more"
            )
        return self._complaint_at_the_end()

    def _complaint_at_the_end(self) -> str | None:
        """Error of a finished run if most of its steps, the last ones, did not change the model."""
        if self.trainer.iteration < self.config.training.train_iters:
            return None
        steps = self.trainer.iteration - self._begun
        idle = min(self.trainer.left_out.in_a_row, steps)
        are_all_left_out = self.trainer.left_out.steps - self._left_out_before == steps
        if 2 * idle > steps and (idle > 1 or are_all_left_out):
            return f"{idle} of the run's {steps} steps, the last ones, left the model as it was ({self._why})"
        return None

    def _searches_scale(self, row: Mapping[str, float]) -> bool:
        """Whether Megatron still searches a loss scale: it starts high and halves at each overflow."""
        flags = self.config.megatron.given
        return flags.get("loss_scale") is None and row.get("loss_scale", 0) > flags.get("min_loss_scale", 1.0)

    def _judge(self, error: BadStepError) -> None:
        """Raise the error, or warn once that the step or the whole batch is left out."""
        if self.config.guards.bad_steps == "stop":
            raise error
        self._why = str(error)
        if dist.get_rank() == 0:
            _log.warning("%s; left out by --bad-steps skip, the batch is in %s", error, self.folder)

    def _write(self, collected: CollectedBatch, step: int, error: BadStepError) -> None:
        """Write each replica's batch in the format of ``--load-rollouts``, named by its first step, and the error."""
        if not self.collector.is_engine_rank:
            return
        line = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "step": self.trainer.iteration + 1, "error": str(error)}
        batch = dataclasses.replace(collected.batch, routed_experts=collected.routed_experts)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_rollouts(batch, self.folder, step, self.collector.replica)
            if self.collector.replica == 0:
                with (self.folder / f"step-{step:07d}.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
        except OSError as problem:  # log only: raising would hide the step's error and end this rank alone
            _log.error("the bad batch of step %d could not be written to %s: %s", step, self.folder, problem)
