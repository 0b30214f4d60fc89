"""A checkpoint that a forked process writes, waited for or not: Megatron's asynchronous save, step by step.

Megatron's own save in the foreground waits for ever for a writer that the kernel killed; this one notices. All ranks
make the same steps: writing, Megatron's index, checksums, the name. Each of them begins where all ranks have ended the
one before, which they ask each other whenever the trainer looks in.
"""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import os
import pickle
import queue
import signal
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.checkpoints import manifest
from megatron_rc.launch.training.checkpoints.megatron_writes import failures_of_workers
from megatron_rc.parallel.collectives import all_reduce_max

JOIN_SECONDS = 5.0


class ForkedResults:
    """Carries one object from a forked process to this one, however large it is: a pipe would fill up and block."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115 - it is closed when it is read

    def put(self, value: object) -> None:
        """In the forked process, which shares the file; what was put before is gone."""
        self.file.seek(0)
        self.file.truncate()
        pickle.dump(value, self.file)
        self.file.flush()

    def get_nowait(self) -> Any:
        """In this process, when the other has ended.

        Raises:
            queue.Empty: it has put nothing.
        """
        self.file.seek(0)
        content = self.file.read()
        self.file.close()
        if not content:
            raise queue.Empty
        return pickle.loads(content)


class BackgroundWrite:
    """What is under way of one checkpoint on this rank.

    Args:
        config: of the run.
        iteration: optimizer steps made.
        folder: where it is written.
        request: Megatron's, which says what to write and how to end.
        results: where Megatron puts what became of it.
    """

    def __init__(self, config: RunConfig, iteration: int, folder: Path, request: Any, results: ForkedResults) -> None:
        self.config, self.iteration, self.folder, self.request = config, iteration, folder, request
        self.process = _started(request, results)
        self.thread: threading.Thread | None = None
        self.digests: dict[str, dict[str, Any]] = {}
        self.error: OSError | None = None

    def is_done(self, *, wait: bool) -> bool:
        """Whether all ranks have ended the present step. Collectives: one MAX of a number, unless it waits."""
        worker = self.thread or self.process
        if wait and worker is not None:
            worker.join()
        alive = int(worker is not None and worker.is_alive())
        if wait:
            return True
        return not int(all_reduce_max(torch.tensor([alive], device=self.config.launch.device), dist.group.WORLD))

    @property
    def ended_badly(self) -> str | None:
        """What became of the process that wrote on this rank, if it did not end by itself."""
        code = self.process.exitcode if self.process is not None else 0
        if not code:
            return None
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        return f"the process that wrote for rank {dist.get_rank()} ended {how}"

    def start_digests(self, names: list[str]) -> None:
        """Of this rank's share of these files."""
        self.thread = threading.Thread(target=self._digest, args=(names,), daemon=True)
        self.thread.start()

    def abandon(self) -> None:
        """End the process that writes."""
        if self.process is not None:
            self.process.kill()
            self.process.join()

    def _digest(self, names: list[str]) -> None:
        try:
            self.digests = manifest.digests_of_share(self.folder, names)
        except OSError as error:
            self.error = error


def asynchronous(state: dict[str, Any], folder: Path) -> Any:
    """Megatron's request for an asynchronous save; what is common to all ranks is written at once."""
    # Since megatron-core 0.19 the default is a library of NVIDIA's that need not be there.
    takes_strategy = "async_strategy" in inspect.signature(dist_checkpointing.save).parameters
    more: dict[str, Any] = {"async_strategy": "mcore"} if takes_strategy else {}
    return dist_checkpointing.save(state, str(folder), async_sharded_save=True, **more)


def _started(request: Any, results: ForkedResults) -> ForkProcess | None:
    """A process that holds the tensors as they are now, since memory is copied where either side writes."""
    if request.async_fn is None:
        return None
    args = list(request.async_fn_args)
    if request.preload_fn is not None:
        # From the GPU to the host.
        args[1] = request.preload_fn()
    process = multiprocessing.get_context("fork").Process(
        target=write_with_workers, args=(request.async_fn, args, dict(request.async_fn_kwargs), results)
    )
    process.start()
    return process


def write_with_workers(
    write: Callable[..., object], args: Sequence[Any], named: Mapping[str, Any], results: ForkedResults
) -> None:
    """Megatron's writing, in a process of its own, which ends as the first of its workers that a signal ends.

    Megatron waits for all of them to count themselves off, also for one that the kernel killed where memory ran out.
    """
    signal.signal(signal.SIGCHLD, _end_with_a_killed_worker)
    with failures_of_workers() as failures:
        try:
            write(*args, **named)
        except AssertionError:
            # What Megatron raises for a thread that failed, while that one ends.
            for thread in set(threading.enumerate()) - {threading.main_thread()}:
                thread.join(JOIN_SECONDS)
            if not failures:
                raise
    if failures:
        results.put(failures[0])


def _end_with_a_killed_worker(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while (status := os.waitpid(-1, os.WNOHANG))[0]:
            if os.WIFSIGNALED(status[1]):
                os.kill(os.getpid(), signal.SIGKILL)
