"""Reports on a run: lines on the terminal, metrics.jsonl, boards, and at the end a table, a page and a picture."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import torch.distributed as dist

from megatron_rc.doctor.watch import Watch
from megatron_rc.launch.distributed import failing_together
from megatron_rc.launch.rewards.rewarder import errors_file
from megatron_rc.launch.rollouts.evaluation import in_words
from megatron_rc.launch.rollouts.samples import bad_folder
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.set_aside import set_aside
from megatron_rc.launch.training.reporting.boards import Distributions, TensorBoard, WandB
from megatron_rc.launch.training.reporting.first_batch import warn_of_bounds
from megatron_rc.launch.training.reporting.metrics_file import METRICS_FILE, MetricsFile, read_rows, read_rows_backwards
from megatron_rc.launch.training.reporting.run_page.page import PAGE, write_page
from megatron_rc.launch.training.reporting.series import collect, usual_names
from megatron_rc.launch.training.reporting.terminal import IN_TABLE, Progress, table


def begin_report(config: RunConfig, iteration: int) -> Reporter | None:
    """Make the reporter on rank 0; None on other ranks. Raises AgreedError on every rank if rank 0 cannot make it."""

    def reason(problem: BaseException) -> str:
        folder = Path(config.launch.runs_dir) / config.launch.run_name
        return _of_files(folder, problem) if isinstance(problem, OSError) else str(problem)

    with failing_together(config, (OSError, ValueError), reason):
        return Reporter(config, iteration) if dist.get_rank() == 0 else None


def _doctor(config: RunConfig) -> Watch | None:
    interval, correction = config.guards.doctor_interval, config.correction
    if interval is None:
        return None
    settings = {
        "policy-loss": str(config.loss.algorithm),
        "rollout-is": str(correction.rollout_is),
        "rollout-is-apply": str(correction.rollout_is_apply).lower(),
        "grpo-entropy-term-weight": str(config.loss.entropy_coef),
    }
    return Watch(interval, settings, correction.metric_prefix)


def _of_files(folder: Path, error: OSError) -> str:
    return f"the metrics in {folder} cannot be written ({error.strerror}): make room, or choose another --runs-dir"


def _of_wandb(project: str | None, error: Exception) -> str:
    why = " ".join(str(error).split())
    return f"--wandb-project {project} failed ({type(error).__name__}: {why})"


class Reporter:
    """Writes a run's folder and the terminal's lines; exists on rank 0 only.

    Files in ``<runs-dir>/<run-name>/``: ``metrics.jsonl``, with a row for each optimizer step and each evaluation;
    ``tensorboard/``; ``report.html``; ``summary.png``; ``wandb/`` and ``wandb-id.txt`` with Weights & Biases. If a file
    could not be written, ``error`` says so; the run must then end on all ranks.
    """

    def __init__(self, config: RunConfig, iteration: int) -> None:
        self.logging, self.train_iters = config.logging, config.training.train_iters
        self.run_name = config.launch.run_name
        self.correction, self.prefix = config.correction, config.correction.metric_prefix
        self.first_step = iteration + 1
        self.folder = Path(config.launch.runs_dir) / self.run_name
        self.metrics = MetricsFile(self.folder / METRICS_FILE, iteration)
        for path in (errors_file(config), bad_folder(config)):
            if not iteration and path.exists():
                set_aside(path)
        self.board = TensorBoard(config, self.folder, iteration)
        self.wandb = self._start_wandb(config, iteration)
        self.progress = Progress(self.train_iters, iteration)
        self.started = time.monotonic()
        self.error: str | None = None
        self.doctor = _doctor(config)

    def step(self, step: int, metrics: dict[str, float], distributions: Distributions = MappingProxyType({})) -> None:
        """Report an optimizer step: its metrics, and histograms for TensorBoard and Weights & Biases."""
        self._write(step, metrics, distributions, is_logged=step % self.logging.log_interval == 0)
        usual = usual_names(metrics, self.prefix)
        self.progress.step(usual)
        warning = warn_of_bounds(usual, self.correction) if step == self.first_step else None
        if warning is not None:
            self.say(warning)
        words = self.doctor.step(step, metrics) if self.doctor is not None else None
        if words is not None:
            self.say(words)

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Report an evaluation after ``step`` optimizer steps; it has its own row in the metrics file."""
        self._write(step, metrics, {})
        self.say(f"step {step}/{self.train_iters}  {in_words(metrics)}")

    def rows_backwards(self) -> Iterator[dict[str, float]]:
        """Rows of the metrics file so far, the last one first."""
        return read_rows_backwards(self.metrics.path) if self.metrics.path.is_file() else iter(())

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
        """Close all files; write the table, the page and the picture, and their paths.

        ``note`` and ``why`` say how the run ended, ``why`` on the page alone; ``code`` 0 tells W&B of a success.
        """
        self.progress.close()
        self.metrics.close()
        try:
            self.board.writer.close()
        except OSError as error:
            folder = self.board.writer.log_dir
            self.say(f"TensorBoard's files in {folder} are incomplete ({error.strerror}); {METRICS_FILE} is complete")
        if self.wandb is not None:
            with self._without_wandb():
                self.wandb.finish(code)
        seconds = time.monotonic() - self.started
        rows = read_rows(self.metrics.path) if self.metrics.path.is_file() else ()
        series = collect((usual_names(row, self.prefix) for row in rows), ("step", *IN_TABLE))
        if series:
            self.say(f"\n{note} after {seconds:.0f} s\n\n{table(series)}\n")
            page = self._page(f"{note}{why}, after {seconds:.0f} s")
            self.say(f"metrics {self.metrics.path}\nreport {page}\npicture {self._picture()}")
            if self.wandb is not None:
                self.say(f"W&B {self.wandb.place}")
        else:
            self.say(f"{note}\nreport {self._page(f'{note}{why}')}")

    def _write(
        self, step: int, metrics: dict[str, float], distributions: Distributions, *, is_logged: bool = True
    ) -> None:
        try:
            self.metrics.write({"step": step, **metrics})
            if is_logged:
                self.board.log(step, metrics, distributions)
        except OSError as error:
            self.error = _of_files(self.folder, error)
        if is_logged and self.wandb is not None:
            with self._without_wandb():
                self.wandb.log(step, metrics, distributions)

    def _start_wandb(self, config: RunConfig, iteration: int) -> WandB | None:
        project = self.logging.wandb_project
        if not project:
            return None
        try:
            return WandB(config, self.folder, iteration)
        except Exception as error:  # wandb may raise anything, and the other ranks must know
            raise ValueError(f"{_of_wandb(project, error)}: repair it, or leave the flag out") from error

    @contextmanager
    def _without_wandb(self) -> Iterator[None]:
        """Context that disables Weights & Biases, with a message, if it fails; the run goes on."""
        try:
            yield
        except Exception as error:  # wandb may raise anything
            self.wandb = None
            failure = _of_wandb(self.logging.wandb_project, error)
            self.say(f"{failure}: the run goes on without it; {METRICS_FILE} is complete")

    def _page(self, ending: str) -> str:
        """Write the page, and return its path or the reason why there is none."""
        try:
            return str(write_page(self.folder, ending))
        except Exception as error:  # a run's files may hold anything, and a page must not fail the run
            why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            return f"{self.folder / PAGE} could not be written ({why})"

    def _picture(self) -> str:
        """Draw the picture, and return its path or the reason why there is none."""
        from megatron_rc.launch.training.reporting.picture import draw_run

        path = self.folder / "summary.png"
        try:
            draw_run(self.metrics.path, path, self.run_name, self.prefix)
        except OSError as error:
            return f"{path} could not be written ({error.strerror})"
        return str(path)
