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


@dataclass(frozen=True)
class _Failure:
    """A failed attempt that may be retried."""

    problem: str
    is_away: bool  # no server answered
    is_busy: bool = False  # the server answered 429
    asked: float = 0.0  # seconds that the server asks to wait


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
        retries: rules of retries.
        api_key: bearer token that passes ``check_key``; never shown.

    Attributes:
        absences: number of attempts that found no server.
    """

    def __init__(
        self, url: str, timeout: float = 600.0, retries: Retries | None = None, api_key: str | None = None
    ) -> None:
        self.url, self.timeout, self.retries = url.rstrip("/"), timeout, retries or Retries()
        self.absences = 0
        self._key = api_key
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def json(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request and read the answer as JSON.

        Raises:
            EngineError: see :meth:`call`; or the answer is not JSON.
        """
        return self._parsed(path, self.call(method, path, body))

    def call(self, method: str, path: str, body: Any = None) -> bytes:
        """Send a request and return the answer's body.

        Raises:
            HttpStatusError: the server refused the request.
            EngineError: the answer is late or too large, or all attempts failed.
        """
        (answer,) = self._send([Request(method, path, body)], lambda _, data: data, 1, nullcontext)
        return answer

    def read_all(
        self, requests: Sequence[Request], read: Callable[[int, Any], Result], concurrency: int, slot: Slot
    ) -> list[Result]:
        """Send all requests and return ``read(index, answer)`` of each in their order; the first error ends all.

        Args:
            requests: requests whose answers are JSON.
            read: called as soon as an answer is there.
            concurrency: largest number of connections at a time.
            slot: makes the context of each request.

        Raises:
            EngineError: see :meth:`json`; or an error of ``read``.
        """
        paths = [request.path for request in requests]
        return self._send(
            requests, lambda index, data: read(index, self._parsed(paths[index], data)), concurrency, slot
        )

    def wait_until_ready(self, path: str, seconds: float) -> None:
        """Request ``path`` until the server answers 2xx; it may still be loading its model.

        Raises:
            EngineError: the server is not ready after ``seconds``.
        """
        problems: list[str] = []

        async def wait() -> None:
            async with self._connections(1) as connections:
                while True:
                    problems.append("silence")
                    try:
                        answer = await self._attempt(connections, Request("GET", path))
                    except HttpStatusError as error:
                        problems[-1] = str(error)
                    else:
                        if isinstance(answer, bytes):
                            return
                        problems[-1] = answer.problem
                    await anyio.sleep(min(1.0, self.retries.first_wait))

        async def wait_in_time() -> None:
            with anyio.fail_after(max(seconds, self.retries.first_wait)):
                await wait()

        try:
            anyio.run(wait_in_time)
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

        async def one(index: int, connections: httpx2.AsyncClient, group: TaskGroup) -> None:
            async with slot():
                try:
                    results[index] = read(index, await self._insist(connections, requests[index]))
                except Exception as error:
                    errors.append(error)
                    group.cancel_scope.cancel()

        async def together() -> None:
            async with self._connections(number) as connections, anyio.create_task_group() as group:
                for index in range(len(requests)):
                    group.start_soon(one, index, connections, group)

        anyio.run(together)
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
                    answer = await self._attempt(connections, request)
            except TimeoutError as error:
                raise EngineError(
                    f"{self.url}{request.path} gave no whole answer within {self.timeout:g} s: raise --rollout-timeout "
                    "or lower --rollout-concurrency, and look into the server's log"
                ) from error
            if isinstance(answer, bytes):
                return answer
            failures += 1
            give_up = min(give_up, time.monotonic() + self.timeout)
            self.absences += answer.is_away
            failures_of_the_server += not (answer.is_away or answer.is_busy)
            if failures_of_the_server == self.retries.attempts or time.monotonic() >= give_up:
                raise EngineError(
                    f"{self.url}{request.path} failed {failures} times, at last with {answer.problem}: check that the "
                    "server runs"
                )
            await anyio.sleep(self.retries.wait(failures, answer.asked))

    async def _attempt(self, connections: httpx2.AsyncClient, request: Request) -> bytes | _Failure:
        """Body of one answer, or a failure that may be retried; a status that is not retried is raised."""
        try:
            status, data, asked = await self._exchange(connections, request)
        except httpx2.TransportError as error:
            return _Failure(_cause(error), is_away=True)
        if 200 <= status < 300:
            return data
        problem = f"status {status}: {self._excerpt(data)}" if data else f"status {status}"
        if status != TOO_MANY and status < 500:
            raise HttpStatusError(f"{self.url}{request.path} refused the request with {problem}", status)
        return _Failure(problem, status in AWAY, status == TOO_MANY, asked)

    async def _exchange(self, connections: httpx2.AsyncClient, request: Request) -> tuple[int, bytes, float]:
        """Send once; (status, body, seconds that the server asks to wait). A refusal's body may be cut."""
        content = None if request.body is None else json.dumps(request.body, allow_nan=False)
        data = bytearray()
        async with connections.stream(request.method, request.path, content=content) as response:
            async for part in response.aiter_raw():
                data += part
                if len(data) > request.most_bytes and response.is_success:
                    raise EngineError(
                        f"{self.url}{request.path} answered with more than {request.most_bytes} bytes: is this the "
                        "rollout server's address?"
                    )
                if len(data) > MOST_BYTES and not response.is_success:
                    break
        asked = response.headers.get("Retry-After", "").strip()
        # The other form of the header, a date, is ignored.
        return response.status_code, bytes(data), float(asked) if asked.isdecimal() else 0.0

    def _parsed(self, path: str, data: bytes) -> Any:
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise EngineError(
                f"{self.url}{path} answered {self._excerpt(data)!r}, expected JSON: is this the rollout server's "
                "address?"
            ) from error

    def _excerpt(self, data: bytes) -> str:
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
