"""JSON over HTTP to a rollout server: time-outs, bounded retries, errors of one sentence. Standard library only."""

from __future__ import annotations

import http.client
import json
import random
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from megatron_rc.launch.engines import EngineError

EXCERPT = 300  # characters of a server's answer that an error repeats
CONNECT_SECONDS = 10.0


@dataclass(frozen=True)
class Retries:
    """How often a request is sent, and how long the client waits in between.

    Attributes:
        attempts: at most so many, the first one included.
        first_wait: seconds before the second attempt; doubles with each further one.
        longest_wait: seconds, the bound of the doubling and of what a server asks for in ``Retry-After``.
    """

    attempts: int = 6
    first_wait: float = 0.5
    longest_wait: float = 8.0

    def wait(self, failures: int, asked: float) -> float:
        """Seconds to wait after so many failures; up to a half less, so that many clients do not return as one."""
        doubled = self.first_wait * 2.0 ** (failures - 1)
        return min(self.longest_wait, max(asked, doubled * random.SystemRandom().uniform(0.5, 1.0)))


class HttpStatusError(EngineError):
    """The server refused a request for good: a status that is not retried.

    Attributes:
        status: of HTTP.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class HttpClient:
    """Sends requests to one server; safe to share between threads: each request has a connection of its own.

    Refused and broken connections, 429 and 5xx are retried; other statuses and answers that are late are not. Proxies
    from the environment are not used.

    Args:
        url: ``http://host:port`` or ``https://...``, without a path.
        timeout: seconds that the server may stay silent before an answer.
        retries: of one request.
        api_key: sent as a bearer token.

    Raises:
        ValueError: the url is not one.
    """

    def __init__(
        self, url: str, timeout: float = 600.0, retries: Retries | None = None, api_key: str | None = None
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            raise ValueError(f"the rollout server's address is {url!r}: expected http://host:port, without a path")
        self.url, self.timeout, self.retries = url.rstrip("/"), timeout, retries or Retries()
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, parts.port
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def json(self, method: str, path: str, body: Any = None) -> Any:
        """The answer to a request, read as JSON.

        Raises:
            EngineError: no answer, a refusal, or one that is not JSON.
        """
        data = self.call(method, path, body)
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise EngineError(
                f"{self.url}{path} answered {excerpt(data)!r}, expected JSON: is this the rollout server's address?"
            ) from error

    def call(self, method: str, path: str, body: Any = None) -> bytes:
        """The body of the answer to a request; ``body`` is sent as JSON.

        Raises:
            HttpStatusError: a status other than 2xx, 429 and 5xx.
            EngineError: no answer in time, or none after all attempts.
        """
        problem, asked = "", 0.0
        for attempt in range(self.retries.attempts):
            if attempt:
                time.sleep(self.retries.wait(attempt, asked))
            try:
                status, data, asked = self._exchange(method, path, body)
            except _NoAnswerError as error:
                raise EngineError(
                    f"{self.url}{path} was silent for {self.timeout:g} s: raise the time-out or send fewer requests at "
                    "once, and look into the server's log"
                ) from error
            except (OSError, http.client.HTTPException) as error:
                problem, asked = f"{type(error).__name__}: {error}", 0.0
                continue
            if 200 <= status < 300:
                return data
            problem = _refusal(status, data)
            if status != 429 and status < 500:
                raise HttpStatusError(f"{self.url}{path} refused the request with {problem}", status)
        raise EngineError(
            f"{self.url}{path} failed {self.retries.attempts} times, at last with {problem}: check that the server runs"
        )

    def wait_until_ready(self, path: str, seconds: float) -> None:
        """Ask for ``path`` until the server answers 2xx: it may still be loading its model.

        Raises:
            EngineError: it does not within so many seconds.
        """
        deadline, problem = time.monotonic() + seconds, "no attempt"
        while True:
            try:
                status, data, _ = self._exchange("GET", path, None)
                if 200 <= status < 300:
                    return
                problem = _refusal(status, data)
            except (OSError, http.client.HTTPException) as error:
                problem = f"{type(error).__name__}: {error}"
            if time.monotonic() >= deadline:
                raise EngineError(
                    f"there is no rollout server at {self.url} ({path}, tried for {seconds:g} s: {problem}): start it, "
                    "or name its address"
                )
            time.sleep(min(1.0, self.retries.first_wait))

    def _exchange(self, method: str, path: str, body: Any) -> tuple[int, bytes, float]:
        """(status, body, seconds that the server asks to wait) of one attempt."""
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=min(self.timeout, CONNECT_SECONDS))
        try:
            connection.connect()
            connection.sock.settimeout(self.timeout)
            payload = None if body is None else json.dumps(body, allow_nan=False).encode()
            try:
                connection.request(method, path, payload, self._headers)
                response = connection.getresponse()
                return response.status, response.read(), _seconds(response.getheader("Retry-After"))
            except TimeoutError as error:
                raise _NoAnswerError(str(error)) from error
        finally:
            connection.close()


class _NoAnswerError(TimeoutError):
    """The connection stands, and nothing comes."""


def excerpt(data: bytes) -> str:
    """The beginning of an answer, in one line."""
    return " ".join(data[: 4 * EXCERPT].decode("utf-8", "replace").split())[:EXCERPT]


def _refusal(status: int, data: bytes) -> str:
    return f"status {status}: {excerpt(data)}" if data else f"status {status}"


def _seconds(header: str | None) -> float:
    """``Retry-After`` as a number; its other form, a date, counts as absent."""
    return float(header) if header and header.strip().isdigit() else 0.0
