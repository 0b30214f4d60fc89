"""Early look-up of machines' names: torch looks names up for minutes, and ignores Ctrl-C meanwhile."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from megatron_rc.launch.errors import ConfigurationError

# While a cluster starts, a name may appear a little later than the machines that ask for it.
LOOKUP_SECONDS = 6.0
_AGAIN_SECONDS = 0.5


def check_resolves(host: str, user: str, remedy: str) -> None:
    """Refuse a machine's name without an address; the message has ``user``, the flag with the name, and ``remedy``."""
    found = threading.Event()

    def look_up() -> None:
        until = time.monotonic() + LOOKUP_SECONDS
        while not found.is_set() and time.monotonic() < until:
            with contextlib.suppress(OSError, UnicodeError):
                socket.getaddrinfo(host, None)
                found.set()
            time.sleep(_AGAIN_SECONDS)

    threading.Thread(target=look_up, daemon=True).start()
    if not found.wait(LOOKUP_SECONDS):
        raise ConfigurationError(
            f"{user}: the name {host} has no address, looked up for {LOOKUP_SECONDS:.0f} s: {remedy}"
        )
