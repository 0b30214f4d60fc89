"""Times of a run's checkpoints, and the run's reaction to a failed save."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch.distributed as dist

from megatron_rc.launch.distributed import AgreedError
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.checkpoints.save import SaveError
from megatron_rc.launch.training.trainer import Trainer

_log = logging.getLogger("megatron_rc")


class CheckpointSaves:
    """Checkpoints on the way and at the end.

    Attributes:
        begun: steps made before this start.
        saved: step of the newest checkpoint; −1: none.
        metrics: time that training waited for the last checkpoint; reported with the next step.
    """

    def __init__(self, config: RunConfig, trainer: Trainer) -> None:
        self.files, self.trainer = config.checkpoints, trainer
        self.begun = trainer.iteration
        self.saved = trainer.iteration if self.files.is_save(self.files.load) else -1
        self.metrics: dict[str, float] = {}

    def __enter__(self) -> CheckpointSaves:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Save the present weights if all ranks end by one error, and add the checkpoint's place to its sentence.

        The checkpoint under way is finished. No older one is removed: if the error tells of a ruined model, the user
        goes on from an older checkpoint.
        """
        if not isinstance(error, AgreedError):
            return
        step, save = self.trainer.iteration, self.files.save
        self.trainer.writer.keeps_older = True
        finished = self._attempt(self.trainer.writer.finish, is_ending=True)
        if save is None or step == self.begun or isinstance(error, SaveError):
            return
        if self.saved != step or not finished:
            try:
                self.trainer.save()
                self.trainer.writer.finish()
            except AgreedError as second:
                error.args = (f"{error}; {second}",)
                return
        older = f", the one before it is {self.saved}" if 0 < self.saved < step else ""
        error.args = (f"{error}; checkpoint {step} in {save} holds the steps before that{older}",)

    def on_the_way(self) -> None:
        """Begin a checkpoint that is due after this step, or go on with the one under way."""
        interval, step = self.files.save_interval, self.trainer.iteration
        is_due = bool(self.files.save and interval and step % interval == 0)
        began = time.monotonic()
        if is_due:
            # An attempt of its own: a failure of the checkpoint before does not stop the one that is due.
            self._attempt(self.trainer.writer.finish)
        if not self._attempt(self.trainer.save if is_due else self.trainer.writer.look):
            self.saved = -1
        elif is_due:
            self.saved = step
        self.metrics = {"perf/save_seconds": time.monotonic() - began} if is_due else {}

    def at_the_end(self) -> None:
        """Save the last step, unless a checkpoint has it."""
        if not self._attempt(self.trainer.writer.finish):
            self.saved = -1
        if self.files.save and self.saved != self.trainer.iteration:
            self.trainer.save()
            self.trainer.writer.finish()

    def _attempt(self, work: Callable[[], None], *, is_ending: bool = False) -> bool:
        """Do the work; return False after a failure if the run goes on by flag or ends by another error."""
        try:
            work()
        except SaveError as error:
            if not (is_ending or self.files.continue_after_failed_save):
                raise
            if dist.get_rank() == 0:
                _log.warning("%s; the run goes on", error)
            return False
        return True
