"""Writing a checkpoint: whole, verified by its manifest and on disk before anything says that it is there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rc.launch import phases
from megatron_rc.launch.distributed import AgreedError, agree
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.checkpoints import folders, manifest
from megatron_rc.launch.training.checkpoints.background import BackgroundWrite, ForkedResults, asynchronous
from megatron_rc.launch.training.checkpoints.kept import CRITIC, POLICY, Kept, trained_state
from megatron_rc.launch.training.checkpoints.megatron_writes import agreed_failures, reason_of, results_in
from megatron_rc.launch.training.checkpoints.settings import SETTINGS, settings_text

_log = logging.getLogger("megatron_rc")


class SaveError(AgreedError):
    """A checkpoint could not be written; those that were there are as before. Every rank raises it together."""


class CheckpointWriter:
    """Writes checkpoints of all ranks to ``--save`` by a process in the background, and waits unless ``--async-save``.

    Args:
        config: of the run; its settings are kept beside the weights.

    Attributes:
        keeps_older: no checkpoint is removed any more, whatever ``--keep-last`` says.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config, self.files = config, config.checkpoints
        self.pending: BackgroundWrite | None = None
        self.keeps_older = False

    def save(self, iteration: int, kept: Kept) -> None:
        """Write a checkpoint, then point the tracker file at it; with ``--async-save`` begin to.

        Args:
            iteration: optimizer steps made.
            kept: what it holds; with ``--no-save-optim`` without optimizers and schedules.

        Raises:
            SaveError: it, or the one that was under way, could not be written; what was there before is as it was.
            AgreedError: a weight is not finite: such a model is never saved.
        """
        phases.enter(f"the saving of step {iteration}")
        self.finish()
        _check_weights(self.config, iteration, kept.policy.model)
        if kept.critic is not None:
            _check_weights(self.config, iteration, kept.critic.model, "the critic's", "--critic-lr")
        with_optimizer = not self.files.no_save_optim
        state = trained_state(kept.policy, POLICY, with_optimizer=with_optimizer) | {"iteration": iteration}
        state |= kept.sampling.state() | kept.rewards.state() | kept.left_out.state()
        if kept.reference is not None:
            state |= kept.reference.state()
        if kept.critic is not None:
            state |= trained_state(kept.critic, CRITIC, with_optimizer=with_optimizer)
        with self._failing_together(iteration):
            self._begin(iteration, state)
        if not self.files.async_save:
            self.finish()

    def look(self) -> None:
        """Go on with what is under way, without waiting.

        Raises:
            SaveError: it could not be written.
        """
        if self.pending is not None:
            self._go_on(self.pending, wait=False)

    def finish(self) -> None:
        """Wait until the checkpoint that is under way is whole.

        Raises:
            SaveError: it could not be written.
        """
        while self.pending is not None:
            self._go_on(self.pending, wait=True)

    @property
    def save_folder(self) -> str:
        """``--save``."""
        if self.files.save is None:
            raise ValueError("there is no folder for checkpoints: give --save DIR")
        return self.files.save

    def _begin(self, iteration: int, state: dict[str, Any]) -> None:
        config, save = self.config, self.save_folder
        folder = folders.partial_folder(save, iteration)
        _on_rank_0(config, lambda: folders.begin(save, iteration))
        _on_rank_0(config, lambda: (folder / SETTINGS).write_text(settings_text(config), encoding="utf-8"))
        results = ForkedResults()
        with agreed_failures(config), results_in(results):
            # Within: where one rank cannot fork, the others end what they have begun.
            self.pending = BackgroundWrite(config, iteration, folder, asynchronous(state, folder), results)

    def _go_on(self, pending: BackgroundWrite, *, wait: bool) -> None:
        """The next step of what is under way, if all ranks are ready for it."""
        if not pending.is_done(wait=wait):
            return
        with self._failing_together(pending.iteration):
            if pending.thread is None:
                agree(self.config, pending.ended_badly)
                with agreed_failures(self.config):
                    for end in pending.request.finalize_fns:
                        end()
                pending.start_digests(_names(self.config, pending.folder))
                return
            agree(self.config, None if pending.error is None else reason_of(pending.error))
            digests = _gathered(pending.digests)
            config, save, step, keeps = self.config, self.save_folder, pending.iteration, self.keeps_older
            _on_rank_0(config, lambda: _finish(config, save, step, digests, keeps_older=keeps))
            self.pending = None

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


def _finish(
    config: RunConfig, save: str, iteration: int, digests: dict[str, dict[str, Any]], *, keeps_older: bool = False
) -> None:
    files, folder = config.checkpoints, folders.partial_folder(save, iteration)
    other = sorted(digests.keys() ^ set(manifest.files_of(folder)))
    if other:
        raise OSError(f"{other[0]} came or went while the checksums were made")
    manifest.write_manifest(folder, digests)
    folders.complete(save, iteration)
    if keeps_older or not (files.keep_last or files.save_retain_interval):
        return
    try:
        folders.prune(save, iteration, files.keep_last or 1, files.save_retain_interval)
    except OSError as error:
        _log.warning("--save %s: an older checkpoint could not be removed (%s)", save, reason_of(error))


def _names(config: RunConfig, folder: Path) -> list[str]:
    """The files as rank 0 sees them: on a network's file system others may not see the same ones yet."""
    names: list[Any] = [None]

    def look() -> None:
        names[0] = manifest.files_of(folder)

    _on_rank_0(config, look)
    dist.broadcast_object_list(names, src=0)
    return list(names[0])


def _gathered(own: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    shares: list[dict[str, dict[str, Any]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(shares, own)
    return {name: digest for share in shares for name, digest in share.items()}


def _on_rank_0(config: RunConfig, work: Callable[[], object]) -> None:
    error = None
    if dist.get_rank() == 0:
        try:
            work()
        except OSError as problem:
            error = reason_of(problem)
    agree(config, error)


def _check_weights(config: RunConfig, iteration: int, model: list[Any], whose: str = "the", rate: str = "--lr") -> None:
    """A model with a weight that is not finite would become what every later run starts from."""
    bad = [name for chunk in model for name, weight in chunk.named_parameters() if not torch.isfinite(weight).all()]
    agree(
        config,
        f"{whose} weight {bad[0].removeprefix('module.')} is not finite after step {iteration}: this model is not "
        f"saved; go on from an older checkpoint with a lower {rate}"
        if bad
        else None,
    )
