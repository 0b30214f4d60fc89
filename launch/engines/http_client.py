"""JSON over HTTP to a rollout server: many requests at once, limits of time and size, errors of one sentence.

httpx2 speaks HTTP and keeps connections; when to try again, and when to give up, is decided here.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
import httpx2
from anyio import CapacityLimiter
from anyio.abc import TaskGroup

from megatron_rc.launch.engines import EngineError
from megatron_rc.launch.engines.requests import (
    API_KEY,
    MOST_BYTES,
    HttpStatusError,
    Request,
    Retries,
    check_key,
    check_url,
)

Result = TypeVar("Result")
EXCERPT = 300  # characters of a server's answer that an error repeats
CONNECT_SECONDS = 10.0
TOO_MANY = 429
# What a proxy answers while no server stands behind it.
AWAY = (502, 503, 504)
# One line a request otherwise.
logging.getLogger("httpx2").setLevel(logging.WARNING)


@dataclass(frozen=True)
class _Failure:
    """Why an attempt may be followed by another: in words, whether no server answered, and what wait it asks for."""

    problem: str
    is_away: bool
    is_busy: bool = False
    asked: float = 0.0


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Those that the system trusts; reading them takes longer than a client is made in."""
    return ssl.create_default_context()


class HttpClient:
    """Sends requests to one server, from any thread.

    An answer has ``timeout`` seconds. A server that is away (connections refused or broken, 502 to 504) or busy (429)
    has as long to come back, from the first failure of a request; other 5xx are retried a few times, other statuses and
    answers that are late or too large are not. Proxies from the environment are not used.

    Args:
        url: ``http://host:port`` or ``https://...``, without a path.
        timeout: seconds of one answer, from connecting to its last byte.
        retries: of one request.
        api_key: sent as a bearer token, and never shown.

    Attributes:
        absences: attempts so far that found no server.

    Raises:
        ValueError: the url is not one, or the key cannot be sent.
    """

    def __init__(
        self, url: str, timeout: float = 600.0, retries: Retries | None = None, api_key: str | None = None
    ) -> None:
        check_url(url)
        check_key(api_key)
        self.url, self.timeout, self.retries = url.rstrip("/"), timeout, retries or Retries()
        self.absences = 0
        self._key = api_key
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def json(self, method: str, path: str, body: Any = None) -> Any:
        """The answer to a request, read as JSON.

        Raises:
            EngineError: no answer, a refusal, or one that is not JSON.
        """
        return self._parsed(path, self.call(method, path, body))

    def call(self, method: str, path: str, body: Any = None) -> bytes:
        """The body of the answer to a request.

        Raises:
            HttpStatusError: a status other than 2xx, 429 and 5xx.
            EngineError: no answer in time, one that is too large, or none after all attempts.
        """

        async def alone() -> bytes:
            async with self._connections(1) as connections:
                return await self._insist(connections, Request(method, path, body))

        return anyio.run(alone)

    def read_all(
        self, requests: Sequence[Request], read: Callable[[int, Any], Result], concurrency: int
    ) -> list[Result]:
        """``read(index, answer)`` of every request, in their order; the first error of any ends all of them.

        Args:
            requests: answered with JSON.
            read: called as soon as an answer is there.
            concurrency: requests under way at once; each has a connection, which the next one takes over.

        Raises:
            EngineError: see :meth:`json`; or what ``read`` raises.
        """
        results: dict[int, Result] = {}
        errors: list[Exception] = []

        async def one(index: int, connections: httpx2.AsyncClient, group: TaskGroup, turns: CapacityLimiter) -> None:
            async with turns:
                try:
                    data = await self._insist(connections, requests[index])
                    results[index] = read(index, self._parsed(requests[index].path, data))
                except Exception as error:
                    errors.append(error)
                    group.cancel_scope.cancel()

        async def together() -> None:
            turns = CapacityLimiter(concurrency)
            async with self._connections(concurrency) as connections, anyio.create_task_group() as group:
                for index in range(len(requests)):
                    group.start_soon(one, index, connections, group, turns)

        anyio.run(together)
        if errors:
            raise errors[0]
        return [results[index] for index in range(len(requests))]

    def wait_until_ready(self, path: str, seconds: float) -> None:
        """Ask for ``path`` until the server answers 2xx: it may still be loading its model.

        Raises:
            EngineError: it does not within so many seconds.
        """

        async def wait() -> str:
            problem = ""
            async with self._connections(1) as connections:
                deadline = time.monotonic() + seconds
                while True:
                    try:
                        with anyio.fail_after(max(self.retries.first_wait, deadline - time.monotonic())):
                            answer = await self._attempt(connections, Request("GET", path))
                        if isinstance(answer, bytes):
                            return ""
                        problem = answer.problem
                    except TimeoutError:
                        # The end of all attempts, which may have come too soon for this one: what was known stays.
                        return f"{problem}, then silence" if problem else "silence"
                    except HttpStatusError as error:
                        problem = str(error)
                    if time.monotonic() >= deadline:
                        return problem
                    await anyio.sleep(min(1.0, self.retries.first_wait))

        problem = anyio.run(wait)
        if problem:
            raise EngineError(
                f"there is no rollout server at {self.url} ({path}, tried for {seconds:g} s: {problem}): start it, or "
                "name its address"
            )

    def _connections(self, number: int) -> httpx2.AsyncClient:
        """To the server, kept from one request to the next."""
        return httpx2.AsyncClient(
            base_url=self.url,
            headers=self._headers,
            verify=_certificates(),
            trust_env=False,
            limits=httpx2.Limits(max_connections=number, max_keepalive_connections=number),
            # The whole attempt has a limit; a connection is made soon or not at all.
            timeout=httpx2.Timeout(None, connect=min(self.timeout, CONNECT_SECONDS)),
        )

    async def _insist(self, connections: httpx2.AsyncClient, request: Request) -> bytes:
        """The answer, after as many attempts as it takes and as are allowed."""
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
        """The body of one answer, or why there is none; statuses that no further attempt mends are raised."""
        try:
            status, data, asked = await self._exchange(connections, request)
        except httpx2.TransportError as error:
            return _Failure(_in_words(error), is_away=True)
        if 200 <= status < 300:
            return data
        problem = f"status {status}: {self._excerpt(data)}" if data else f"status {status}"
        if status != TOO_MANY and status < 500:
            raise HttpStatusError(f"{self.url}{request.path} refused the request with {problem}", status)
        return _Failure(problem, status in AWAY, status == TOO_MANY, asked)

    async def _exchange(self, connections: httpx2.AsyncClient, request: Request) -> tuple[int, bytes, float]:
        """(status, body, seconds that the server asks to wait); of a refusal the beginning of the body is enough."""
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
        return response.status_code, bytes(data), _seconds(response.headers.get("Retry-After"))

    def _parsed(self, path: str, data: bytes) -> Any:
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise EngineError(
                f"{self.url}{path} answered {self._excerpt(data)!r}, expected JSON: is this the rollout server's "
                "address?"
            ) from error

    def _excerpt(self, data: bytes) -> str:
        """The beginning of an answer, in one line; servers may repeat what they were sent."""
        if self._key:
            data = data.replace(self._key.encode(), API_KEY.encode())
        return " ".join(data[: 4 * EXCERPT].decode("utf-8", "replace").split())[:EXCERPT]


def _in_words(error: BaseException) -> str:
    """What the system said: libraries' own words for a refused connection are "All connection attempts failed"."""
    while inner := error.__cause__ or error.__context__:
        # One failure for each address of a name.
        error = getattr(inner, "exceptions", [inner])[0]
    return f"{type(error).__name__}: {error}"


def _seconds(header: str | None) -> float:
    """``Retry-After`` as a number; its other form, a date, counts as absent."""
    return float(header) if header and header.strip().isdecimal() else 0.0
