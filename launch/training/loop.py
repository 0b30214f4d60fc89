"""The PPO loop: sync weights, sample, plan the correction, update; stop and save together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rc.advantages.group import group_advantages
from megatron_rc.launch.distributed import agree, number_of_rank_0
from megatron_rc.launch.rollouts.collector import RolloutCollector
from megatron_rc.launch.rollouts.samples import dropped
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.stopping import Stopped, StopRequest
from megatron_rc.launch.tasks import Task
from megatron_rc.launch.training.bad_steps import BadSteps
from megatron_rc.launch.training.checkpoint_saves import CheckpointSaves
from megatron_rc.launch.training.data_check import check_data, compare_with_checkpoint
from megatron_rc.launch.training.guards import Guards, telling_guards
from megatron_rc.launch.training.heap import trim_heap
from megatron_rc.launch.training.hugging_face import HuggingFaceSaves, hugging_face_folder
from megatron_rc.launch.training.machine import Machine
from megatron_rc.launch.training.metrics_file import METRICS_FILE, last_evaluation
from megatron_rc.launch.training.profiling import Profiling
from megatron_rc.launch.training.report import Reporter, begin_report
from megatron_rc.launch.training.saved_log_probs import SavedLogProbs
from megatron_rc.launch.training.settings_file import write_settings
from megatron_rc.launch.training.sync_check import SyncCheck
from megatron_rc.launch.training.trainer import Trainer
from megatron_rc.parallel import ParallelGroups
from megatron_rc.parallel.collectives import all_reduce_max, all_reduce_sum
from megatron_rc.records.rollout import RolloutBatch


def train(config: RunConfig, task: Task) -> bool:
    """Run ``--train-iters`` optimizer steps of PPO; process groups exist.

    Returns:
        Whether nothing is lost: all steps are made, or a checkpoint holds those that were before a signal came.

    Raises:
        AgreedError: on every rank alike: an engine, a reward, a record or the loss failed, log-probs are unusable, the
            steps change nothing any more, or a condition of ``--stop-if`` holds.
        ValueError: on every rank alike: a checkpoint that does not fit.
    """
    check_data(config)
    groups = ParallelGroups.from_megatron()
    trainer = Trainer(config, groups)
    _check_start(config, trainer.iteration)
    # A run that is refused leaves the settings of the one before it.
    agree(config, write_settings(config) if dist.get_rank() == 0 else None)
    with ExitStack() as stack:
        reporter = begin_report(config, trainer.iteration)
        if reporter is not None:
            stack.enter_context(reporter)
        request = StopRequest()
        collector = RolloutCollector(config, task, groups, request=request)
        if reporter is not None and trainer.iteration:
            reporter.say(f"goes on from checkpoint {trainer.iteration} of {config.checkpoints.load}")
        # What an engine and workers hold is given back whatever fails from here on.
        stack.enter_context(request.installed())
        stack.enter_context(closing(collector))
        weight_sync = _WeightSync(config, trainer, collector, groups, reporter)
        saver = stack.enter_context(CheckpointSaves(config, trainer))
        with suppress(Stopped):  # the loop hears of it too
            weight_sync.go_on()
        profiling = stack.enter_context(Profiling(config))
        profiling(trainer.iteration)
        save_hf, stop = HuggingFaceSaves(config, trainer, task.text), False
        steps, guards, machine = BadSteps(config, trainer, collector), Guards(config), Machine(config)
        log_probs = SavedLogProbs(config, groups, trainer, collector)
        while trainer.iteration < config.training.train_iters and not stop:
            try:
                for row in _rollout_steps(config, trainer, collector, groups, weight_sync, steps, log_probs):
                    row |= machine.metrics(row) | trainer.passes.timers.metrics()
                    complaint = steps.complaint(row)
                    if reporter is not None:
                        reporter.step(trainer.iteration, row | saver.metrics)
                        complaint = reporter.error or complaint or guards.step(trainer.iteration, row)
                    complaint = profiling(trainer.iteration) or complaint
                    with telling_guards():
                        stop = agree(config, complaint, stop=request.signal is not None)
                    saver.on_the_way()
                    save_hf()
                    trim_heap(trainer.iteration)
                    request.took(row | saver.metrics)
                    if stop or trainer.iteration >= config.training.train_iters:
                        break
            except Stopped:
                stop = True
        saver.at_the_end()
        save_hf(at_end=True)
        if weight_sync.is_wanted and not stop:
            with suppress(Stopped):
                weight_sync()
        agree(config, reporter.error if reporter else None)
        if reporter is not None:
            unscored = collector.unscored_in_words()
            if unscored:
                reporter.say(unscored)
            reporter.close(_how_it_ended(config, trainer, request))
    return trainer.iteration >= config.training.train_iters or bool(config.checkpoints.save)


def _check_start(config: RunConfig, iteration: int) -> None:
    """Compare the run with the checkpoint that it goes on from.

    Raises:
        ValueError: on every rank alike: it would have nothing to do.
    """
    load, last = config.checkpoints.load, config.training.train_iters
    if iteration > last:
        raise ValueError(
            f"--load {load}: checkpoint {iteration} is already past --train-iters {last}: give a larger one, or "
            "--finetune to start at step 0 from its weights"
        )
    end = config.logging.profiled_steps[1]
    if config.logging.profile and iteration >= end:
        raise ValueError(f"--profile-step-end {end}: checkpoint {iteration} is already there: profile later steps")
    compare_with_checkpoint(config, iteration)


def _how_it_ended(config: RunConfig, trainer: Trainer, request: StopRequest) -> str:
    """The run's closing words."""
    files, iteration = config.checkpoints, trainer.iteration
    is_done = iteration >= config.training.train_iters
    done = "finished" if is_done else f"stopped by {request.signal or 'another rank'}"
    kept = f", saved to {files.save}" if files.save else ""
    model = f", model in {hugging_face_folder(files.save_hf, iteration)}" if files.save_hf else ""
    left_out = f" ({trainer.skipped} steps left out)" if trainer.skipped else ""
    return f"{done} at step {iteration}{left_out}{kept}{model}"


class _WeightSync:
    """New weights for the engines, the check that they arrived, and the evaluations that are due.

    Attributes:
        metrics: of the last one.
        evaluated: the step of the last evaluation.
    """

    def __init__(
        self,
        config: RunConfig,
        trainer: Trainer,
        collector: RolloutCollector,
        groups: ParallelGroups,
        reporter: Reporter | None,
    ) -> None:
        self.config, self.trainer, self.collector, self.reporter = config, trainer, collector, reporter
        self.check = None if config.rollouts.load_rollouts else SyncCheck(config, trainer, collector, groups)
        self.metrics: dict[str, float] = {}
        self.evaluated = self._last_evaluation()

    def _last_evaluation(self) -> int:
        """What the run's metrics say, which rank 0 writes: a run that was told to stop ends without the one due."""
        step = self.trainer.iteration
        if self.config.evaluation.eval_interval is None or not step:
            return -1
        launch = self.config.launch
        path = Path(launch.runs_dir) / launch.run_name / METRICS_FILE
        return number_of_rank_0(self.config, last_evaluation(path, step) if self.reporter is not None else -1)

    @property
    def is_wanted(self) -> bool:
        """Whether an evaluation is due: an interval has ended since the last one, or the run has."""
        interval, step = self.config.evaluation.eval_interval, self.trainer.iteration
        if interval is None or step == self.evaluated:
            return False
        return bool(step // interval > self.evaluated // interval or step >= self.config.training.train_iters)

    def __call__(self, lap: Callable[[str], None] = lambda _: None) -> None:
        """Now, while no request is under way; ``lap`` is told ``sync`` and ``eval`` where they end."""
        step = self.trainer.iteration
        self._send(step)
        lap("sync")
        if self.is_wanted:
            self.evaluated = step
            metrics = self.collector.evaluate(step)
            if self.reporter is not None:
                self.reporter.evaluation(step, metrics)
            lap("eval")

    def go_on(self) -> None:
        """Let the engines sample what was under way when the checkpoint was written, from the weights they had."""
        kept = self.trainer.sampling_weights

        def send() -> None:
            with kept.in_place_of(self.trainer.chunks):
                self._send(kept.version)

        self.collector.go_on(self.trainer.iteration, kept.version, send)

    def _send(self, version: int) -> None:
        self.collector.sync_weights(self.trainer.chunks, version)
        self.metrics = {} if self.check is None else self.check()


def _rollout_steps(
    config: RunConfig,
    trainer: Trainer,
    collector: RolloutCollector,
    groups: ParallelGroups,
    weight_sync: _WeightSync,
    steps: BadSteps,
    log_probs: SavedLogProbs,
) -> Iterator[dict[str, float]]:
    """One rollout batch, and the metrics of each of its optimizer steps."""
    clock = time.monotonic()
    begun = clock
    times: dict[str, float] = {}
    weight_sync.metrics = {}

    def lap(name: str) -> None:
        nonlocal clock
        now = time.monotonic()
        times[f"perf/{name}_seconds"], clock = now - clock, now

    data = collector.data_metrics(trainer.iteration)
    batch = collector.next_batch(trainer.iteration, weight_sync, lap)
    if collector.is_window_over:
        trainer.sampling_weights.keep(trainer.chunks, trainer.iteration)
    prepared = steps.prepare(batch)
    lap("plan")
    common = summarize_rollouts(batch, groups, trainer.version) | collector.reward_metrics
    common |= (prepared.plan.metrics() if prepared else {}) | weight_sync.metrics | data
    mini_batches = config.updates_per_rollout // config.rollouts.grpo_iterations
    shares = nonzero_advantages(batch, mini_batches, groups)
    for update in range(config.updates_per_rollout):
        metrics = steps.update(batch, prepared, update, update % mini_batches)
        log_probs.after_update(prepared, update, update % mini_batches)
        metrics["reward/nonzero_advantages"] = shares[update % mini_batches]
        lap("update")
        if update == 0:
            seconds = time.monotonic() - begun - times.get("perf/eval_seconds", 0.0)
            times["perf/tokens_per_second"] = common["rollout/tokens"] / seconds
        yield common | metrics | times


def summarize_rollouts(batch: RolloutBatch, groups: ParallelGroups, version: int | None = None) -> dict[str, float]:
    """Rewards and lengths over all replicas, and how old the tokens are at a version: one SUM and one MAX over DP."""
    rewards, lengths = batch.rewards.double(), batch.response_mask.sum(dim=1).double()
    stopped = (batch.finish_reasons == 0).double()
    ones = (~dropped(batch)).double()
    ages = torch.where(batch.response_mask, (version or 0) - batch.policy_versions, 0).double()
    columns = torch.stack([ones, ones * rewards, ones * rewards.square(), lengths, stopped, ages.sum(dim=1)])
    count, reward, squared, tokens, stops, age = all_reduce_sum(columns.sum(dim=1), groups.dp).tolist()
    ends = [torch.where(ones > 0, value, -torch.inf).max() for value in (rewards, -rewards)]
    maxima = torch.stack([*ends, ages.max()])
    highest, lowest, oldest = all_reduce_max(maxima, groups.dp).tolist()
    mean = reward / count
    staleness = {"rollout/staleness_mean": age / max(tokens, 1), "rollout/staleness_max": oldest}
    return {
        "reward/mean": mean,
        "reward/std": max(squared / count - mean**2, 0.0) ** 0.5,
        "reward/max": highest,
        "reward/min": -lowest,
        "rollout/tokens": tokens,
        "rollout/response_length": tokens / count,
        "rollout/stopped_fraction": stops / count,
        **(staleness if version is not None else {}),
    }


def nonzero_advantages(batch: RolloutBatch, mini_batches: int, groups: ParallelGroups) -> list[float]:
    """For each mini-batch the share of its responses that have an advantage: one SUM over DP."""
    kept = ~dropped(batch)
    deciding = group_advantages(batch.rewards, batch.group_ids, kept=kept) != 0
    counts = torch.stack([deciding, kept]).double().unflatten(1, (mini_batches, -1)).sum(dim=2)
    decided, responses = all_reduce_sum(counts, groups.dp)
    shares: list[float] = (decided / responses.clamp(min=1)).tolist()
    return shares
