"""JSON over HTTP to a rollout server: concurrent requests, retries, and limits of time and size.

httpx2 speaks HTTP and keeps connections; this module decides when to retry and when to give up.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
import httpx2
from anyio.abc import TaskGroup

from megatron_rc.launch.engines import EngineError
from megatron_rc.launch.engines.requests import API_KEY, MOST_BYTES, HttpStatusError, Request, Retries

Result = TypeVar("Result")
Slot = Callable[[], AbstractAsyncContextManager[None]]  # context of one request, which waits for a slot
EXCERPT = 300  # characters of a server's answer in an error
CONNECT_SECONDS = 10.0
TOO_MANY = 429
AWAY = (502, 503, 504)  # answers of a proxy without a server behind it
# httpx2 logs a line for each request at a lower level.
logging.getLogger("httpx2").setLevel(logging.WARNING)


@dataclass(eq=False)
class _Failure(Exception):
    """A failed attempt that may be retried."""

    problem: str
    is_away: bool  # no server answered
    is_busy: bool = False  # the server answered 429


@functools.cache
def _certificates() -> ssl.SSLContext:
    """The system's trusted certificates; cached, because reading them is slow."""
    return ssl.create_default_context()


class HttpClient:
    """Sends requests to one server, from any thread. Ignores proxies in the environment.

    Retried are failed connections, 502 to 504 (the server is away) and 429 (busy), for ``timeout`` seconds after the
    first failure, and other 5xx, ``retries.attempts`` times. Errors at once are other statuses, and answers that are
    late or too large.

    Args:
        url: address that passes ``check_url``.
        timeout: seconds for one answer, from connecting to its last byte.
        api_key: bearer token that passes ``check_key``; never shown.

    Attributes:
        absences: number of attempts that found no server.
    """

    def __init__(
        self, url: str, timeout: float = 600.0, retries: Retries | None = None, api_key: str | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self.timeout = timeout
        self.retries = retries or Retries()
        self.absences = 0
        self._key = api_key
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def json(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request and read the answer as JSON; EngineError as :meth:`call`, or if the answer is not JSON."""
        return self._parsed(path, self.call(method, path, body))

    def call(self, method: str, path: str, body: Any = None) -> bytes:
        """Send a request and return the answer's body.

        Raises HttpStatusError if the server refuses, EngineError if the answer is late or too large, or no attempt
        succeeds.
        """
        return self._send([Request(method, path, body)], lambda _, data: data, 1, nullcontext)[0]

    def read_all(
        self, requests: Sequence[Request], read: Callable[[int, Any], Result], concurrency: int, slot: Slot
    ) -> list[Result]:
        """Send all requests and return ``read(index, answer)`` of each in their order; the first error ends all.

        ``read`` gets JSON, as soon as an answer is there. ``concurrency`` is the largest number of connections at a
        time, and ``slot`` makes the context of each request.
        """

        def parse_and_read(index: int, data: bytes) -> Result:
            return read(index, self._parsed(requests[index].path, data))

        return self._send(requests, parse_and_read, concurrency, slot)

    def wait_until_ready(self, path: str, seconds: float) -> None:
        """Request ``path`` until the server answers 2xx; EngineError after ``seconds``."""
        problems: list[str] = []

        async def wait() -> None:
            with anyio.fail_after(max(seconds, self.retries.first_wait)):
                async with self._connections(1) as connections:
                    while True:
                        problems.append("silence")
                        try:
                            await self._attempt(connections, Request("GET", path))
                            return
                        except HttpStatusError as error:
                            problems[-1] = str(error)
                        except _Failure as failure:
                            problems[-1] = failure.problem
                        await anyio.sleep(min(1.0, self.retries.first_wait))

        try:
            anyio.run(wait)
        except TimeoutError as error:
            last = ", then ".join(dict.fromkeys(problems[-2:]))
            raise EngineError(
                f"there is no rollout server at {self.url} ({path}, tried for {seconds:g} s: {last}): start it, or "
                "name its address"
            ) from error

    def _send(
        self, requests: Sequence[Request], read: Callable[[int, bytes], Result], number: int, slot: Slot
    ) -> list[Result]:
        """Results of ``read`` over ``number`` connections; see :meth:`read_all`."""
        results: dict[int, Result] = {}
        errors: list[Exception] = []

        async def send_one(index: int, connections: httpx2.AsyncClient, group: TaskGroup) -> None:
            async with slot():
                try:
                    results[index] = read(index, await self._insist(connections, requests[index]))
                except Exception as error:
                    errors.append(error)
                    group.cancel_scope.cancel()

        async def send_all() -> None:
            async with self._connections(number) as connections, anyio.create_task_group() as group:
                for index in range(len(requests)):
                    group.start_soon(send_one, index, connections, group)

        anyio.run(send_all)
        if errors:
            raise errors[0]
        return [results[index] for index in range(len(requests))]

    def _connections(self, number: int) -> httpx2.AsyncClient:
        """Client with up to ``number`` connections, which requests reuse."""
        return httpx2.AsyncClient(
            base_url=self.url,
            headers=self._headers,
            verify=_certificates(),
            trust_env=False,
            limits=httpx2.Limits(max_connections=number, max_keepalive_connections=number),
            # ``_insist`` limits the whole attempt; connecting has a shorter limit.
            timeout=httpx2.Timeout(None, connect=min(self.timeout, CONNECT_SECONDS)),
        )

    async def _insist(self, connections: httpx2.AsyncClient, request: Request) -> bytes:
        """Body of the answer, after retries."""
        failures = failures_of_the_server = 0
        give_up = math.inf
        while True:
            try:
                with anyio.fail_after(self.timeout):
                    return await self._attempt(connections, request)
            except TimeoutError as error:
                raise EngineError(
                    f"{self.url}{request.path} gave no whole answer within {self.timeout:g} s: raise --rollout-timeout "
                    "or lower --rollout-concurrency, and look into the server's log"
                ) from error
            except _Failure as failure:
                failures += 1
                give_up = min(give_up, time.monotonic() + self.timeout)
                self.absences += failure.is_away
                failures_of_the_server += not (failure.is_away or failure.is_busy)
                if failures_of_the_server == self.retries.attempts or time.monotonic() >= give_up:
                    raise EngineError(
                        f"{self.url}{request.path} failed {failures} times, at last with {failure.problem}: check "
                        "that the server runs"
                    ) from None
            await anyio.sleep(self.retries.wait(failures))

    async def _attempt(self, connections: httpx2.AsyncClient, request: Request) -> bytes:
        """Body of one answer; _Failure if the attempt may be retried, HttpStatusError if not."""
        content = None if request.body is None else json.dumps(request.body, allow_nan=False)
        data = bytearray()
        try:
            async with connections.stream(request.method, request.path, content=content) as response:
                async for part in response.aiter_raw():
                    data += part
                    if len(data) > request.most_bytes and response.is_success:
                        raise EngineError(
                            f"{self.url}{request.path} answered with more than {request.most_bytes} bytes: is this "
                            "the rollout server's address?"
                        )
                    if len(data) > MOST_BYTES and not response.is_success:
                        break
        except httpx2.TransportError as error:
            raise _Failure(_cause(error), is_away=True) from None
        status = response.status_code
        if response.is_success:
            return bytes(data)
        problem = f"status {status}: {self._excerpt(data)}" if data else f"status {status}"
        if status != TOO_MANY and status < 500:
            raise HttpStatusError(f"{self.url}{request.path} refused the request with {problem}", status)
        raise _Failure(problem, status in AWAY, status == TOO_MANY)

    def _parsed(self, path: str, data: bytes) -> Any:
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise EngineError(
                f"{self.url}{path} answered {self._excerpt(data)!r}, expected JSON: is this the rollout server's "
                "address?"
            ) from error

    def _excerpt(self, data: bytes | bytearray) -> str:
        """The beginning of an answer in one line, without the key, which servers may repeat."""
        if self._key:
            data = data.replace(self._key.encode(), API_KEY.encode())
        return " ".join(data[: 4 * EXCERPT].decode("utf-8", "replace").split())[:EXCERPT]


def _cause(error: BaseException) -> str:
    """The system's own error, such as ConnectionRefusedError, inside the library's."""
    while inner := error.__cause__ or error.__context__:
        # A group has one error for each address of a name.
        error = getattr(inner, "exceptions", [inner])[0]
    return f"{type(error).__name__}: {error}"
