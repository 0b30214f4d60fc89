"""Reports on a run: lines on the terminal, metrics.jsonl, boards, and at the end a table, a page and a picture."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import torch.distributed as dist

from megatron_rc.doctor.watch import Watch
from megatron_rc.launch.errors import ConfigurationError, one_line
from megatron_rc.launch.rewards.rewarder import errors_file
from megatron_rc.launch.rollouts.evaluation import in_words
from megatron_rc.launch.rollouts.samples import bad_folder
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.set_aside import set_aside
from megatron_rc.launch.training.reporting.boards import Distributions, TensorBoard, WandB
from megatron_rc.launch.training.reporting.first_batch import warn_of_bounds
from megatron_rc.launch.training.reporting.metrics_file import METRICS_FILE, MetricsFile
from megatron_rc.launch.training.reporting.run_page import PAGE, PICTURE, draw_run, history_of
from megatron_rc.launch.training.reporting.series import usual_names
from megatron_rc.launch.training.reporting.terminal import Progress, table


def begin_report(config: RunConfig, iteration: int) -> Reporter | None:
    """Make the reporter on rank 0; None on other ranks.

    Raises:
        ConfigurationError: on rank 0 alone, if the run's folder cannot be written, or Weights & Biases cannot begin.
    """
    return Reporter(config, iteration) if dist.get_rank() == 0 else None


class Reporter:
    """Writes a run's folder and the terminal's lines; exists on rank 0 only.

    Files in ``<runs-dir>/<run-name>/``: ``metrics.jsonl``, with a row for each optimizer step and each evaluation;
    ``tensorboard/``; ``report.html``; ``summary.png``; ``wandb/`` and ``wandb-id.txt`` with Weights & Biases.

    Args:
        config: the run's settings.
        iteration: optimizer steps that were made before, by the run that this one resumes.

    Raises:
        ConfigurationError: a file of the run cannot be written, also by ``step`` and ``evaluation``; or Weights &
            Biases cannot begin.
    """

    def __init__(self, config: RunConfig, iteration: int) -> None:
        self.config = config
        self.prefix = config.correction.metric_prefix
        self.first_step = iteration + 1
        self.folder = Path(config.launch.runs_dir) / config.launch.run_name
        with self._needs_folder():
            self.metrics = MetricsFile(self.folder / METRICS_FILE, iteration)
            for path in (errors_file(config), bad_folder(config)):
                if not iteration and path.exists():
                    set_aside(path)
            self.board = TensorBoard(config, self.folder, iteration)
        self.wandb = self._start_wandb(iteration)
        self.progress = Progress(config.training.train_iters, iteration)
        self.started = time.monotonic()
        self.doctor = _doctor(config)
        self._is_closed = False

    def step(self, step: int, metrics: dict[str, float], distributions: Distributions = MappingProxyType({})) -> None:
        """Report an optimizer step: its metrics, and histograms for TensorBoard and Weights & Biases."""
        is_logged = step % self.config.logging.log_interval == 0
        with self._needs_folder():
            self.metrics.write({"step": step, **metrics})
            if is_logged:
                self.board.log(step, metrics, distributions)
        if is_logged:
            self._log_to_wandb(step, metrics, distributions)

        usual = usual_names(metrics, self.prefix)
        self.progress.step(usual, is_logged=is_logged)
        warning = warn_of_bounds(usual, self.config.correction) if step == self.first_step else None
        verdict = self.doctor.step(step, metrics) if self.doctor is not None else None
        for message in (warning, verdict):
            if message is not None:
                self.say(message)

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Report an evaluation after ``step`` optimizer steps; it has its own row in the metrics file."""
        self.say(f"step {step}/{self.config.training.train_iters}  {in_words(metrics)}")
        try:
            with self._needs_folder():
                self.metrics.write({"step": step, **metrics})
                self.board.log(step, metrics, {})
        except ConfigurationError as error:
            # The last evaluation follows the last save, after which nothing may fail the run.
            if step < self.config.training.train_iters:
                raise
            self.say(str(error))
        self._log_to_wandb(step, metrics, {})

    def say(self, text: str) -> None:
        """Write a line of text above the bar."""
        self.progress.say(text)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object = None, *_: object) -> None:
        """Close the report of a run that failed."""
        if kind is not None:
            self.close(f"failed after step {self.progress.done}", code=1, why=f": {error}" if error else "")

    def close(self, note: str, code: int = 0, why: str = "") -> None:
        """Say how the run ended, then close all files, and write the table, the page and the picture.

        The run has ended: a file that cannot be written is one line, and never an error. A second call does nothing.

        Args:
            note: how the run ended, with the word about its checkpoint.
            code: 0 tells Weights & Biases of a success.
            why: more about a failure, for the page alone, because the launcher says it too.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self.progress.close()
        seconds = time.monotonic() - self.started
        has_steps = self.progress.done >= self.first_step
        self.say(f"\n{note} after {seconds:.0f} s" if has_steps else note)
        with self._best_effort(f"the report in {self.folder} is incomplete"):
            self._draw(f"{note}{why}, after {seconds:.0f} s")
        with self._best_effort(f"TensorBoard's files in {self.board.writer.log_dir} are incomplete"):
            self.board.writer.close()
        if self.wandb is not None:
            with self._without_wandb():
                self.wandb.finish(code)
                self.say(f"W&B {self.wandb.place}")

    def _draw(self, ending: str) -> None:
        """Write the table, the page and the picture from the run's files; a missing matplotlib costs the last two."""
        history, settings = history_of(self.folder)
        if history.num_steps:
            self.say(f"\n{table(history.series)}\n\nmetrics {self.metrics.path}")
        with self._best_effort(f"{self.folder / PAGE} and {PICTURE} could not be written"):
            draw_run(self.folder, history, settings, ending)
            self.say(f"report {self.folder / PAGE}")
            if history.series:
                self.say(f"picture {self.folder / PICTURE}")

    @contextmanager
    def _needs_folder(self) -> Iterator[None]:
        """Context that turns an error of the run's files into a sentence with the remedy."""
        try:
            yield
        except OSError as error:
            message = f"the metrics in {self.folder} cannot be written ({error.strerror})"
            raise ConfigurationError(f"{message}: make room, or choose another --runs-dir") from error

    @contextmanager
    def _best_effort(self, failure: str) -> Iterator[None]:
        """Context in which an error is a line; for what is written after the run has ended."""
        try:
            yield
        except Exception as error:  # a run's files may hold anything
            self.say(f"{failure} ({getattr(error, 'strerror', None) or one_line(error)})")

    def _start_wandb(self, iteration: int) -> WandB | None:
        if not self.config.logging.wandb_project:
            return None
        try:
            return WandB(self.config, self.folder, iteration)
        except Exception as error:  # wandb may raise anything
            raise ConfigurationError(f"{self._wandb_failure(error)}: repair it, or leave the flag out") from error

    def _log_to_wandb(self, step: int, metrics: Mapping[str, float], distributions: Distributions) -> None:
        if self.wandb is not None:
            with self._without_wandb():
                self.wandb.log(step, metrics, distributions)

    @contextmanager
    def _without_wandb(self) -> Iterator[None]:
        """Context that disables Weights & Biases, with a message, if it fails; the run goes on."""
        try:
            yield
        except Exception as error:  # wandb may raise anything
            self.wandb = None
            self.say(f"{self._wandb_failure(error)}: the run goes on without it; {METRICS_FILE} is complete")

    def _wandb_failure(self, error: Exception) -> str:
        why = " ".join(str(error).split())
        return f"--wandb-project {self.config.logging.wandb_project} failed ({type(error).__name__}: {why})"


def _doctor(config: RunConfig) -> Watch | None:
    interval = config.guards.doctor_interval
    correction = config.correction
    if interval is None:
        return None
    settings = {
        "policy-loss": str(config.loss.algorithm),
        "rollout-is": str(correction.rollout_is),
        "rollout-is-apply": str(correction.rollout_is_apply).lower(),
        "grpo-entropy-term-weight": str(config.loss.entropy_coef),
    }
    return Watch(interval, settings, correction.metric_prefix)
