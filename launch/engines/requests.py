"""Requests to a rollout server: retries, a limit, and the checks of its address and key. Imports no HTTP client."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from megatron_rc.launch.engines import EngineError

# Servers whose weights can be read back.
READ_BACK = ("vllm-server", "sglang-server")
API_KEY = "ROLLOUT_API_KEY"  # environment variable with the servers' key
MOST_BYTES = 1 << 20  # largest answer without tokens


@dataclass(frozen=True)
class Request:
    """One HTTP request; ``body`` is sent as JSON, and an answer above ``most_bytes`` is an error."""

    method: str
    path: str
    body: Any = None
    most_bytes: int = MOST_BYTES


@dataclass(frozen=True)
class Retries:
    """Number of attempts of a request, and the waits between them."""

    attempts: int = 6  # largest number of answers with status 5xx; 502 to 504 do not count: the server is away
    first_wait: float = 0.5  # seconds before the second attempt; doubles with each further attempt
    longest_wait: float = 8.0  # bound in seconds

    def wait(self, failures: int) -> float:
        """Seconds to wait after ``failures`` attempts, cut at random by up to a half so that clients spread out."""
        doubled = self.first_wait * 2.0 ** min(failures - 1, 30)
        return min(self.longest_wait, doubled * random.SystemRandom().uniform(0.5, 1.0))


class HttpStatusError(EngineError):
    """The server refused a request with a status that is not retried."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class RequestLimit:
    """At most ``number`` requests at a time, over all threads; the lowest ``order`` first, then the first to come."""

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


def check_url(url: str) -> None:
    """Raise ValueError if a server's address is none, or has a path or a password, which is not repeated."""
    if "@" in url:
        raise ValueError(
            "the rollout server's address has a user or a password in it: leave them out, and give a key in the "
            f"environment variable {API_KEY}"
        )
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_address = is_address and url.isprintable()
    except ValueError:  # a wrong port or IPv6 address
        is_address = False
    if not is_address or parts.path.strip("/") or parts.query or parts.fragment:
        raise ValueError(f"the rollout server's address is {url!r}: expected http://host:port, without a path")


def check_key(key: str | None) -> None:
    """Raise ValueError, without the servers' key, if an HTTP header cannot carry it."""
    if key and not (key.isascii() and key.isprintable() and " " not in key):
        raise ValueError(f"the environment variable {API_KEY} has characters other than printable ASCII without spaces")
