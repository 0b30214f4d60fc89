"""A limit on a server's open requests that holds over all threads."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager


class RequestLimit:
    """At most ``number`` requests at a time; of those that wait, the lowest ``order`` first, then the first to come.

    Threads share it, each with an asyncio event loop of its own.
    """

    def __init__(self, number: int) -> None:
        self._free = number
        self._waiting: list[tuple[int, int, Future[None]]] = []
        self._arrivals = itertools.count()
        self._lock = threading.Lock()

    @asynccontextmanager
    async def slot(self, order: int) -> AsyncIterator[None]:
        """Context of one request; waits for a slot."""
        slot = Future[None]()
        with self._lock:
            heapq.heappush(self._waiting, (order, next(self._arrivals), slot))
            self._let_in()
        try:
            await asyncio.wrap_future(slot)
            yield
        finally:
            with self._lock:
                if not slot.cancel():  # it had its slot, perhaps while this task was cancelled
                    self._free += 1
                    self._let_in()

    def _let_in(self) -> None:
        while self._free and self._waiting:
            slot = heapq.heappop(self._waiting)[-1]
            if slot.set_running_or_notify_cancel():
                slot.set_result(None)
                self._free -= 1
