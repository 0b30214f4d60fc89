"""Writing a checkpoint: whole, verified by its manifest and on disk before anything says that it is there."""

from __future__ import annotations

import io
import queue
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import common, filesystem_async
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rc.launch.distributed import AgreedError, agree
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.checkpoints import folders, manifest
from megatron_rc.launch.training.checkpoints.settings import SETTINGS, settings_text
from megatron_rc.launch.training.checkpoints.state import model_state, optimizer_state


class SaveError(AgreedError):
    """A checkpoint could not be written; those that were there are as before. Every rank raises it together."""


def save_checkpoint(
    config: RunConfig, iteration: int, model: list[Any], optimizer: Any, scheduler: Any, reference: list[Any]
) -> None:
    """Write a checkpoint of all ranks to ``--save``, then point the tracker file at it.

    Args:
        config: of the run; kept beside the weights.
        iteration: optimizer steps made.
        model: this rank's chunks.
        optimizer: Megatron's optimizer; left out with ``--no-save-optim``.
        scheduler: of the learning rate.
        reference: chunks of the reference policy; empty without a KL penalty.

    Raises:
        SaveError: it could not be written; what was there before is as it was.
        AgreedError: a weight is not finite: such a model is never saved.
    """
    files = config.checkpoints
    if files.save is None:
        raise ValueError("there is no folder for checkpoints: give --save DIR")
    _check_weights(config, iteration, model)
    state = model_state(model) | model_state(reference, "reference") | {"iteration": iteration}
    if not files.no_save_optim:
        state["optimizer"] = optimizer_state(optimizer, model)
        state["opt_param_scheduler"] = scheduler.state_dict()
    try:
        _write(config, files.save, iteration, state)
    except AgreedError as error:
        if dist.get_rank() == 0:
            folders.discard(files.save, iteration)
        raise SaveError(
            f"--save {files.save}: checkpoint {iteration} could not be written ({error}); those before it are as they "
            "were"
        ) from error


def _write(config: RunConfig, save: str, iteration: int, state: dict[str, Any]) -> None:
    """The steps of a save. What only rank 0 does, or what fails on some ranks, is agreed on after each."""
    folder = folders.partial_folder(save, iteration)
    _on_rank_0(config, lambda: folders.begin(save, iteration))
    with _results_in_this_process(), _failures_kept() as failures:
        try:
            dist_checkpointing.save(state, str(folder))
        except (OSError, CheckpointException) as error:
            failures.append(error)
    agree(config, _reason(failures[0]) if failures else None)
    _on_rank_0(config, lambda: (folder / SETTINGS).write_text(settings_text(config), encoding="utf-8"))
    digests = _digests(config, folder)
    _on_rank_0(config, lambda: _finish(config, save, iteration, digests))


def _finish(config: RunConfig, save: str, iteration: int, digests: dict[str, dict[str, Any]]) -> None:
    files = config.checkpoints
    manifest.write_manifest(folders.partial_folder(save, iteration), digests)
    folders.complete(save, iteration)
    if files.keep_last or files.save_retain_interval:
        folders.prune(save, iteration, files.keep_last or 1, files.save_retain_interval)


def _digests(config: RunConfig, folder: Path) -> dict[str, dict[str, Any]]:
    """Of every file, each read by one rank."""
    error, own = None, {}
    try:
        own = manifest.digests_of_share(folder, manifest.files_of(folder))
    except OSError as problem:
        error = _reason(problem)
    agree(config, error)
    shares: list[dict[str, dict[str, Any]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(shares, own)
    return {name: digest for share in shares for name, digest in share.items()}


def _on_rank_0(config: RunConfig, work: Callable[[], object]) -> None:
    error = None
    if dist.get_rank() == 0:
        try:
            work()
        except OSError as problem:
            error = _reason(problem)
    agree(config, error)


def _check_weights(config: RunConfig, iteration: int, model: list[Any]) -> None:
    """A model with a weight that is not finite would become what every later run starts from."""
    bad = [name for chunk in model for name, weight in chunk.named_parameters() if not torch.isfinite(weight).all()]
    agree(
        config,
        f"the weight {bad[0].removeprefix('module.')} is not finite after step {iteration}: this model is not saved; "
        "go on from an older checkpoint with a lower --lr"
        if bad
        else None,
    )


def _reason(error: BaseException) -> str:
    """The first failure of any rank, as one line."""
    causes = [failure for failure, _ in error.failures.values()] if isinstance(error, CheckpointException) else []
    first = (causes or [error])[0]
    if isinstance(first, OSError) and first.strerror:
        return f"{Path(str(first.filename)).name}: {first.strerror}" if first.filename else first.strerror
    return " ".join(str(first).split())


@contextmanager
def _failures_kept() -> Iterator[list[BaseException]]:
    """Keep what fails where Megatron writes on rank 0 alone: raised there, it would leave the others waiting."""
    failures: list[BaseException] = []

    def kept(write: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            write(*args, **kwargs)
        except OSError as error:
            failures.append(error)

    places: list[tuple[Any, str, Callable[..., Any]]] = [
        (owner, name, getattr(owner, name))
        for owner, name in ((filesystem_async.FileSystemWriterAsync, "finish"), (serialization, "save_config"))
    ]
    # Since megatron-core 0.19 what is common to all ranks lies with the rest.
    if hasattr(common, "TorchCommonSaveStrategy"):
        places.append((common.TorchCommonSaveStrategy, "save_common", _save_common))
    with ExitStack() as stack:
        for owner, name, write in places:
            stack.enter_context(mock.patch.object(owner, name, _as_function(partial(kept, write))))
        yield failures


def _save_common(_: Any, state: dict[str, Any], folder: str) -> None:
    """What Megatron does; but PyTorch, given a path, does not say why it cannot write."""
    if dist.get_rank() == 0:
        content = io.BytesIO()
        torch.save(state, content)
        (Path(folder) / common.COMMON_STATE_FNAME).write_bytes(content.getbuffer())


def _as_function(call: Callable[..., Any]) -> Callable[..., Any]:
    """A function, which as an attribute of a class is bound to the instance; a partial is not."""
    return lambda *args, **kwargs: call(*args, **kwargs)


@contextmanager
def _results_in_this_process() -> Iterator[None]:
    """A plain queue for the results of a synchronous save.

    Megatron starts a manager process for them, which imports everything anew and outlives a rank that is killed.
    """
    # The second name is that of megatron-core 0.17 and later.
    names = [
        name for name in ("_get_write_results_queue", "get_write_results_queue") if hasattr(filesystem_async, name)
    ]
    with mock.patch.object(filesystem_async, names[0], return_value=queue.Queue()):
        yield
