"""Saving: a checkpoint gets its name when it is whole, on the disk and listed in its manifest."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException

from megatron_rc.launch import checkpoint_folders as folders
from megatron_rc.launch import phases
from megatron_rc.launch.distributed import AgreedError, agree, failing_together
from megatron_rc.launch.rollouts.open_rollouts import OpenRollouts
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.checkpoints import manifest
from megatron_rc.launch.training.checkpoints.background import BackgroundWrite
from megatron_rc.launch.training.checkpoints.contents import CRITIC, Kept
from megatron_rc.launch.training.checkpoints.pieces import Pieces, reason_of, write_common, write_index
from megatron_rc.launch.training.checkpoints.saved_settings import SETTINGS, settings_text

_FAILURES = (CheckpointingException, OSError, MemoryError, RuntimeError, ValueError)
_log = logging.getLogger("megatron_rc")


class SaveError(AgreedError):
    """A checkpoint could not be written; older ones are unchanged. All ranks raise this together."""


class CheckpointWriter:
    """Writer of checkpoints to ``--save`` by a process in the background; waits for it unless ``--async-save``.

    If ``keeps_older``, it removes no checkpoint, whatever ``--keep-last`` says.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config, self.files, self.save_folder = config, config.checkpoints, config.checkpoints.save or ""
        self.pending: BackgroundWrite | None = None
        self.keeps_older = False

    def save(self, iteration: int, kept: Kept) -> None:
        """Write a checkpoint of this optimizer step, and its number in the tracker file; ``--async-save`` only begins.

        Raises:
            SaveError: this checkpoint, or the one under way, could not be written; older ones are unchanged.
            AgreedError: a weight is not finite; such a model is never saved.
        """
        phases.enter(f"the saving of step {iteration}")
        self.finish()
        for name, trained in kept.trained():
            whose, rate = ("the critic's", "--critic-lr") if name == CRITIC else ("the", "--lr")
            _check_weights(self.config, iteration, trained.model, whose, rate)
        state = kept.state(iteration, with_optimizer=not self.files.no_save_optim)
        with self._failing_together(iteration):
            self._begin(iteration, state, kept.open_rollouts)
        if not self.files.async_save:
            self.finish()

    def look(self) -> None:
        """Make the next step of a checkpoint under way, without waiting; SaveError if it could not be written."""
        if self.pending is not None:
            self._go_on(self.pending, wait=False)

    def finish(self) -> None:
        """Wait until the checkpoint under way is whole; SaveError if it could not be written."""
        while self.pending is not None:
            self._go_on(self.pending, wait=True)

    def _begin(self, iteration: int, state: dict[str, Any], open_rollouts: OpenRollouts | None) -> None:
        config, folder = self.config, folders.partial_folder(self.save_folder, iteration)
        with _agreed(config):
            if dist.get_rank() == 0:
                folders.begin(self.save_folder, iteration)
                (folder / SETTINGS).write_text(settings_text(config), encoding="utf-8")
        with _agreed(config):
            if open_rollouts is not None:
                open_rollouts.save(folder, iteration)
            pieces = Pieces(state, folder)
        with phases.waiting():
            plans = pieces.gathered()
        index = None
        with _agreed(config):
            if dist.get_rank() == 0:
                write_common(pieces)
                # Without the pieces' places; ValueError if pieces overlap or are missing.
                _, index = pieces.create_global_plan(plans)
        # Agreed: if one rank cannot fork, the others end their processes.
        with _agreed(config):
            self.pending = BackgroundWrite(config, iteration, pieces, index)

    def _go_on(self, pending: BackgroundWrite, *, wait: bool) -> None:
        """Make the next step of the write under way, if all ranks are ready for it."""
        if not pending.is_done(wait=wait):
            return
        with self._failing_together(pending.iteration):
            agree(self.config, pending.error)
            if pending.digests is None:
                written = _gathered(pending.written)
                names: list[Any] = [None]
                with _agreed(self.config):
                    if dist.get_rank() == 0:
                        write_index(pending.folder, pending.index, written)
                        names = [manifest.files_of(pending.folder)]
                # On a network's file system other ranks may not see the same files yet.
                dist.broadcast_object_list(names, src=0)
                pending.start_digests(names[0])
                return
            digests = {name: digest for share in _gathered(pending.digests) for name, digest in share.items()}
            with _agreed(self.config):
                if dist.get_rank() == 0:
                    self._complete(pending.iteration, digests)
            self.pending = None

    def _complete(self, iteration: int, digests: dict[str, dict[str, Any]]) -> None:
        """Give the checkpoint its manifest and its name, and remove older ones; on rank 0 alone."""
        save, files = self.save_folder, self.config.checkpoints
        folder = folders.partial_folder(save, iteration)
        other = sorted(digests.keys() ^ set(manifest.files_of(folder)))
        if other:
            raise OSError(f"{other[0]} came or went while the checksums were made")
        manifest.write_manifest(folder, digests)
        folders.complete(save, iteration)
        if self.keeps_older or not (files.keep_last or files.save_retain_interval):
            return
        try:
            folders.prune(save, iteration, files.keep_last or 1, files.save_retain_interval)
        except OSError as error:
            _log.warning("--save %s: an older checkpoint could not be removed (%s)", save, reason_of(error))

    @contextmanager
    def _failing_together(self, iteration: int) -> Iterator[None]:
        """Give up a checkpoint that could not be written, with one sentence."""
        try:
            yield
        except AgreedError as error:
            if self.pending is not None:
                self.pending.abandon()
                self.pending = None
            if dist.get_rank() == 0:
                folders.discard(self.save_folder, iteration)
            raise SaveError(
                f"--save {self.save_folder}: checkpoint {iteration} could not be written ({error}); those before it "
                "are as they were"
            ) from error


def _gathered(own: Any) -> list[Any]:
    shares: list[Any] = [None] * dist.get_world_size()
    with phases.waiting():
        dist.all_gather_object(shares, own)
    return shares


def _agreed(config: RunConfig) -> AbstractContextManager[None]:
    """Agree on failures of writing inside the block; AgreedError on every rank if any failed."""
    return failing_together(config, _FAILURES, reason_of)


def _check_weights(config: RunConfig, iteration: int, model: list[Any], whose: str, rate: str) -> None:
    """Refuse, on every rank, a model with a weight that is not finite: later runs would start from it."""
    bad = [name for chunk in model for name, weight in chunk.named_parameters() if not torch.isfinite(weight).all()]
    error = None
    if bad:
        error = (
            f"{whose} weight {bad[0].removeprefix('module.')} is not finite after step {iteration}: this model is not "
            f"saved; go on from an older checkpoint with a lower {rate}"
        )
    agree(config, error)
