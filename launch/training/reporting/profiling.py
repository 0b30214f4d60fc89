"""``--profile`` and ``--record-memory-history``: files for PyTorch's own viewers, in the run's folder."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.run_config import RunConfig


class Profiling:
    """Recording of some optimizer steps on this rank; a context manager that also writes the files of a shorter run."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._profile: profile | None = None
        self.folder = Path(config.launch.runs_dir) / config.launch.run_name / "profile"
        self.first, self.end = config.logging.profiled_steps
        self._is_wanted = config.logging.profile and dist.get_rank() in (config.logging.profile_ranks or (0,))
        self._begun = self._last = 0
        self._records_memory = config.logging.record_memory_history

    def __call__(self, iteration: int) -> None:
        """Begin, or end and write, after ``iteration`` steps; ConfigurationError if a file could not be written."""
        self._last = iteration
        if self._profile is not None and iteration >= self.end:
            error = self._write()
            if error is not None:
                raise ConfigurationError(error)
        if self._is_wanted and self._profile is None and self.first <= iteration < self.end:
            self._begun = iteration
            activities = [ProfilerActivity.CPU] if self.config.launch.on_cpu else None
            self._profile = profile(activities=activities)
            self._profile.start()

    def __enter__(self) -> Profiling:
        if self._records_memory:
            torch.cuda.memory._record_memory_history()
        return self

    def __exit__(self, *_: object) -> None:
        """Write the files; an error of ``--profile`` is dropped, because the run has ended."""
        self._write()
        if self._records_memory:
            self.folder.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(self.folder / f"memory-rank{dist.get_rank()}.pickle"))

    def _write(self) -> str | None:
        if self._profile is None:
            return None
        recorded, self._profile, self._is_wanted = self._profile, None, False
        recorded.stop()
        path = self.folder / f"rank{dist.get_rank()}-steps{self._begun + 1}-{self._last}.json.gz"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            return f"--profile: {path} could not be written ({error}): make room, or leave the flag out"
        return None
