"""Saving: a checkpoint gets its name when it is whole, on the disk and listed with its checksums."""

from __future__ import annotations

import json
import logging
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.utils import _DistWrapper

from megatron_rc.launch import checkpoint_folders as folders
from megatron_rc.launch import phases
from megatron_rc.launch.errors import RunError
from megatron_rc.launch.flags.saved_settings import SETTINGS, settings_text
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.training import CheckpointSection
from megatron_rc.launch.training.checkpoints.checksums import Checksums, checksums_of_rank, write_manifest
from megatron_rc.launch.training.checkpoints.contents import CRITIC, PROGRESS, Kept
from megatron_rc.launch.training.checkpoints.strategy import FORMAT, FORMAT_VERSION, ThreadedSaveStrategy, reason_of

# A write that stands still ends the run so long after the time limit of a collective, which names the cause if it can.
_GRACE_SECONDS = 15.0
_LOOK_SECONDS = 1.0
_log = logging.getLogger("megatron_rc")


class SaveError(RunError):
    """A checkpoint could not be written; older ones are unchanged. Every rank raises it, each when it looks."""


class CheckpointWriter:
    """Writer of checkpoints to ``--save`` by a thread of each rank; waits for it unless ``--async-save``.

    Attributes:
        pending: the checkpoint under way; None: there is none.
        keeps_older: remove no checkpoint after the next save, whatever ``--keep-last`` says.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.keeps_older = False
        self.pending: PendingCheckpoint | None = None
        self._timeout = timedelta(minutes=config.launch.distributed_timeout_minutes)
        self._ranks: dist.ProcessGroup | None = None

    def save(self, iteration: int, kept: Kept) -> None:
        """Write a checkpoint of this optimizer step, and its number in the tracker file; ``--async-save`` only begins.

        Raises:
            SaveError: this checkpoint, or the one under way, could not be written; older ones are unchanged.
            RunError: a weight is not finite, on this rank; such a model is never saved.
        """
        phases.enter(f"the saving of step {iteration}")
        self.finish()
        for name, trained in kept.trained():
            _check_weights(iteration, trained.model, name)
        if self._ranks is None:
            self._ranks = dist.new_group(backend="gloo", timeout=self._timeout)
        pending = PendingCheckpoint(self.config, iteration, self._ranks, keeps_older=self.keeps_older)
        try:
            pending.prepare(kept)
        except CheckpointException as error:
            raise self._given_up(pending, error) from error
        self.pending = pending
        pending.start()
        if not self.config.checkpoints.async_save:
            self.finish()

    def look(self) -> None:
        """End a checkpoint whose writing is over, without waiting; SaveError if it could not be written."""
        pending = self.pending
        if pending is None:
            return
        if pending.is_alive():
            seconds = time.monotonic() - pending.moved_at
            if seconds > self._timeout.total_seconds() + _GRACE_SECONDS:
                raise SaveError(
                    f"--save {pending.save_folder}: the writing of checkpoint {pending.iteration} has stood still for "
                    f"{seconds:.0f} s: look at the file system, or raise --distributed-timeout-minutes"
                )
            return
        self.pending = None
        if pending.error is not None:
            raise self._given_up(pending, pending.error) from pending.error

    def finish(self) -> None:
        """Wait until the checkpoint under way is whole; SaveError if it could not be written."""
        while self.pending is not None:
            self.pending.join(timeout=_LOOK_SECONDS)
            self.look()

    def _given_up(self, pending: PendingCheckpoint, error: BaseException) -> SaveError:
        """Remove a checkpoint that could not be written; return the error that says so."""
        if dist.get_rank() == 0:
            folders.discard(pending.save_folder, pending.iteration)
        return SaveError(
            f"--save {pending.save_folder}: checkpoint {pending.iteration} could not be written ({reason_of(error)}); "
            "those before it are as they were"
        )


class PendingCheckpoint(threading.Thread):
    """One checkpoint that this rank's thread writes, together with those of the other ranks.

    Args:
        config: settings of the run.
        iteration: optimizer steps so far.
        group: all ranks, over gloo.
        keeps_older: remove no older checkpoint afterwards.

    Attributes:
        error: failure of the writing; None: it is under way, or the checkpoint is whole.
        moved_at: time at which the writing last went on, as by ``time.monotonic``.
    """

    def __init__(
        self, config: RunConfig, iteration: int, group: dist.ProcessGroup, *, keeps_older: bool = False
    ) -> None:
        super().__init__(name=f"checkpoint {iteration}", daemon=True)
        self.config = config
        self.iteration = iteration
        self.save_folder = Path(config.checkpoints.save or "")
        self.folder = folders.partial_folder(self.save_folder, iteration)
        self.error: BaseException | None = None
        self.moved_at = time.monotonic()
        self._keeps_older = keeps_older
        self._group = group
        # Its collectives turn an error of one rank into a CheckpointException of all.
        self._ranks = _DistWrapper(group, use_dist=True, coordinator_rank=0)
        self._request: Any = None  # Megatron's AsyncRequest

    def prepare(self, kept: Kept) -> None:
        """Make the folder, and copy everything that later steps may change; CheckpointException on every rank.

        An error while the state is made ends this rank alone: others may wait for it in a group of the training.
        """
        self._ranks.broadcast("begin", lambda: folders.begin(self.save_folder, self.iteration))
        state = kept.state(with_optimizer=not self.config.checkpoints.no_save_optim)
        self._ranks.all_reduce("prepare", lambda: self._copy(kept, state), lambda _: None)

    def run(self) -> None:
        """Write the files, then their checksums, then give the checkpoint its name; called by the thread."""
        try:
            self._request.async_fn()
            self._ranks.all_reduce("complete", self._checksums, self._complete)
        except BaseException as error:
            # CheckpointException is no Exception, and nobody else would hear of any other error here.
            self.error = error
        self._request = None

    def _copy(self, kept: Kept, state: dict[str, Any]) -> None:
        strategy = ThreadedSaveStrategy(self._group, self._moved)
        # Megatron's functions after the writing are not called: they use the groups of the training.
        self._request = dist_checkpointing.save(state, str(self.folder), strategy, async_sharded_save=True)
        if kept.open_rollouts is not None:
            kept.open_rollouts.save(self.folder, self.iteration)
        if dist.get_rank() == 0:
            (self.folder / SETTINGS).write_text(settings_text(self.config), encoding="utf-8")
            (self.folder / PROGRESS).write_text(json.dumps(kept.progress(self.iteration)) + "\n", encoding="utf-8")

    def _checksums(self) -> Checksums:
        rank = dist.get_rank()
        if rank == 0:
            save_config(CheckpointingConfig(FORMAT, FORMAT_VERSION), str(self.folder))
        return checksums_of_rank(self.folder, rank, self._moved)

    def _complete(self, checksums_of_ranks: list[Checksums]) -> None:
        """Write the manifest, rename the folder, and remove older checkpoints; on rank 0."""
        for checksums in checksums_of_ranks:
            for name in checksums:
                if not (self.folder / name).is_file():
                    raise RunError(f"rank 0 does not see {name} of another rank: give a folder that all machines share")
        write_manifest(self.folder, checksums_of_ranks)
        folders.complete(self.save_folder, self.iteration)
        if not self._keeps_older:
            remove_older(self.config.checkpoints, self.iteration)

    def _moved(self) -> None:
        self.moved_at = time.monotonic()


def remove_older(files: CheckpointSection, newest: int) -> None:
    """Remove the checkpoints before the ``newest`` that ``--keep-last`` and ``--save-retain-interval`` do not keep."""
    if files.save is None or not (files.keep_last or files.save_retain_interval):
        return
    try:
        folders.prune(files.save, newest, files.keep_last or 1, files.save_retain_interval)
    except OSError as error:
        _log.warning("--save %s: an older checkpoint could not be removed (%s)", files.save, reason_of(error))


def _check_weights(iteration: int, model: list[Any], name: str) -> None:
    """Refuse a model with a weight that is not finite: later runs would start from it."""
    for chunk in model:
        for weight_name, weight in chunk.named_parameters():
            if not torch.isfinite(weight).all():
                whose = "the critic's" if name == CRITIC else "the"
                learning_rate = "--critic-lr" if name == CRITIC else "--lr"
                raise RunError(
                    f"{whose} weight {weight_name.removeprefix('module.')} is not finite after step {iteration}: this "
                    f"model is not saved; go on from an older checkpoint with a lower {learning_rate}"
                )
