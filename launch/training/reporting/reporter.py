"""Reports on a run: lines on the terminal, metrics.jsonl, boards, and at the end a table, a page and a picture."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import torch.distributed as dist

from megatron_rc.doctor.watch import Watch
from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.rewards.rewarder import errors_file
from megatron_rc.launch.rollouts.evaluation import in_words
from megatron_rc.launch.rollouts.samples import bad_folder
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.set_aside import set_aside
from megatron_rc.launch.training.reporting import picture
from megatron_rc.launch.training.reporting.boards import Distributions, TensorBoard, WandB
from megatron_rc.launch.training.reporting.first_batch import warn_of_bounds
from megatron_rc.launch.training.reporting.metrics_file import METRICS_FILE, MetricsFile, read_rows
from megatron_rc.launch.training.reporting.run_page.page import PAGE, write_page
from megatron_rc.launch.training.reporting.series import collect, usual_names
from megatron_rc.launch.training.reporting.terminal import IN_TABLE, Progress, table


def begin_report(config: RunConfig, iteration: int) -> Reporter | None:
    """Make the reporter on rank 0; None on other ranks. Raises ConfigurationError on rank 0."""
    folder = Path(config.launch.runs_dir) / config.launch.run_name
    try:
        return Reporter(config, iteration) if dist.get_rank() == 0 else None
    except (OSError, ValueError) as error:
        raise ConfigurationError(_in_words(error, folder)) from error


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


def _in_words(error: BaseException, folder: Path) -> str:
    if not isinstance(error, OSError):
        return str(error)
    return f"the metrics in {folder} cannot be written ({error.strerror}): make room, or choose another --runs-dir"


class Reporter:
    """Writes a run's folder and the terminal's lines; exists on rank 0 only.

    Files in ``<runs-dir>/<run-name>/``: ``metrics.jsonl``, with a row for each optimizer step and each evaluation;
    ``tensorboard/``; ``report.html``; ``summary.png``; ``wandb/`` and ``wandb-id.txt`` with Weights & Biases. If a file
    could not be written, ``error`` says so; the run must then end on all ranks.
    """

    def __init__(self, config: RunConfig, iteration: int) -> None:
        self.config, self.prefix, self.first_step = config, config.correction.metric_prefix, iteration + 1
        self.folder = Path(config.launch.runs_dir) / config.launch.run_name
        self.metrics = MetricsFile(self.folder / METRICS_FILE, iteration)
        for path in (errors_file(config), bad_folder(config)):
            if not iteration and path.exists():
                set_aside(path)
        self.board = TensorBoard(config, self.folder, iteration)
        self.wandb = self._start_wandb(iteration)
        self.progress = Progress(config.training.train_iters, iteration)
        self.started = time.monotonic()
        self.doctor = _doctor(config)

    def step(self, step: int, metrics: dict[str, float], distributions: Distributions = MappingProxyType({})) -> None:
        """Report an optimizer step: its metrics, and histograms for TensorBoard and Weights & Biases."""
        self._write(step, metrics, distributions, is_logged=step % self.config.logging.log_interval == 0)
        usual = usual_names(metrics, self.prefix)
        self.progress.step(usual)
        warning = warn_of_bounds(usual, self.config.correction) if step == self.first_step else None
        for words in (warning, self.doctor.step(step, metrics) if self.doctor is not None else None):
            if words is not None:
                self.say(words)

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Report an evaluation after ``step`` optimizer steps; it has its own row in the metrics file."""
        self._write(step, metrics, {})
        self.say(f"step {step}/{self.config.training.train_iters}  {in_words(metrics)}")

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
        rows = (usual_names(row, self.prefix) for row in read_rows(self.metrics.path))
        series = collect(rows, ("step", *IN_TABLE))
        if not series:
            self.say(f"{note}\nreport {self._written(PAGE, write_page, self.folder, f'{note}{why}')}")
            return
        self.say(f"\n{note} after {seconds:.0f} s\n\n{table(series)}\n")
        page = self._written(PAGE, write_page, self.folder, f"{note}{why}, after {seconds:.0f} s")
        drawn = self._written(picture.PICTURE, picture.draw_run, self.folder, self.config.launch.run_name, self.prefix)
        self.say(f"metrics {self.metrics.path}\nreport {page}\npicture {drawn}")
        if self.wandb is not None:
            self.say(f"W&B {self.wandb.place}")

    def _write(
        self, step: int, metrics: dict[str, float], distributions: Distributions, *, is_logged: bool = True
    ) -> None:
        try:
            is_same = self.metrics.write({"step": step, **metrics})
            if not is_same:
                self.say(
                    f"{self.metrics.path} was removed or replaced under way: its rows go on from step {step} in the "
                    "file that is there now"
                )
            if is_logged:
                self.board.log(step, metrics, distributions)
        except OSError as error:
            raise ConfigurationError(_in_words(error, self.folder)) from error
        if is_logged and self.wandb is not None:
            with self._without_wandb():
                self.wandb.log(step, metrics, distributions)

    def _start_wandb(self, iteration: int) -> WandB | None:
        try:
            return WandB(self.config, self.folder, iteration) if self.config.logging.wandb_project else None
        except Exception as error:  # wandb may raise anything, and the other ranks must know
            raise ValueError(f"{self._of_wandb(error)}: repair it, or leave the flag out") from error

    def _of_wandb(self, error: Exception) -> str:
        why = " ".join(str(error).split())
        return f"--wandb-project {self.config.logging.wandb_project} failed ({type(error).__name__}: {why})"

    @contextmanager
    def _without_wandb(self) -> Iterator[None]:
        """Context that disables Weights & Biases, with a message, if it fails; the run goes on."""
        try:
            yield
        except Exception as error:  # wandb may raise anything
            self.wandb = None
            self.say(f"{self._of_wandb(error)}: the run goes on without it; {METRICS_FILE} is complete")

    def _written(self, name: str, write: Callable[..., object], *given: object) -> str:
        """Write a file about the whole run; return its path, or the reason why there is none."""
        path = self.folder / name
        try:
            write(*given)
        except Exception as error:  # a run's files may hold anything, and must not fail a run that has ended
            why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            return f"{path} could not be written ({why})"
        return str(path)
