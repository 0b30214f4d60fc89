"""Weights as streams of bytes from the trainer's ranks to a server's processes.

A stream has buckets, each of which holds the bytes of some tensors. Each sender of the trainer broadcasts them in one
group with all processes of the server, in which it is rank 0, or lets these processes read them in the memory of their
machine. Both sides import this module, so it needs torch alone.
"""

from __future__ import annotations

import math
import mmap
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BACKEND = "megatron_rc"  # name of the engine in vLLM's ``--weight-transfer-config``
BUCKET_BYTES = 256 << 20
ARRIVED = "arrived"  # key under which a server's processes count themselves before they join a group


def register() -> None:
    """Register the receiver in a process of vLLM that has it, as its plugin; vLLM may call this several times.

    vLLM finds this by an entry point of this package, which has to be installed beside vLLM. A server takes weights
    with ``--weight-transfer-config '{"backend": "megatron_rc"}'``.
    """
    with suppress(ImportError):  # vLLM before 0.32 has no such engines
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory

        if BACKEND not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(
                BACKEND, "megatron_rc.launch.engines.vllm_receiver", "StreamReceiver"
            )


def address_towards(host: str, port: int) -> str:
    """This machine's address on the way to a host, to which nothing is sent; OSError if no way leads there."""
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with closing(socket.socket(family, kind)) as end:
        end.connect(place)
        return str(end.getsockname()[0])


def open_store(address: str, timeout: float) -> Any:
    """A store for the members of one group, on a free port of this address alone."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    port = int(listener.getsockname()[1])
    return dist.TCPStore(  # type: ignore[attr-defined]
        *(address, port),
        is_master=True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


class StreamGroup:
    """A sender, rank 0, and a server's processes, ranks 1 to ``size`` − 1; no part of torch's default group.

    The constructor returns when all members are there. ``store`` is the group's alone.

    Args:
        transport: ``gloo`` or ``nccl``.
        address: gloo listens on this address of this machine.
        timeout: seconds to wait for the others, here and in each broadcast.
        prefix: prefix of torch's keys in the store, equal for all members; default: the transport.
    """

    def __init__(
        self, store: Any, rank: int, size: int, transport: str, address: str, timeout: float, prefix: str = ""
    ) -> None:
        self._store, self._receivers, self._rounds = store, size - 1, 0
        limit = timedelta(seconds=timeout)
        own = dist.PrefixStore(prefix or transport, store)  # type: ignore[attr-defined]
        if transport == "gloo":
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            options._timeout = limit
            self._group: Any = dist.ProcessGroupGloo(own, rank, size, options)
        else:
            settings = dist.ProcessGroupNCCL.Options()
            settings._timeout = limit
            self._group = dist.ProcessGroupNCCL(own, rank, size, settings)

    def is_awaited(self) -> bool:
        """Whether all receivers wait for the next broadcast; one that nobody waits for would block the sender."""
        return int(self._store.add(f"round {self._rounds + 1}", 0)) >= self._receivers

    def send(self, bucket: Tensor) -> Any:
        """Begin to broadcast a bucket; returns torch's handle of the work."""
        self._rounds += 1
        return self._group.broadcast(bucket, 0)

    def receive(self, size: int, device: torch.device) -> Tensor:
        """Receive a bucket of so many bytes; RuntimeError if the sender has gone."""
        self._rounds += 1
        self._store.add(f"round {self._rounds}", 1)
        bucket = torch.empty(size, dtype=torch.uint8, device=device)
        self._group.broadcast(bucket, 0).wait()
        return bucket


def join(rank: int, address: str, port: int, transport: str, size: int, timeout: float) -> StreamGroup:
    """The group of a sender that waits at this address, for a process of the server; see :class:`StreamGroup`."""
    store = dist.TCPStore(address, port, is_master=False)  # type: ignore[attr-defined]
    store.add(ARRIVED, 1)
    return StreamGroup(store, rank, size, transport, address_towards(address, port), timeout)


@contextmanager
def shared(bucket: Tensor) -> Iterator[dict[str, int]]:
    """Copy a bucket to memory, until the end of the block; yields the first arguments of :func:`read_shared`."""
    memory = os.memfd_create("weights")
    try:
        os.truncate(memory, bucket.numel())
        with mmap.mmap(memory, bucket.numel()) as mapped:
            copy = torch.frombuffer(mapped, dtype=torch.uint8).copy_(bucket)
            del copy  # a buffer in use could not be closed
        yield {"process": os.getpid(), "memory": memory}
    finally:
        os.close(memory)


def read_shared(process: int, memory: int, device: torch.device) -> Tensor:
    """Read a bucket in the memory of a sender's process; RuntimeError if this machine has no such memory."""
    try:
        with open(f"/proc/{process}/fd/{memory}", "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch takes no read-only memory
    except (OSError, ValueError) as problem:
        raise RuntimeError(
            f"the memory of process {process} cannot be read here ({problem}): --rollout-weight-transfer ipc needs the "
            "trainer's ranks and the server on one machine, in one container, as one user: give gloo or nccl"
        ) from problem
    return torch.frombuffer(mapped, dtype=torch.uint8).to(device)


def buckets(
    weights: Iterable[tuple[str, Tensor]], most_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Pack weights, in their order, into buckets of at most ``most_bytes``; a larger tensor has one of its own.

    Yields the arguments of :func:`opened` that describe a bucket, for JSON, and the bucket: [bytes] uint8.
    """
    packed: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        if packed and size + tensor.nbytes > most_bytes:
            yield _packed(packed)
            packed, size = [], 0
        packed.append((name, tensor))
        size += tensor.nbytes
        del tensor
    if packed:
        yield _packed(packed)


def _packed(weights: Sequence[tuple[str, Tensor]]) -> tuple[dict[str, Any], Tensor]:
    parts = [tensor.reshape(-1).view(torch.uint8) for _, tensor in weights]
    bucket = torch.cat(parts) if len(parts) > 1 else parts[0]  # no second copy of the largest tensors
    entries = {
        "names": [name for name, _ in weights],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in weights],
        "shapes": [list(tensor.shape) for _, tensor in weights],
        "checksum": sum_of(bucket),
    }
    return entries, bucket


def sum_of(bucket: Tensor) -> int:
    """Sum of a bucket's bytes, read as integers of eight bytes, modulo 2⁶⁴, and of the bytes that are left."""
    size = bucket.numel() // 8 * 8
    whole = bucket[:size] if bucket.storage_offset() % 8 == 0 else bucket[:size].clone()
    return int(whole.view(torch.int64).sum()) + int(bucket[size:].sum())


def opened(
    bucket: Tensor,
    names: Sequence[str],
    dtype_names: Sequence[str],
    shapes: Sequence[Sequence[int]],
    checksum: int,
) -> list[tuple[str, Tensor]]:
    """Names and tensors of a bucket, each in memory of its own; RuntimeError for other bytes than the sender had."""
    found = sum_of(bucket)
    if found != checksum:
        raise RuntimeError(f"the bytes of {names[0]} to {names[-1]} have the sum {found}, the sender had {checksum}")
    parts = zip(names, bucket.split(bytes_of(dtype_names, shapes)), dtype_names, shapes, strict=True)
    # A part may begin at a byte at which no number of its type may.
    return [(name, part.clone().view(getattr(torch, kind)).reshape(shape)) for name, part, kind, shape in parts]


def bytes_of(dtype_names: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[int]:
    """Bytes of each tensor of a bucket."""
    return [math.prod(shape) * getattr(torch, name).itemsize for name, shape in zip(dtype_names, shapes, strict=True)]
