"""Times of a run's checkpoints, and the run's reaction to a failed save."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.checkpoints.save import SaveError
from megatron_rc.launch.training.trainer import Trainer

_log = logging.getLogger("megatron_rc")


class CheckpointSaves:
    """Checkpoints on the way and at the end.

    Attributes:
        saved: step of the newest checkpoint; −1: none.
        metrics: time that training waited for the last checkpoint; reported with the next step.
    """

    def __init__(self, config: RunConfig, trainer: Trainer) -> None:
        self.files = config.checkpoints
        self.trainer = trainer
        self.saved = trainer.iteration if self.files.is_save(self.files.load) else -1
        self.metrics: dict[str, float] = {}

    def __enter__(self) -> CheckpointSaves:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Let the checkpoint under way become whole if an error ends the run; steps after it are lost."""
        if isinstance(error, Exception):
            with suppress(SaveError):
                self.trainer.writer.finish()

    def on_the_way(self) -> None:
        """Begin a checkpoint that is due after this step, or end the one under way if it is written."""
        interval = self.files.save_interval
        step = self.trainer.iteration
        is_due = bool(self.files.save and interval and step % interval == 0)
        if not is_due:
            self.metrics = {}
            if not self._attempt(self.trainer.writer.look):
                self.saved = -1
            return
        began = time.monotonic()
        # An attempt of its own: a failure of the checkpoint before does not stop the one that is due.
        self._attempt(self.trainer.writer.finish)
        self.saved = step if self._attempt(self.trainer.save) else -1
        self.metrics = {"perf/save_seconds": time.monotonic() - began}

    def at_the_end(self) -> None:
        """Save the last step, unless a checkpoint has it."""
        if not self._attempt(self.trainer.writer.finish):
            self.saved = -1
        if self.files.save and self.saved != self.trainer.iteration:
            self.trainer.save()
            self.trainer.writer.finish()

    def _attempt(self, work: Callable[[], None]) -> bool:
        """Do the work; return False after a failure with ``--continue-after-failed-save``."""
        try:
            work()
        except SaveError as error:
            if not self.files.continue_after_failed_save:
                raise
            if dist.get_rank() == 0:
                _log.warning("%s; the run goes on", error)
            return False
        return True
