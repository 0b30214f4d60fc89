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
    async def turn(self, order: int) -> AsyncIterator[None]:
        """Context of one request; waits for its turn."""
        turn = Future[None]()
        with self._lock:
            heapq.heappush(self._waiting, (order, next(self._arrivals), turn))
            self._let_in()
        try:
            await asyncio.wrap_future(turn)
            yield
        finally:
            with self._lock:
                if not turn.cancel():  # it had its turn, perhaps while this task was cancelled
                    self._free += 1
                    self._let_in()

    def _let_in(self) -> None:
        while self._free and self._waiting:
            turn = heapq.heappop(self._waiting)[-1]
            if turn.set_running_or_notify_cancel():
                turn.set_result(None)
                self._free -= 1
