"""What a rollout server is asked, where, and how often."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from megatron_rc.launch.engines import EngineError

API_KEY = "ROLLOUT_API_KEY"  # the environment variable with the servers' key
MOST_BYTES = 1 << 20  # of an answer that has no tokens


@dataclass(frozen=True)
class Request:
    """What is sent; ``body`` as JSON. An answer of more than ``most_bytes`` is an error."""

    method: str
    path: str
    body: Any = None
    most_bytes: int = MOST_BYTES


@dataclass(frozen=True)
class Retries:
    """How often a request is sent that the server fails on, and how long the client waits in between.

    Attributes:
        attempts: at most so many answers with a status of 5xx that does not say that the server is away.
        first_wait: seconds before the second attempt; doubles with each further one.
        longest_wait: seconds, the bound of the doubling and of what a server asks for in ``Retry-After``.
    """

    attempts: int = 6
    first_wait: float = 0.5
    longest_wait: float = 8.0

    def wait(self, failures: int, asked: float) -> float:
        """Seconds to wait after so many failures; up to a half less, so that many clients do not return as one."""
        doubled = self.first_wait * 2.0 ** min(failures - 1, 30)
        return min(self.longest_wait, max(asked, doubled * random.SystemRandom().uniform(0.5, 1.0)))


class HttpStatusError(EngineError):
    """The server refused a request for good: a status that is not retried.

    Attributes:
        status: of HTTP.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def check_url(url: str) -> None:
    """Whether the address can be that of a server.

    Raises:
        ValueError: says what is expected, and repeats nothing that may be secret.
    """
    if "@" in url:
        raise ValueError(
            "the rollout server's address has a user or a password in it: leave them out, and give a key in the "
            f"environment variable {API_KEY}"
        )
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_address = is_address and url.isprintable()
    except ValueError:  # no port, or no address of IPv6
        is_address = False
    if not is_address or parts.path.strip("/") or parts.query or parts.fragment:
        raise ValueError(f"the rollout server's address is {url!r}: expected http://host:port, without a path")


def check_key(key: str | None) -> None:
    """Whether a header can carry the key of the servers.

    Raises:
        ValueError: it cannot; the key is not repeated.
    """
    if key and not (key.isascii() and key.isprintable() and " " not in key):
        raise ValueError(f"the environment variable {API_KEY} has characters other than printable ASCII without spaces")
