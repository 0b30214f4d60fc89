"""The PPO loop: sync weights, sample, plan the correction, update; all ranks stop and save together."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress

import torch.distributed as dist

from megatron_rc.attribution import Attribution
from megatron_rc.launch import phases
from megatron_rc.launch.distributed import largest_over_ranks
from megatron_rc.launch.ending import tell_ending
from megatron_rc.launch.errors import RunError, one_line
from megatron_rc.launch.rollouts.collector import CollectedBatch, RolloutCollector
from megatron_rc.launch.rollouts.scheduler import Turn
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.passes import passes_in_words, scoring_in_words
from megatron_rc.launch.stopping import Stopped, StopRequest
from megatron_rc.launch.tasks import Task
from megatron_rc.launch.training.attribution import drawn
from megatron_rc.launch.training.bad_steps import BadSteps
from megatron_rc.launch.training.batches.advantages import summarize
from megatron_rc.launch.training.batches.rollout_metrics import RolloutSummary, summarize_rollouts
from megatron_rc.launch.training.batches.selection import Selection
from megatron_rc.launch.training.checkpoints.fitting import warn_of_other_data
from megatron_rc.launch.training.checks.equal_rewards import EqualRewards
from megatron_rc.launch.training.checks.folder_locks import in_use
from megatron_rc.launch.training.checks.guards import Guards
from megatron_rc.launch.training.hugging_face import HuggingFaceSaves, hugging_face_folder
from megatron_rc.launch.training.reporting.config_yaml import write_settings
from megatron_rc.launch.training.reporting.machine_metrics import Machine, trim_heap
from megatron_rc.launch.training.reporting.metrics_file import read_rows
from megatron_rc.launch.training.reporting.profiling import Profiling
from megatron_rc.launch.training.reporting.reporter import begin_report
from megatron_rc.launch.training.reporting.sources import in_one_line, sources_of
from megatron_rc.launch.training.saved_log_probs import SavedLogProbs
from megatron_rc.launch.training.trainer import Outcome, PreparedBatch, Trainer
from megatron_rc.launch.training.weight_sync import WeightSync
from megatron_rc.launch.training.when_to_save import CheckpointSaves
from megatron_rc.measures.histogram import Distribution
from megatron_rc.parallel import ParallelGroups
from megatron_rc.records.rollout import RolloutBatch

_log = logging.getLogger("megatron_rc")


def train(config: RunConfig, task: Task) -> bool:
    """Run ``--train-iters`` optimizer steps of PPO; process groups must exist.

    Returns:
        Whether no step is lost: all are made, or a signal came and the steps so far are in a checkpoint.

    Raises:
        RunError: on every rank, if log-probs are unusable, or the steps change nothing any more. On one rank, if its
            engine, reward, record or file failed. On rank 0, if a condition of ``--stop-if`` held; all have saved then.
        ValueError: on every rank, if the checkpoint does not fit.
    """
    _check_rows(config)
    groups = ParallelGroups.from_megatron()
    with ExitStack() as stack:
        # Lock first: the trainer may restore a checkpoint in --save that a killed run was replacing.
        if dist.get_rank() == 0:
            stack.enter_context(in_use(config))
        trainer = Trainer(config, groups)
        _check_start(config, trainer.iteration)
        # Write after all checks, so that a refused run does not replace the settings of the run before it.
        if dist.get_rank() == 0:
            write_settings(config)
        run = _Run(config, task, groups, trainer, stack)
        run.begin()
        while not (run.is_done or run.is_stopped):
            run.use_rollout_batch()
        run.save()
        run.report()
    return run.is_kept


class _Run:
    """Everything that a run needs besides the trainer, and the order of its steps.

    ``stack`` closes engines, workers and files at the end, also after an error.

    Attributes:
        is_stopped: a rank got a signal to stop, or a condition of ``--stop-if`` held.
        guard: the error of that condition, on rank 0; None: none held.
        distributions: histograms of the newest step, by name.
        attribution: the newest attribution of a rollout batch; None: there was none.
    """

    def __init__(
        self, config: RunConfig, task: Task, groups: ParallelGroups, trainer: Trainer, stack: ExitStack
    ) -> None:
        self.config = config
        self.task = task
        self.groups = groups
        self.trainer = trainer
        self.is_stopped = False
        self.guard: RunError | None = None
        self.distributions: dict[str, Distribution] = {}
        self.attribution: Attribution | None = None
        self.reporter = begin_report(config, trainer.iteration)  # None on other ranks than 0
        if self.reporter is not None:
            stack.enter_context(self.reporter)
        self.request = StopRequest()
        self.collector = RolloutCollector(
            config, task, groups, request=self.request, open_rollouts=trainer.open_rollouts
        )
        stack.enter_context(self.request.installed())
        stack.enter_context(closing(self.collector))
        self.weight_sync = WeightSync(config, trainer, self.collector, groups, self.reporter)
        self.saver = stack.enter_context(CheckpointSaves(config, trainer))
        self.profiling = stack.enter_context(Profiling(config))
        self.save_hf = HuggingFaceSaves(config, trainer, task.text)
        self.steps = BadSteps(config, trainer, self.collector)
        self.guards = Guards(config)
        self.machine = Machine(config)
        self.equal_rewards = EqualRewards(config)
        if self.reporter is not None:
            earlier_rows = read_rows(self.reporter.metrics.path)
            self.guards.go_on(earlier_rows, trainer.iteration)
            rows_with_rewards = read_rows(self.reporter.metrics.path, '"reward/max"')
            self.equal_rewards.go_on(rows_with_rewards, trainer.iteration)
        self.log_probs = SavedLogProbs(config, groups, trainer, self.collector)

    @property
    def is_done(self) -> bool:
        """Whether all ``--train-iters`` steps are made."""
        return self.trainer.iteration >= self.config.training.train_iters

    @property
    def _mini_batches(self) -> int:
        """Number of mini-batches of a rollout batch."""
        return self.config.updates_per_rollout // self.config.rollouts.grpo_iterations

    @property
    def is_kept(self) -> bool:
        """Whether no step is lost when the run ends."""
        return self.is_done or bool(self.config.checkpoints.save)

    def begin(self) -> None:
        """Print the run's sources, ends and passes; sample again the rollouts that a checkpoint left open."""
        self._say(in_one_line(sources_of(self.config, self.trainer.loaded_from)))
        if self.config.rollouts.load_rollouts is None:
            self._say(self.task.text.ends.words)
        self._say(passes_in_words(self.config))
        self._say(scoring_in_words(self.config))
        if self.trainer.iteration:
            self._say(f"goes on from checkpoint {self.trainer.iteration} of {self.config.checkpoints.load}")
        with suppress(Stopped):  # the signal stops the first batch too
            self._order_unfinished()
        self.profiling(self.trainer.iteration)

    def use_rollout_batch(self) -> None:
        """Sample one rollout batch, and make its optimizer steps with reports and saves; a signal ends it early."""
        trainer = self.trainer
        step = trainer.iteration
        laps = _Laps()
        turn = self.collector.scheduler.turn(step, evaluates=self.weight_sync.is_evaluation_due)
        data_metrics = self.collector.data_metrics(step)
        try:
            collected, sync_metrics = self._collect(step, turn, laps)
        except Stopped:
            self.is_stopped = True
            return

        with laps.part("plan"):
            if turn.begins_window:
                trainer.sampling_weights.keep(trainer.chunks, step)
            prepared = self.steps.prepare(collected)
        self._say_of_replay()

        summary = summarize_rollouts(collected.batch, self.groups, trainer.version)
        self._look_at_rewards(summary.metrics, collected.batch)
        batch_metrics = summary.metrics | collected.reward_metrics
        batch_metrics |= trainer.rewards.metrics() | sync_metrics | data_metrics
        nonzero_advantages: list[float] = []
        if prepared is not None:
            nonzero_advantages, metrics = summarize(
                prepared.scores,
                prepared.estimated,
                self._mini_batches,
                self.groups,
                kl_metric=self.config.advantages.kl_metric,
            )
            batch_metrics |= prepared.plan.metrics() | metrics | trainer.routing_metrics
            if trainer.is_attribution_due:
                with laps.part("attribution"):
                    self.attribution = trainer.attribution(prepared)
                batch_metrics |= self.attribution.metrics()
            prepared = self.steps.with_signals(prepared, nonzero_advantages)

        self._make_steps(collected, prepared, summary, batch_metrics, nonzero_advantages, laps)

    def _collect(self, step: int, turn: Turn, laps: _Laps) -> tuple[CollectedBatch, dict[str, float]]:
        """Collect the batch that starts at ``step``, with the weight syncs and the orders of its turn.

        Returns:
            The batch, and the metrics of the sync; these are empty if no weights were sent.

        Raises:
            RunError: on every rank, if too few responses can be used.
            Stopped: on every rank, if one of them was told to stop.
        """
        scheduler = self.collector.scheduler
        sync_metrics: dict[str, float] = {}
        if turn.syncs_before:
            sync_metrics = self._sync(laps)
        scheduler.order(turn.orders_before)
        with laps.part("rollout"):
            collected = self.collector.collect(step)
            self.collector.check_scores(collected, step)
        if turn.syncs_after:
            sync_metrics = self._sync(laps)
        scheduler.order(turn.orders_after)
        return collected, sync_metrics

    def _sync(self, laps: _Laps) -> dict[str, float]:
        """Send the trainer's weights to the engines, and evaluate them if that is due; returns metrics of the sync."""
        with laps.part("sync"):
            metrics = self.weight_sync.sync()
        if self.weight_sync.is_evaluation_due:
            with laps.part("eval"):
                self.weight_sync.evaluate()
        return metrics

    def _make_steps(
        self,
        collected: CollectedBatch,
        prepared: PreparedBatch | None,
        summary: RolloutSummary,
        batch_metrics: dict[str, float],
        nonzero_advantages: Sequence[float],
        laps: _Laps,
    ) -> None:
        """Make the optimizer steps of a rollout batch, each with its report and its saves.

        If all steps are left out, ``prepared`` is None and ``nonzero_advantages`` is empty; else it has, for each
        mini-batch, the share of its responses that have an advantage. ``batch_metrics`` belong to every step's row.
        """
        trainer = self.trainer
        num_updates = self.config.updates_per_rollout
        selection = Selection(
            summary.responses,
            collected.excluded,
            num_replicas=self.config.data_parallel_size,
            num_mini_batches=self._mini_batches,
            masks_overlong=self.config.rewards.overlong == "mask",
        )
        for update in range(num_updates):
            mini_batch = update % self._mini_batches
            with laps.part("update"):
                result = self.steps.update(collected, prepared, update, mini_batch)
            if update == 0:
                seconds = laps.seconds_without("eval", "attribution")
                batch_metrics["perf/tokens_per_second"] = batch_metrics["rollout/tokens"] / seconds
            self._say_of_replay()

            batch_metrics |= trainer.batch_check.metrics
            row = batch_metrics | result.metrics
            selection.count_step(mini_batch, result.accepted)
            if update == num_updates - 1:
                row |= selection.metrics(knows_versions=trainer.version is not None)
            self.distributions = summary.distributions
            # A correction in the loss has no metrics if its step was left out before the schedule.
            if prepared is not None and any(name.startswith(self.config.correction.metric_prefix) for name in row):
                self.distributions = self.distributions | trainer.distributions(prepared)
            self.log_probs.after_update(prepared, update, mini_batch)
            if nonzero_advantages:
                row["reward/nonzero_advantages"] = nonzero_advantages[mini_batch]
            self._report_step(row | laps.times, result.outcome)

            self.saver.on_the_way()
            self.save_hf()
            trim_heap(trainer.iteration)
            if self.is_stopped or self.is_done:
                break

    def _order_unfinished(self) -> None:
        """Sample the rollouts again that a checkpoint left unfinished, from the weights that they were sampled from."""
        scheduler = self.collector.scheduler
        unfinished = scheduler.go_on(self.trainer.iteration, self.trainer.sampling_weights.version)
        if unfinished:
            self.weight_sync.sync_sampling_weights()
            scheduler.order(unfinished)

    def save(self) -> None:
        """Make the last save; tell the launcher that nothing can be lost any more."""
        self.saver.at_the_end()
        self.save_hf(at_end=True)
        self.request.is_saved = self.is_kept
        if self.guard is None:
            tell_ending(kept=self.is_kept)

    def report(self) -> None:
        """Make the last evaluation, and report how the run ended.

        Raises:
            RunError: on rank 0, a condition of ``--stop-if`` held. Other errors are those of the evaluation, on a rank
                whose engine failed; the launcher knows that nothing is lost by them.
        """
        note = _how_it_ended(self.config, self.trainer, self.request, self.guard)
        try:
            self._evaluate_last(note)
            unscored = self.collector.unscored_in_words()
            if unscored:
                self._say(unscored)
        finally:
            if self.reporter is not None:
                try:
                    if self.attribution is not None:
                        self._say(drawn(self.attribution, self.config))
                    self.reporter.close(note)
                except Exception as error:  # files, drawings and boards may raise anything
                    _log.warning("%s; its report failed (%s: %s)", note, type(error).__name__, one_line(error))
        if self.guard is not None:
            save = self.config.checkpoints.save
            hint = f"; checkpoint {self.trainer.iteration} in {save} holds the steps so far" if save else ""
            raise RunError(f"{self.guard}{hint}", self.guard.code)

    def _evaluate_last(self, note: str) -> None:
        """Give the engines the last weights and evaluate them, if ``--eval-interval`` asks for that."""
        if self.weight_sync.is_evaluation_due and not self.is_stopped:
            self._say(note)
            with suppress(Stopped):
                self.weight_sync.sync()
                self.weight_sync.evaluate()

    def _look_at_rewards(self, metrics: dict[str, float], batch: RolloutBatch) -> None:
        """Say once if all rewards of many rollout batches are equal."""
        if self.reporter is None:
            return

        def first_response() -> str:
            return self.task.text.decode(batch.tokens[0][batch.response_mask[0]].tolist())

        line = self.equal_rewards.batch(metrics, first_response)
        if line is not None:
            self._say(line)

    def _report_step(self, row: dict[str, float], outcome: Outcome) -> None:
        """Report a step that was made or left out; all ranks learn whether the run stops.

        Raises:
            RunError: on every rank, if the steps change nothing any more; on one, if its files cannot be written.
        """
        step = self.trainer.iteration
        phases.enter(f"the report of step {step}")
        row |= self.machine.metrics(row) | self.trainer.passes.timers.metrics()
        if self.reporter is not None:
            reported = row | self.saver.metrics
            self.reporter.step(step, reported, self.distributions)
            self.guard = self.guards.step(step, reported)
            # The condition may tell of a ruined model: the user goes on from an older checkpoint.
            self.trainer.writer.keeps_older = self.guard is not None
        self.steps.check(outcome, row)
        self.profiling(step)

        batch_check = self.trainer.batch_check
        wants_stop = self.request.signal is not None or self.guard is not None
        *shared, stops = largest_over_ranks(self.config, [*batch_check.numbers, wants_stop])
        self.is_stopped = stops > 0
        batch_check.hear(shared)

    def _say_of_replay(self) -> None:
        """Say what the check of replayed experts found."""
        check = self.trainer.replay_check
        while check is not None and check.lines:
            self._say(check.lines.pop(0))

    def _say(self, words: str) -> None:
        if self.reporter is not None:
            self.reporter.say(words)


class _Laps:
    """Durations of the parts of a rollout batch so far, in ``times`` as ``perf/<part>_seconds``."""

    def __init__(self) -> None:
        self.times: dict[str, float] = {}
        self._begun = time.monotonic()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Context that measures a part; the time of an earlier part of that name is replaced."""
        begun = time.monotonic()
        yield
        self.times[f"perf/{name}_seconds"] = time.monotonic() - begun

    def seconds_without(self, *parts: str) -> float:
        """Seconds since the beginning, without these parts."""
        seconds = time.monotonic() - self._begun
        return seconds - sum(self.times.get(f"perf/{part}_seconds", 0.0) for part in parts)


def _check_rows(config: RunConfig) -> None:
    """Refuse, on every rank, other rows of ``--prompt-data`` than on other machines.

    Collectives: :func:`largest_over_ranks`.
    """
    digest = config.data.rows_digest
    if digest is None:
        return
    highest, lowest = largest_over_ranks(config, [digest, -digest])
    if highest != -lowest:
        raise RunError("the files of --prompt-data and --eval-data differ between machines: copy them again")


def _check_start(config: RunConfig, iteration: int) -> None:
    """Compare the run with the checkpoint that it resumes; raises ValueError on every rank if no steps are left."""
    load = config.checkpoints.load
    last = config.training.train_iters
    if iteration > last:
        raise ValueError(
            f"--load {load}: checkpoint {iteration} is already past --train-iters {last}: give a larger "
            "number, or --finetune to start at step 0 from the checkpoint's weights"
        )
    end = config.logging.profiled_steps[1]
    if config.logging.profile and iteration >= end:
        raise ValueError(f"--profile-step-end {end}: checkpoint {iteration} is already past it: profile later steps")
    warn_of_other_data(config, iteration)


def _how_it_ended(config: RunConfig, trainer: Trainer, request: StopRequest, guard: RunError | None) -> str:
    """The last line of a run's output."""
    files = config.checkpoints
    iteration = trainer.iteration
    if guard is not None:
        done = "stopped by --stop-if"
    elif iteration >= config.training.train_iters:
        done = "finished"
    else:
        done = f"stopped by {request.signal or 'another rank'}"
    saved = f", saved to {files.save}" if files.save else ""
    model = f", model in {hugging_face_folder(files.save_hf, iteration)}" if files.save_hf else ""
    left_out = f" ({trainer.left_out.steps} steps left out)" if trainer.left_out.steps else ""
    return f"{done} at step {iteration}{left_out}{saved}{model}"
