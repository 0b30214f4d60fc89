"""When a run writes checkpoints, and what becomes of it where one cannot be written."""

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

    Args:
        config: of the run.
        trainer: that makes the steps.

    Attributes:
        begun: steps that lay behind at the start.
        saved: step of the newest one; −1: none.
        metrics: how long training waited for the last one; reported with the step after it.
    """

    def __init__(self, config: RunConfig, trainer: Trainer) -> None:
        self.files, self.trainer = config.checkpoints, trainer
        self.begun = trainer.iteration
        self.saved = trainer.iteration if self.files.is_save(self.files.load) else -1
        self.metrics: dict[str, float] = {}

    def __enter__(self) -> CheckpointSaves:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Where all ranks end together by an error, their weights are as good as before it: they are kept.

        A checkpoint under way becomes whole. The error's sentence goes on with where the steps are that were made. None
        that is older is removed: where the error tells of a model that is ruined, it is what the user goes on from.
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
        error.args = (f"{error}; checkpoint {step} in {save} holds the steps before that{self._older(step)}",)

    def _older(self, step: int) -> str:
        """The last checkpoint before that of an error, in words, as all ranks know it; a new run has none."""
        return f", the one before it is {self.saved}" if 0 < self.saved < step else ""

    def on_the_way(self) -> None:
        """After a step: begin what is due, go on with what is under way."""
        interval, step = self.files.save_interval, self.trainer.iteration
        is_due = bool(self.files.save and interval and step % interval == 0)
        began = time.monotonic()
        if is_due:
            # By itself: where the one before fails and the run goes on, the one that is due is written all the same.
            self._attempt(self.trainer.writer.finish)
        if not self._attempt(self.trainer.save if is_due else self.trainer.writer.look):
            self.saved = -1
        elif is_due:
            self.saved = step
        self.metrics = {"perf/save_seconds": time.monotonic() - began} if is_due else {}

    def at_the_end(self) -> None:
        """The last step, unless it is saved already."""
        if not self._attempt(self.trainer.writer.finish):
            self.saved = -1
        if self.files.save and self.saved != self.trainer.iteration:
            self.trainer.save()
            self.trainer.writer.finish()

    def _attempt(self, work: Callable[[], None], *, is_ending: bool = False) -> bool:
        """Whether it worked; where it did not, the run goes on by flag, or because it ends by another error."""
        try:
            work()
        except SaveError as error:
            if not (is_ending or self.files.continue_after_failed_save):
                raise
            if dist.get_rank() == 0:
                _log.warning("%s; the run goes on", error)
            return False
        return True
