"""What Megatron does while it writes a checkpoint, such that a failure on one rank is one verdict on all."""

from __future__ import annotations

import functools
import io
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import common, filesystem_async
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rc.launch.distributed import agree
from megatron_rc.launch.run_config import RunConfig


def reason_of(error: BaseException) -> str:
    """The first failure of any rank, as one line."""
    causes = [failure for failure, _ in error.failures.values()] if isinstance(error, CheckpointException) else []
    first = (causes or [error])[0]
    if isinstance(first, OSError) and first.strerror:
        return f"{Path(str(first.filename)).name}: {first.strerror}" if first.filename else first.strerror
    text = " ".join(str(first).split())
    return text if len(text) < 300 else f"{text[:300]} …"


@contextmanager
def agreed_failures(config: RunConfig) -> Iterator[None]:
    """One verdict on what Megatron writes inside.

    What fails where it writes on rank 0 alone is kept until the end: raised there, it would leave the others waiting.
    """
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
    with ExitStack() as stack, _no_false_alarm():
        for owner, name, write in places:
            stack.enter_context(mock.patch.object(owner, name, _as_function(partial(kept, write))))
        try:
            yield
        except (OSError, MemoryError, CheckpointException) as error:
            failures.append(error)
    agree(config, reason_of(failures[0]) if failures else None)


@contextmanager
def _no_false_alarm() -> Iterator[None]:
    """Without Megatron's line that an old checkpoint is overwritten: it is said of any folder that is not empty.

    What is written to here is new; the run's settings already lie there.
    """

    def wanted(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("Overwriting old incomplete")

    logger = logging.getLogger(serialization.__name__)
    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)


@contextmanager
def failures_of_workers() -> Iterator[list[Exception]]:
    """Why what writes inside, in this process, could not; and errors of the disk where PyTorch would hide them.

    Megatron-core 0.16 writes in processes and passes their errors on; since 0.17 in threads, of whose errors it tells
    the type alone.
    """
    writer, failures = filesystem_async.FileSystemWriterAsync, list[Exception]()
    write_file = writer.write_preloaded_data

    @functools.wraps(write_file)
    def noted(*args: Any, **kwargs: Any) -> Any:
        result = write_file(*args, **kwargs)
        if result is not None and isinstance(result[1], Exception):
            failures.append(result[1])
        return result

    with (
        mock.patch.object(writer, "write_preloaded_data", staticmethod(noted)),
        mock.patch.object(filesystem_async, "_write_item", _saying_why(filesystem_async._write_item)),
    ):
        yield failures


def _saying_why(write: Callable[..., Any]) -> Callable[..., Any]:
    """A function that writes with ``torch.save``, whose error is the file system's where that failed.

    PyTorch ends its archive while the error is on its way, and raises another one of what it then finds.
    """

    @functools.wraps(write)
    def written(*args: Any, **kwargs: Any) -> Any:
        try:
            return write(*args, **kwargs)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise

    return written


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
def results_in(results: Any) -> Iterator[None]:
    """Where the processes that write leave their results: an object that all of them and this one share.

    Megatron would start a manager process for them, which imports everything anew and outlives a rank that is killed.
    """
    # The second name is that of megatron-core 0.17 and later.
    names = [
        name for name in ("_get_write_results_queue", "get_write_results_queue") if hasattr(filesystem_async, name)
    ]
    with mock.patch.object(filesystem_async, names[0], return_value=results):
        yield
