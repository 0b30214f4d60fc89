"""``--profile`` and ``--record-memory-history``: files for PyTorch's own viewers, in the run's folder."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.run_config import RunConfig

_log = logging.getLogger(__name__)


class Profiling:
    """Recording of the steps after ``--profile-step-start``, up to ``--profile-step-end``, on this rank.

    A context manager: at the end it writes the recording of a run that ended before ``--profile-step-end``.

    Args:
        config: the run's settings.
    """

    def __init__(self, config: RunConfig) -> None:
        settings = config.logging
        self.config = config
        self.folder = Path(config.launch.runs_dir) / config.launch.run_name / "profile"
        self.start, self.end = settings.profiled_steps
        # True until this rank has written its recording; ranks that record nothing have False.
        self._is_pending = settings.profile and dist.get_rank() in (settings.profile_ranks or (0,))
        self._records_memory = settings.record_memory_history
        self._profile: profile | None = None  # the recording that is under way
        # Steps in the name of the file: the first one recorded, and the newest.
        self._first_step = 0
        self._last_step = 0

    def __call__(self, iteration: int) -> None:
        """Begin the recording, or end and write it, after ``iteration`` optimizer steps.

        Raises:
            ConfigurationError: on this rank, if the file cannot be written.
        """
        self._last_step = iteration
        if self._profile is not None and iteration >= self.end:
            self._write()
        elif self._is_pending and self._profile is None and self.start <= iteration < self.end:
            self._first_step = iteration + 1
            activities = [ProfilerActivity.CPU] if self.config.launch.on_cpu else None
            self._profile = profile(activities=activities)
            self._profile.start()

    def __enter__(self) -> Profiling:
        if self._records_memory:
            torch.cuda.memory._record_memory_history()
        return self

    def __exit__(self, *_: object) -> None:
        """Write the files that are left; one that cannot be written becomes a warning."""
        try:
            self._write()
        except ConfigurationError as error:
            _log.warning("%s", error)
        if self._records_memory:
            path = self.folder / f"memory-rank{dist.get_rank()}.pickle"
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                torch.cuda.memory._dump_snapshot(str(path))
            except (OSError, RuntimeError) as error:
                _log.warning("--record-memory-history: %s could not be written (%s)", path, error)

    def _write(self) -> None:
        if self._profile is None:
            return
        recorded = self._profile
        self._profile = None
        self._is_pending = False
        recorded.stop()
        path = self.folder / f"rank{dist.get_rank()}-steps{self._first_step}-{self._last_step}.json.gz"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            remedy = "make room, or leave the flag out"
            raise ConfigurationError(f"--profile: {path} could not be written ({error}): {remedy}") from error
