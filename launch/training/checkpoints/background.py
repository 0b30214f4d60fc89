"""A checkpoint that a forked process writes while training goes on, or waits.

All ranks make the same steps: pieces, index, checksums, name. Each step begins when all ranks have ended the step
before; the ranks ask each other whenever the trainer looks in.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import tempfile
import threading
from multiprocessing.context import ForkProcess
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.storage import WriteResult

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.stopping import STOPPING
from megatron_rc.launch.training.checkpoints import manifest
from megatron_rc.launch.training.checkpoints.pieces import Pieces, reason_of
from megatron_rc.parallel.collectives import all_reduce_max


class ForkedResult:
    """A file that carries one object from a forked process to this one; a pipe would fill up and block."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115 - it is closed when it is read

    def put(self, value: object) -> None:
        """Write the object, in the place of an earlier one; in the forked process, which shares the file."""
        self.file.seek(0)
        self.file.truncate()
        pickle.dump(value, self.file)
        self.file.flush()

    def get(self) -> Any:
        """Return the object, after the other process has ended; None: it wrote none."""
        self.file.seek(0)
        content = self.file.read()
        self.file.close()
        return pickle.loads(content) if content else None


class BackgroundWrite:
    """The state of one checkpoint's writing on this rank.

    Training may change the memory of ``pieces``, which is copied then. ``index`` is PyTorch's, on rank 0.

    Attributes:
        written: places of this rank's pieces, after its process has ended.
        digests: checksums of this rank's share of the files.
        error: a failure of this rank.
    """

    def __init__(self, config: RunConfig, iteration: int, pieces: Pieces, index: Any) -> None:
        self.config, self.iteration, self.folder, self.index = config, iteration, pieces.folder, index
        self.written: list[WriteResult] = []
        self.digests: dict[str, dict[str, Any]] = {}
        self.error: str | None = None
        self.thread: threading.Thread | None = None
        self._result = ForkedResult()
        context = multiprocessing.get_context("fork")
        self.process: ForkProcess = context.Process(target=write_pieces, args=(pieces, self._result))
        self.process.start()

    def is_done(self, *, wait: bool) -> bool:
        """Whether all ranks have ended the present step. Collectives: one MAX of a number, unless it waits."""
        worker = self.thread or self.process
        if wait:
            worker.join()
            return True
        alive = torch.tensor([int(worker.is_alive())], device=self.config.launch.device)
        return not int(all_reduce_max(alive, dist.group.WORLD))

    def take_result(self) -> None:
        """Read the result of the process that has ended into ``written`` or ``error``."""
        code, found = self.process.exitcode or 0, self._result.get()
        if code or found is None:
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
            self.error = f"the process that wrote for rank {dist.get_rank()} ended {how}"
        elif isinstance(found, str):
            self.error = found
        else:
            self.written = found

    def start_digests(self, names: list[str]) -> None:
        """Begin the checksums of this rank's share of these files."""
        self.thread = threading.Thread(target=self._digest, args=(names,), daemon=True)
        self.thread.start()

    def abandon(self) -> None:
        """End the process that writes."""
        self.process.kill()
        self.process.join()

    def _digest(self, names: list[str]) -> None:
        try:
            self.digests = manifest.digests_of_share(self.folder, names)
        except OSError as error:
            self.error = reason_of(error)


def write_pieces(pieces: Pieces, result: ForkedResult) -> None:
    """Write this rank's file; put the places of its pieces, or the reason of a failure."""
    for number in STOPPING:  # the rank answers a signal, and this process ends with the rank
        signal.signal(number, signal.SIG_IGN)
    try:
        result.put(pieces.write())
    except Exception as error:  # this process has nobody else to tell
        result.put(reason_of(error))
