"""TensorBoard and Weights & Biases: metrics in sections, histograms, and the settings."""

from __future__ import annotations

import importlib
import os
import re
import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

from megatron_rc.launch.ending import FOLDER
from megatron_rc.launch.environment import environment
from megatron_rc.launch.resolved_file import as_launch_file, as_mapping
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.measures.histogram import Distribution

Distributions = Mapping[str, Distribution]

WANDB_ID = "wandb-id.txt"
_TIMERS = ("-time", "-share")
_QUANTILE = re.compile(r"_p\d\d$")
# Limit for Weights & Biases to upload the rest at the end of a run; `wandb sync` can do it later.
_UPLOAD_SECONDS = 120.0
# Charts of TensorBoard's tab "Custom Scalars"; TensorBoard matches the expressions at the start of names.
_CHARTS = {
    "learning": {"reward": ["^reward/mean$", "^eval/"], "entropy": ["^policy/entropy$"], "loss": ["^loss/"]},
    "engine and trainer": {
        "KL": [".*/(mismatch_)?(kl|k3_kl)$"],
        "effective sample size": [".*/rollout_is_eff_sample_size$"],
        "rejected tokens": [".*/rollout_rs_([a-z]+_k[123]_)?masked_fraction$"],
    },
    "machine": {
        "share of the time": [r"^perf/\w+_share$"],
        "share of the step, by Megatron's timers": ["^timers/.*-share$"],
        "peak memory": ["^perf/peak_memory_gib$"],
    },
}


def in_section(name: str) -> str:
    """Name of a metric on a board; boards group metrics by the part before the first ``/``."""
    if "/" in name:
        return name
    return f"timers/{name}" if name.endswith(_TIMERS) else f"optimizer/{name}"


class TensorBoard:
    """Writes TensorBoard's files, with torch's SummaryWriter; drops older values of steps that are repeated."""

    def __init__(self, config: RunConfig, folder: Path, iteration: int) -> None:
        board = Path(config.logging.tensorboard_dir or folder / "tensorboard")
        self.writer = SummaryWriter(str(board / time.strftime("%Y%m%d-%H%M%S")), purge_step=iteration + 1)
        self.writer.add_text("config", f"```yaml\n{as_launch_file(config.flags)}```", iteration)
        layout = {
            category: {title: ["Multiline", tags] for title, tags in charts.items()}
            for category, charts in _CHARTS.items()
        }
        self.writer.add_custom_scalars(layout)

    def log(self, step: int, metrics: Mapping[str, float], distributions: Distributions) -> None:
        """Log a step; quantiles of a metric with a histogram are left out, because "Distributions" draws them."""
        values = [
            Summary.Value(tag=in_section(name), simple_value=value)
            for name, value in metrics.items()
            if _QUANTILE.sub("", name) not in distributions
        ]
        # One event for all of them: with add_scalar, each has an event and waits for the writer's lock.
        self.writer.file_writer.add_summary(Summary(value=values), step)  # type: ignore[attr-defined]
        for name, (edges, counts) in distributions.items():
            centres = [(low + high) / 2 for low, high in pairwise(edges)]
            counted = list(zip(counts, centres, strict=True))
            self.writer.add_histogram_raw(
                name,
                min=edges[0],
                max=edges[-1],
                num=sum(counts),
                sum=sum(count * centre for count, centre in counted),
                sum_squares=sum(count * centre**2 for count, centre in counted),
                bucket_limits=edges[1:],
                bucket_counts=counts,
                global_step=step,
            )


def import_wandb() -> Any:
    """Import Weights & Biases with its temporary folders in the launcher's, which outlasts a killed rank."""
    before = tempfile.tempdir
    tempfile.tempdir = os.environ.get(FOLDER) or tempfile.tempdir
    try:
        return importlib.import_module("wandb")
    finally:
        tempfile.tempdir = before


class WandB:
    """Logs to Weights & Biases; a resumed run continues its run there. ``place``: URL of the run, or its folder."""

    def __init__(self, config: RunConfig, folder: Path, iteration: int) -> None:
        self._wandb = import_wandb()
        # Never ask for a key on the terminal, because all ranks would wait.
        quiet = self._wandb.Settings(show_info=False, quiet=True, finish_timeout=_UPLOAD_SECONDS)
        self._wandb.setup(settings=quiet)
        logging = config.logging
        id_file = folder / WANDB_ID
        files = Path(logging.wandb_save_dir or folder)
        files.mkdir(parents=True, exist_ok=True)
        self._run = self._wandb.init(
            project=logging.wandb_project,
            entity=logging.wandb_entity,
            name=logging.wandb_exp_name or config.launch.run_name,
            dir=str(files),
            config=as_mapping(config.flags) | environment(),
            id=id_file.read_text(encoding="utf-8").strip() if iteration and id_file.is_file() else None,
            resume="allow",
            settings=quiet,
        )
        id_file.write_text(f"{self._run.id}\n", encoding="utf-8")
        address = self._run.settings.sync_dir if self._run.offline else self._run.url
        self.place = address or "got nothing, because WANDB_MODE disables it"

    def log(self, step: int, metrics: Mapping[str, float], distributions: Distributions) -> None:
        """Log the metrics and histograms of a step."""
        logged: dict[str, Any] = {in_section(name): value for name, value in metrics.items()}
        for name, (edges, counts) in distributions.items():
            logged[name] = self._wandb.Histogram(np_histogram=(counts, edges))
        self._run.log(logged, step=step)

    def finish(self, code: int) -> None:
        """End the run with an exit code; 0 means success."""
        self._run.finish(exit_code=code)
