"""Names of machines, looked up before anything waits for them: what looks one up is deaf to Ctrl-C meanwhile."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from megatron_rc.launch.errors import ConfigurationError

# Of a cluster that starts, a name may come a little later than the machines that ask for it.
LOOKUP_SECONDS = 6.0
_AGAIN_SECONDS = 0.5


def check_resolves(host: str, user: str, remedy: str) -> None:
    """Look a machine's name up.

    Args:
        host: name or address.
        user: what gives the name, as the user would say it.
        remedy: what to do about it.

    Raises:
        ConfigurationError: it has no address.
    """
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
