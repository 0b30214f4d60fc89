"""A run for TensorBoard and for Weights & Biases: names in sections, histograms, and the settings."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from megatron_rc.launch.environment import environment
from megatron_rc.launch.resolved_file import as_launch_file, as_mapping
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.measures.histogram import Distribution

Distributions = Mapping[str, Distribution]

WANDB_ID = "wandb-id.txt"
_TIMERS = ("-time", "-share")
# What Weights & Biases may take to upload what is left when the run ends: the rest lies on the disk for `wandb sync`.
_UPLOAD_SECONDS = 120.0
# Lines of several metrics in one chart, in TensorBoard's tab "Custom Scalars"; regular expressions that match from the
# first letter of a name on.
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
    """The name of a metric on a board, which makes a section of what is before the first ``/``."""
    if "/" in name:
        return name
    return f"timers/{name}" if name.endswith(_TIMERS) else f"optimizer/{name}"


class TensorBoard:
    """Scalars, histograms, and the settings as text.

    Args:
        config: of the run.
        folder: of the run, where ``--tensorboard-dir`` names no other.
        iteration: optimizer steps that lie behind; what the board has of later ones is forgotten.

    Attributes:
        writer: of this process's file.
    """

    def __init__(self, config: RunConfig, folder: Path, iteration: int) -> None:
        board = Path(config.logging.tensorboard_dir or folder / "tensorboard")
        self.writer = SummaryWriter(str(board / time.strftime("%Y%m%d-%H%M%S")), purge_step=iteration + 1)
        self.writer.add_text("config", f"```yaml\n{as_launch_file(config.flags)}```", iteration)
        charts = {title: {name: ["Multiline", tags] for name, tags in of.items()} for title, of in _CHARTS.items()}
        self.writer.add_custom_scalars(charts)

    def log(self, step: int, metrics: Mapping[str, float], distributions: Distributions) -> None:
        """The numbers of a step; quantiles of what is there as a histogram are drawn from that, by "Distributions"."""
        for name, value in metrics.items():
            if re.sub(r"_p\d\d$", "", name) not in distributions:
                self.writer.add_scalar(in_section(name), value, step)
        for name, (edges, counts) in distributions.items():
            centres = [(low + high) / 2 for low, high in pairwise(edges)]
            self.writer.add_histogram_raw(
                name,
                min=edges[0],
                max=edges[-1],
                num=sum(counts),
                sum=sum(count * value for count, value in zip(counts, centres, strict=True)),
                sum_squares=sum(count * value**2 for count, value in zip(counts, centres, strict=True)),
                bucket_limits=edges[1:],
                bucket_counts=counts,
                global_step=step,
            )


class WandB:
    """A run of Weights & Biases, which a run that goes on goes on with, too.

    Args:
        config: of the run.
        folder: of the run; keeps the id.
        iteration: optimizer steps that lie behind.

    Attributes:
        place: where it can be looked at, or is kept.

    Raises:
        Exception: any that ``wandb.init`` has.
    """

    def __init__(self, config: RunConfig, folder: Path, iteration: int) -> None:
        self._wandb = importlib.import_module("wandb")
        # Without a key it would ask the terminal for one, and all ranks would wait.
        quiet = self._wandb.Settings(show_info=False, quiet=True, finish_timeout=_UPLOAD_SECONDS)
        self._wandb.setup(settings=quiet)
        wanted, id_file = config.logging, folder / WANDB_ID
        files = Path(wanted.wandb_save_dir or folder)
        files.mkdir(parents=True, exist_ok=True)
        self._run = self._wandb.init(
            project=wanted.wandb_project,
            entity=wanted.wandb_entity,
            name=wanted.wandb_exp_name or config.launch.run_name,
            dir=str(files),
            config=as_mapping(config.flags) | environment(),
            id=id_file.read_text(encoding="utf-8").strip() if iteration and id_file.is_file() else None,
            resume="allow",
            settings=quiet,
        )
        id_file.write_text(f"{self._run.id}\n", encoding="utf-8")
        place = self._run.settings.sync_dir if self._run.offline else self._run.url
        self.place = place or "has nothing, by WANDB_MODE"

    def log(self, step: int, metrics: Mapping[str, float], distributions: Distributions) -> None:
        """The numbers of a step."""
        found: dict[str, Any] = {in_section(name): value for name, value in metrics.items()}
        found |= {
            name: self._wandb.Histogram(np_histogram=(counts, edges)) for name, (edges, counts) in distributions.items()
        }
        self._run.log(found, step=step)

    def finish(self, code: int) -> None:
        """Nothing more is logged; 0 says that all went well."""
        self._run.finish(exit_code=code)
