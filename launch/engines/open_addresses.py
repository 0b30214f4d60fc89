"""Warning of a rollout server on this machine that answers where other machines can reach it.

vLLM listens on all addresses unless its command names one, and its key does not protect the requests that change its
weights. So a run looks once whether the server's port answers on other addresses than the one that the user named.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from urllib.parse import urlsplit

_CONNECT_SECONDS = 0.25  # this machine's own addresses answer or refuse at once
_ALL_SECONDS = 2.0

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def warning_of_open_addresses(url: str) -> str | None:
    """Sentence about the addresses of this machine on which a server answers too; None if there are none.

    A server on another machine cannot be judged from here. An address that the user names is taken as meant, unless it
    is one of the public internet. Never raises; takes at most two seconds.
    """
    try:
        open_addresses = _open_addresses(url)
    except (OSError, ValueError):  # no such name, no list of interfaces, or an address that Python does not know
        return None
    if not open_addresses:
        return None
    return (
        f"warning: the rollout server at {url} answers on {', '.join(open_addresses)} of this machine, so that other "
        "machines may reach it and change its weights, vLLM's in spite of a key: start it with --host 127.0.0.1; if "
        "the trainer runs on several machines, with a private address that a firewall protects"
    )


def _open_addresses(url: str) -> list[str]:
    """Addresses of this machine, not of its loopback, on which the server's port takes connections."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    named = {_parsed(entry[4][0]) for entry in socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)}
    of_machine = addresses_of_machine()
    if not any(address.is_loopback or address.is_unspecified or address in of_machine for address in named):
        return []

    deadline = time.monotonic() + _ALL_SECONDS
    meant = {address for address in named if not address.is_global}
    candidates = [address for address in of_machine if address not in meant]
    return [str(address) for address in candidates if time.monotonic() < deadline and _answers(address, port)]


def addresses_of_machine() -> list[_Address]:
    """Addresses of this machine that others may reach: no loopback, and none of one link (169.254.…, fe80::…)."""
    import psutil  # type: ignore[import-untyped]

    texts = [
        entry.address
        for interface in psutil.net_if_addrs().values()
        for entry in interface
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]
    addresses = [_parsed(text) for text in texts]
    return [address for address in addresses if not (address.is_loopback or address.is_link_local)]


def _parsed(text: str | int) -> _Address:
    return ipaddress.ip_address(str(text).partition("%")[0])  # fe80::1%eth0: without the interface


def _answers(address: _Address, port: int) -> bool:
    """Whether something takes connections at this place."""
    try:
        with socket.create_connection((str(address), port), timeout=_CONNECT_SECONDS):
            return True
    except OSError:
        return False
