"""The meeting of a run's ranks on one machine: a store on the loopback, which no other machine reaches.

With ``--standalone`` torchrun opens two stores on all addresses, and unpickles what stands in one of them.
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
        """The ranks join by the agent's store."""
        return True

    def get_backend(self) -> str:
        """The name in torchrun's registry."""
        return _BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet anew, as for a restart: nothing that the agent told before counts."""
        self._meetings += 1
        store = PrefixStore(f"meeting {self._meetings}", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(ADDRESS, self._port))

    def is_closed(self) -> bool:
        """It never is."""
        return False

    def set_closed(self) -> None:
        """Nobody else could come."""

    def num_nodes_waiting(self) -> int:
        """None."""
        return 0

    def get_run_id(self) -> str:
        """The name of this run."""
        return self._run_id

    def shutdown(self) -> bool:
        """The store ends with this process."""
        return True
