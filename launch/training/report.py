"""What the user sees: a progress bar, metrics.jsonl, TensorBoard, and at the end a table and a picture."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from megatron_rc.launch.run_config import RunConfig

METRICS_FILE = "metrics.jsonl"
_BAR = {
    "reward": "reward/mean",
    "kl": "rollout_corr/kl",
    "ess": "rollout_corr/rollout_is_eff_sample_size",
    "rejected": "rollout_corr/rollout_rs_masked_fraction",
    "tok/s": "perf/tokens_per_second",
}
_TABLE = (
    "reward/mean",
    "eval/exact_match",
    "rollout_corr/kl",
    "rollout_corr/k3_kl",
    "rollout_corr/rollout_is_eff_sample_size",
    "rollout_corr/rollout_is_raw_max",
    "rollout_corr/rollout_rs_masked_fraction",
    "policy/entropy",
    "grad_norm",
    "perf/tokens_per_second",
)
_QUIET_SECONDS = 2.0
_AVERAGED = 10


class Reporter:
    """Writes a run's folder and talks to the terminal; made on one rank only.

    Args:
        config: of the run.
        iteration: optimizer steps that lie behind.

    Files in ``<runs-dir>/<run-name>/``: ``metrics.jsonl``, one flat JSON object an optimizer step, and one
    an evaluation; ``tensorboard/``;
    ``summary.png``. A new run keeps an older metrics file under another name; a resumed one goes on with it.
    """

    def __init__(self, config: RunConfig, iteration: int) -> None:
        self.logging, self.train_iters = config.logging, config.training.train_iters
        self.run_name = config.launch.run_name
        self.folder = Path(config.launch.runs_dir) / self.run_name
        self.rows: list[dict[str, float]] = []
        self.file = self._open(iteration)
        board = Path(self.logging.tensorboard_dir or self.folder / "tensorboard")
        self.board = SummaryWriter(str(board / time.strftime("%Y%m%d-%H%M%S")), purge_step=iteration + 1)
        self.wandb = self._start_wandb()
        terminal = sys.stderr.isatty()
        # Without a width of its own the bar would be empty in a terminal that does not tell its width.
        width = shutil.get_terminal_size((100, 24)).columns
        self.bar = tqdm(total=self.train_iters, initial=iteration, unit="step", disable=not terminal, ncols=width)
        self.started, self.last_line = time.monotonic(), float("-inf")

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Report one optimizer step."""
        self._write({"step": step, **metrics})
        if step % self.logging.log_interval == 0:
            for name, value in metrics.items():
                self.board.add_scalar(name, value, step)
            if self.wandb is not None:
                self.wandb.log(metrics, step=step)
        self.bar.update()
        self.bar.set_postfix_str(self._short(metrics), refresh=False)
        now = time.monotonic()
        if self.bar.disable and now - self.last_line > _QUIET_SECONDS:
            self.say(f"step {step}/{self.train_iters}  {self._short(metrics)}")
            self.last_line = now

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Report an evaluation after ``step`` optimizer steps: a line of its own in the metrics file."""
        self._write({"step": step, **metrics})
        for name, value in metrics.items():
            self.board.add_scalar(name, value, step)
        if self.wandb is not None:
            self.wandb.log(metrics, step=step)
        self.say(f"step {step}/{self.train_iters}  held out: {metrics['eval/exact_match']:.1%} right")

    def say(self, text: str) -> None:
        """A line of text that does not break the bar."""
        tqdm.write(text, file=sys.stderr)
        sys.stderr.flush()

    def close(self, note: str) -> None:
        """The table and the picture of the run, and where everything lies."""
        self.bar.close()
        self.file.close()
        self.board.close()
        if self.wandb is not None:
            self.wandb.finish()
        if self.rows:
            seconds = time.monotonic() - self.started
            self.say(f"\n{note} after {seconds:.0f} s\n\n{self._table()}\n")
            self._picture()
            self.say(f"metrics {self.folder / METRICS_FILE}\npicture {self.folder / 'summary.png'}")
        else:
            self.say(note)

    def _write(self, row: dict[str, float]) -> None:
        self.rows.append(row)
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()

    def _open(self, iteration: int) -> TextIO:
        path = self.folder / METRICS_FILE
        kept: list[str] = []
        if path.is_file():
            if iteration:
                lines = path.read_text(encoding="utf-8").splitlines()
                kept = [line for line in lines if 0 <= _step_of(line) <= iteration]
            else:
                stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(path.stat().st_mtime))
                path.replace(self.folder / f"metrics-{stamp}.jsonl")
        file: TextIO = path.open("w", encoding="utf-8")
        file.writelines(line + "\n" for line in kept)
        return file

    def _start_wandb(self) -> Any:
        if not self.logging.wandb_project:
            return None
        wandb = importlib.import_module("wandb")
        name = self.logging.wandb_exp_name or self.run_name
        return wandb.init(project=self.logging.wandb_project, name=name, dir=str(self.folder))

    @staticmethod
    def _short(metrics: dict[str, float]) -> str:
        return "  ".join(f"{short} {metrics[name]:.3g}" for short, name in _BAR.items() if name in metrics)

    def _table(self) -> str:
        lines = [f"{'metric':<44}{'first step':>12}{f'last {_AVERAGED} steps':>15}"]
        for name in _TABLE:
            values = [row[name] for row in self.rows if name in row]
            if values:
                last = values[-1:] if name.startswith("eval/") else values[-_AVERAGED:]
                lines.append(f"{name:<44}{values[0]:>12.4g}{sum(last) / len(last):>15.4g}")
        return "\n".join(lines)

    def _picture(self) -> None:
        from megatron_rc.launch.training.picture import draw_run

        draw_run(self.folder / METRICS_FILE, self.folder / "summary.png")


def _step_of(line: str) -> int:
    """The step of one line; -1 for a line that was cut off when the run was killed."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return -1
