"""Optimizer steps that are left out on all ranks alike, what is written down of them, and how many may be."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

from megatron_rc.launch.rollouts.collector import RolloutCollector
from megatron_rc.launch.rollouts.recorded import write_rollouts
from megatron_rc.launch.rollouts.samples import bad_folder
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.step_checks import BadStepError
from megatron_rc.launch.training.trainer import PreparedBatch, Trainer
from megatron_rc.records.rollout import RolloutBatch

_log = logging.getLogger("megatron_rc")


class BadSteps:
    """Prepares batches and makes steps with the trainer, by ``--bad-steps`` and ``--max-skipped-steps``.

    Args:
        config: of the run.
        trainer: that makes the steps.
        collector: that knows which ranks write batches down.
    """

    def __init__(self, config: RunConfig, trainer: Trainer, collector: RolloutCollector) -> None:
        self.config, self.trainer, self.collector = config, trainer, collector
        self.folder = bad_folder(config)
        self._begun, self._left_out_before = trainer.iteration, trainer.left_out.steps
        self._without_signal = trainer.left_out.without_signal
        self._why = "as before the checkpoint" if trainer.left_out.in_a_row else ""
        loss = config.loss
        # Otherwise the gradient is not 0 although every advantage is.
        has_other_terms = loss.entropy_coef or loss.kl_coef or config.has_auxiliary_losses
        self._skips_without_signal = config.guards.skip_steps_without_signal and not has_other_terms

    def prepare(self, batch: RolloutBatch, baselines: Tensor | None = None) -> PreparedBatch | None:
        """The batch, ready for its steps; None where its steps are left out.

        Raises:
            BadStepError: on every rank, where ``--bad-steps`` says stop.
        """
        try:
            return self.trainer.prepare(batch, baselines)
        except BadStepError as error:
            self._write(batch, self.trainer.iteration, error)
            self._judge(error)
            return None

    def with_signals(self, prepared: PreparedBatch, nonzero: Sequence[float]) -> PreparedBatch:
        """The batch, by ``--skip-steps-without-signal`` with the mini-batches whose steps are skipped.

        Args:
            prepared: the batch.
            nonzero: for each mini-batch the share of its responses, over all ranks, that have an advantage.
        """
        flat = (number for number, share in enumerate(nonzero) if share == 0)
        return dataclasses.replace(prepared, without_signal=frozenset(flat if self._skips_without_signal else ()))

    def update(
        self, batch: RolloutBatch, prepared: PreparedBatch | None, update: int, mini_batch: int
    ) -> dict[str, float]:
        """Metrics of a step that was made, or left out.

        Args:
            batch: the records, as they came.
            prepared: the same; None: its steps are left out.
            update: how many steps were made on it.
            mini_batch: of it.

        Raises:
            BadStepError: on every rank, where ``--bad-steps`` says stop.
        """
        if prepared is None:
            return self.trainer.skip(is_bad=True)
        try:
            metrics = self.trainer.update(prepared, mini_batch)
        except BadStepError as error:
            self._write(batch, self.trainer.iteration - update, error)
            self._judge(error)
            return self.trainer.skip(is_bad=True)
        if "grad_norm" not in metrics and not self._was_without_signal:
            self._why = "no token was accepted, or none had a weight: look at the metrics of the rejection"
            if "loss_scale" in metrics:
                name = "loss-scale" if "loss_scale" in self.config.megatron.given else "initial-loss-scale"
                below = f"--{name} below {metrics['loss_scale']:g}"
                self._why = f"scaled gradients were out of float16's range: give {below}"
        return metrics

    def complaint(self, row: Mapping[str, float]) -> str | None:
        """Why the run cannot go on, or at its end not be called finished: its steps leave the model as it was.

        A gradient of 0 is right where all rewards of each prompt are alike: such a step, made or skipped, says nothing.

        Args:
            row: metrics of the step that was made, or left out; told once for each.
        """
        left_out, critic = self.trainer.left_out, self.config.critic
        if critic is not None and self.trainer.iteration <= critic.num_critic_only_steps:
            return None  # the critic alone learns
        was_without_signal, self._without_signal = self._was_without_signal, left_out.without_signal
        if was_without_signal:
            return self._complaint_at_the_end()
        if "grad_norm" not in row:
            left_out.in_a_row += 1
        elif row["grad_norm"] != 0:
            left_out.in_a_row = 0
        elif row["reward/nonzero_advantages"] > 0:
            left_out.in_a_row += 1
            self._why = "their gradient was 0: a model that is ruined, as by --lr"
        if left_out.in_a_row >= self.config.guards.max_skipped_steps and not self._is_settling(row):
            return f"the last {left_out.in_a_row} steps left the model as it was ({self._why}); {self._allowed}"
        return self._complaint_at_the_end()

    def _complaint_at_the_end(self) -> str | None:
        """Most of the steps since the start, the last ones, changed nothing."""
        if self.trainer.iteration < self.config.training.train_iters:
            return None
        steps = self.trainer.iteration - self._begun
        idle = min(self.trainer.left_out.in_a_row, steps)
        are_all_left_out = self.trainer.left_out.steps - self._left_out_before == steps
        if 2 * idle > steps and (idle > 1 or are_all_left_out):
            return f"{idle} of the run's {steps} steps, the last ones, left the model as it was ({self._why})"
        return None

    def _is_settling(self, row: Mapping[str, float]) -> bool:
        """Whether Megatron still looks for a scale of the loss: it starts high, and halves at each overflow."""
        given = self.config.megatron.given
        return given.get("loss_scale") is None and row.get("loss_scale", 0) > given.get("min_loss_scale", 1.0)

    @property
    def _was_without_signal(self) -> bool:
        """Whether the newest step was left out since no response has an advantage."""
        return self.trainer.left_out.without_signal > self._without_signal

    @property
    def _allowed(self) -> str:
        return f"--max-skipped-steps {self.config.guards.max_skipped_steps} allows no more"

    def _judge(self, error: BadStepError) -> None:
        """Raise it, or say that the run goes on; a bad batch is not told of at each of its steps."""
        if self.config.guards.bad_steps == "stop":
            raise error
        self._why = str(error)
        if dist.get_rank() == 0:
            _log.warning("%s; left out by --bad-steps skip, the batch is in %s", error, self.folder)

    def _write(self, batch: RolloutBatch, step: int, error: BadStepError) -> None:
        """The batch of each replica, under its step as ``--load-rollouts`` reads it, and beside it what was wrong."""
        if not self.collector.is_engine_rank:
            return
        line = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "step": self.trainer.iteration + 1, "error": str(error)}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_rollouts(batch, self.folder, step, self.collector.replica)
            if self.collector.replica == 0:
                with (self.folder / f"step-{step:07d}.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
        except OSError as problem:  # must not take the place of what was wrong, nor end this rank alone
            _log.error("the bad batch of step %d could not be written to %s: %s", step, self.folder, problem)
