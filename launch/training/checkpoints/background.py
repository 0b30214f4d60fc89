"""A checkpoint that a forked process writes while training goes on, or waits.

All ranks make the same steps: pieces, index, checksums, name. Each step begins when all ranks have ended the step
before; the ranks ask each other whenever the trainer looks in.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
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


class BackgroundWrite:
    """The state of one checkpoint's writing on this rank.

    Training may change the memory of ``pieces``, which is copied then. ``index`` is PyTorch's, on rank 0.

    Attributes:
        written: places of this rank's pieces, after its process has ended.
        digests: checksums of this rank's share of the files; None: this step has not begun.
        error: a failure of this rank.
    """

    def __init__(self, config: RunConfig, iteration: int, pieces: Pieces, index: Any) -> None:
        self.config, self.iteration, self.folder, self.index = config, iteration, pieces.folder, index
        self.written: list[WriteResult] = []
        self.digests: dict[str, dict[str, Any]] | None = None
        self.error: str | None = None
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        self._process: ForkProcess = context.Process(target=write_pieces, args=(pieces, sender))
        self._process.start()
        sender.close()
        self._thread = threading.Thread(target=self._receive, args=(receiver,), daemon=True)
        self._thread.start()

    def is_done(self, *, wait: bool) -> bool:
        """Whether all ranks have ended the present step. Collectives: one MAX of a number, unless it waits."""
        if wait:
            self._thread.join()
            return True
        alive = torch.tensor([int(self._thread.is_alive())], device=self.config.launch.device)
        return not int(all_reduce_max(alive, dist.group.WORLD))

    def start_digests(self, names: list[str]) -> None:
        """Begin the checksums of this rank's share of these files."""
        self.digests = {}
        self._thread = threading.Thread(target=self._digest, args=(names,), daemon=True)
        self._thread.start()

    def abandon(self) -> None:
        """End the process that writes."""
        self._process.kill()
        self._process.join()

    def _receive(self, receiver: Connection) -> None:
        """Take the result of the process that writes into ``written`` or ``error``."""
        found = None
        with suppress(EOFError, OSError):
            found = receiver.recv()
        self._process.join()
        code = self._process.exitcode or 0
        if code or found is None:
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
            self.error = f"the process that wrote for rank {dist.get_rank()} ended {how}"
        elif isinstance(found, str):
            self.error = found
        else:
            self.written = found

    def _digest(self, names: list[str]) -> None:
        try:
            self.digests = manifest.digests_of_share(self.folder, names)
        except OSError as error:
            self.error = reason_of(error)


def write_pieces(pieces: Pieces, sender: Connection) -> None:
    """Write this rank's file; send the places of its pieces, or the reason of a failure."""
    for number in STOPPING:  # the rank answers a signal, and this process ends with the rank
        signal.signal(number, signal.SIG_IGN)
    try:
        sender.send(pieces.write())
    except Exception as error:  # this process has nobody else to tell
        sender.send(reason_of(error))
