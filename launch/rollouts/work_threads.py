"""Threads on which a replica's engine works, so that the main thread can see a signal or a limit of time meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

T = TypeVar("T")
GRACE_SECONDS = 5.0


class WorkThreads:
    """Daemon threads that take work in the order in which it comes; they use this thread's GPU.

    A run that ends does not wait for a thread that works on: it must report its error, or has been told to stop.
    """

    def __init__(self, number: int, name: str) -> None:
        self._queue: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._threads = [threading.Thread(target=self._work, name=name, daemon=True) for _ in range(number)]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Order a piece of work; the future has its result or its exception."""
        future = Future[T]()
        self._queue.put((work, future))
        return future

    def close(self, *, waits: bool = True) -> None:
        """Let the threads end after the work that is under way, and wait at most 5 seconds for them."""
        for _ in self._threads:
            self._queue.put(None)
        end = time.monotonic() + (GRACE_SECONDS if waits else 0.0)
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _work(self) -> None:
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)  # a new thread would use GPU 0
        while (order := self._queue.get()) is not None:
            work, future = order
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:  # whoever waits for the future raises it
                future.set_exception(error)
