"""Rendezvous of one machine's ranks: a store on the loopback, which no other machine reaches.

With ``--standalone`` torchrun opens two stores on all addresses, and unpickles the content of one.
"""

from __future__ import annotations

import argparse
import socket
import uuid

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

ADDRESS = "127.0.0.1"
_BACKEND = "loopback"


def meet_on_loopback(args: argparse.Namespace) -> None:
    """Change torchrun's arguments for one machine: the agent and its ranks share one store on the loopback."""
    rendezvous_handler_registry.register(_BACKEND, _Meeting)
    args.standalone, args.rdzv_backend, args.rdzv_id = False, _BACKEND, str(uuid.uuid4())
    args.rdzv_endpoint = args.local_addr = ADDRESS


class _Meeting(RendezvousHandler):
    """The only agent, number 0 of 1, and the store of its ranks, as torchrun makes it from its arguments."""

    def __init__(self, params: RendezvousParameters) -> None:
        self._run_id, self._meetings = params.run_id, 0
        listener = socket.create_server((ADDRESS, 0))
        self._port = int(listener.getsockname()[1])
        opened = listener.detach()
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            ADDRESS, self._port, is_master=True, master_listen_fd=opened
        )

    @property
    def use_agent_store(self) -> bool:
        """Return True: the ranks use the agent's store."""
        return True

    def get_backend(self) -> str:
        """Return the name in torchrun's registry."""
        return _BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Begin a new meeting, as for a restart, with an empty store."""
        self._meetings += 1
        store = PrefixStore(f"meeting {self._meetings}", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(ADDRESS, self._port))

    def is_closed(self) -> bool:
        """Return False: it never closes."""
        return False

    def set_closed(self) -> None:
        """Do nothing: nobody else can come."""

    def num_nodes_waiting(self) -> int:
        """Return 0."""
        return 0

    def get_run_id(self) -> str:
        """Return the name of this run."""
        return self._run_id

    def shutdown(self) -> bool:
        """Do nothing: the store ends with this process."""
        return True
