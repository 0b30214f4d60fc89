"""Rendezvous of one machine's ranks: a store on the loopback, which no other machine reaches.

With ``--standalone`` torchrun opens two stores on all addresses, and unpickles the content of one.
"""

from __future__ import annotations

import argparse
import socket
import uuid

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

ADDRESS = "127.0.0.1"
_BACKEND = "loopback"


def meet_on_loopback(args: argparse.Namespace) -> None:
    """Change torchrun's arguments for one machine: the agent and its ranks share one store on the loopback."""
    rendezvous_handler_registry.register(_BACKEND, _Meeting)
    args.standalone = False
    args.rdzv_backend = _BACKEND
    args.rdzv_id = str(uuid.uuid4())
    args.rdzv_endpoint = ADDRESS
    args.local_addr = ADDRESS


class _Meeting(StaticTCPRendezvous):
    """Torchrun's rendezvous of agent 0 of 1, whose store listens on the loopback alone."""

    def __init__(self, params: RendezvousParameters) -> None:
        listener = socket.create_server((ADDRESS, 0))
        port = int(listener.getsockname()[1])
        listening_descriptor = listener.detach()
        super().__init__(ADDRESS, port, rank=0, world_size=1, run_id=params.run_id, timeout=0)
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            ADDRESS, port, is_master=True, master_listen_fd=listening_descriptor
        )

    def get_backend(self) -> str:
        return _BACKEND
