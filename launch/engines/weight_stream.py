"""Weights as streams of bytes from the trainer's ranks to a server's processes.

A stream has buckets, each of which holds the bytes of some tensors. Each sender of the trainer broadcasts them in one
group with all processes of the server, in which it is rank 0, or lets these processes read them in the memory of their
machine. Both sides import this module, so it needs torch alone.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
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

from megatron_rc.launch.engines.weight_sums import sum_of

BACKEND = "megatron_rc"  # name of the engine in vLLM's ``--weight-transfer-config``
# Names what sender and receiver tell each other; a change of the messages or of the checksum needs another name.
PROTOCOL = "megatron_rc weights 2"
BUCKET_BYTES = 256 << 20
ARRIVED = "arrived"  # key under which a server's processes count themselves before they join a group
_MEMORY = "weights"  # name of the memory of a bucket that is shared
_LONGEST_SHOWN = 80  # characters of a wrong value in an error


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
    family, kind, _, _, address_of_host = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with closing(socket.socket(family, kind)) as endpoint:
        endpoint.connect(address_of_host)
        return str(endpoint.getsockname()[0])


def open_store(address: str, timeout: float) -> Any:
    """A store for the members of one group, on a free port of this address alone."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    port = int(listener.getsockname()[1])
    return dist.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
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
        self._store = store
        self._receivers = size - 1
        self._rounds = 0  # broadcasts so far
        limit = timedelta(seconds=timeout)
        keys = dist.PrefixStore(prefix or transport, store)  # type: ignore[attr-defined]
        if transport == "gloo":
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            options._timeout = limit
            self._group: Any = dist.ProcessGroupGloo(keys, rank, size, options)
        else:
            settings = dist.ProcessGroupNCCL.Options()
            settings._timeout = limit
            self._group = dist.ProcessGroupNCCL(keys, rank, size, settings)

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


def join(
    rank: int,
    address: str,
    port: int,
    transport: str,
    size: int,
    timeout: float,
    word: str = "",
    protocol: str = "",
) -> StreamGroup:
    """Join the group of a sender that waits at this address, as a process of the server; see :class:`StreamGroup`.

    All arguments but ``rank`` come from the sender's HTTP request. ``word`` is the sender's random word, under which
    the members of its group find each other: see :func:`members_of`.

    Raises ValueError if an argument is not what a sender of this release sends, before any connection is made.
    """
    _check_protocol(protocol)
    _check_place(address, port, transport, size, timeout, word)
    store = members_of(dist.TCPStore(address, port, is_master=False), word)  # type: ignore[attr-defined]
    store.add(ARRIVED, 1)
    return StreamGroup(store, rank, size, transport, address_towards(address, port), timeout)


def members_of(store: Any, word: str) -> Any:
    """Return the part of a store whose keys begin with a random word, which the members of one group know.

    Whoever reaches the store's port can connect to it. A stranger who does not know the word is neither counted as a
    process of the server nor finds the group. This is no encryption: it does not stop somebody who reads the network's
    traffic, or who asks the store for its keys.
    """
    return dist.PrefixStore(word, store)  # type: ignore[attr-defined]


def _check_protocol(protocol: object) -> None:
    if protocol != PROTOCOL:
        raise ValueError(
            f"the trainer sends weights as {_shown(protocol)}, megatron_rc beside this server expects {PROTOCOL!r}: "
            "install the same release of megatron_rc for the trainer and beside the server"
        )


def _check_place(address: object, port: object, transport: object, size: object, timeout: object, word: object) -> None:
    """Check the place of a meeting, which came as JSON from whoever can reach the server."""
    if not isinstance(address, str) or not _is_address(address):
        raise _unexpected("address", address, "an IP address")
    check_integer("port", port, least=1, most=65535)
    if transport not in ("gloo", "nccl"):
        raise _unexpected("transport", transport, "gloo or nccl")
    check_integer("size", size, least=2)
    if type(timeout) not in (int, float) or not 0 < float(timeout) < math.inf:  # type: ignore[arg-type]
        raise _unexpected("timeout", timeout, "a positive number of seconds")
    if not isinstance(word, str) or not word:
        raise _unexpected("word", word, "text")


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def check_integer(name: str, value: object, *, least: int, most: int | None = None) -> None:
    """Raise ValueError unless a field of a sender's request is an integer within these limits."""
    # JSON's true is a bool, which Python counts as an integer.
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if is_integer and value >= least and (most is None or value <= most):  # type: ignore[operator]
        return
    expected = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most}"
    raise _unexpected(name, value, expected)


def _unexpected(name: str, value: object, expected: str) -> ValueError:
    return ValueError(
        f"{name} of a weight transfer is {_shown(value)}, expected {expected}: weights come from a trainer of the same "
        "release alone"
    )


def _shown(value: object) -> str:
    return repr(value)[:_LONGEST_SHOWN]


@contextmanager
def shared(bucket: Tensor) -> Iterator[dict[str, int]]:
    """Copy a bucket to memory, until the end of the block; yields the first arguments of :func:`read_shared`."""
    memory = os.memfd_create(_MEMORY)
    try:
        os.truncate(memory, bucket.numel())
        with mmap.mmap(memory, bucket.numel()) as mapped:
            copy = torch.frombuffer(mapped, dtype=torch.uint8).copy_(bucket)
            del copy  # a buffer in use could not be closed
        yield {"process": os.getpid(), "memory": memory}
    finally:
        os.close(memory)


def read_shared(process: int, memory: int, device: torch.device) -> Tensor:
    """Read a bucket in the memory of a sender's process, [bytes] uint8.

    Args:
        process: number of the sender's process, from the sender's HTTP request.
        memory: number of the memory among the files that the process has open, from the same request.
        device: the bucket is copied to it.

    Raises RuntimeError if this machine has no such memory, or if the numbers name anything but the memory of
    :func:`shared`: whoever reaches the server's port could name any file that the server's user may read.
    """
    try:
        check_integer("process", process, least=1)
        check_integer("memory", memory, least=0)
        path = f"/proc/{process}/fd/{memory}"
        # The system names a memory file so; a file of this name can stand in / alone, where root alone writes.
        if os.readlink(path) != f"/memfd:{_MEMORY} (deleted)":
            raise ValueError("it is no memory of a sender")
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch takes no read-only memory
    except (OSError, ValueError) as problem:
        raise RuntimeError(
            f"the memory of process {_shown(process)} cannot be read here ({problem}): --rollout-weight-transfer ipc "
            "needs the trainer's ranks and the server on one machine, in one container, as one user: give gloo or nccl"
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
            packed = []
            size = 0
        packed.append((name, tensor))
        size += tensor.nbytes
        del tensor
    if packed:
        yield _packed(packed)


def _packed(weights: Sequence[tuple[str, Tensor]]) -> tuple[dict[str, Any], Tensor]:
    parts = [tensor.reshape(-1).view(torch.uint8) for _, tensor in weights]
    bucket = torch.cat(parts) if len(parts) > 1 else parts[0]  # no second copy of the largest tensors
    names = [name for name, _ in weights]
    dtype_names = [str(tensor.dtype).removeprefix("torch.") for _, tensor in weights]
    shapes = [list(tensor.shape) for _, tensor in weights]
    entries = {
        "names": names,
        "dtype_names": dtype_names,
        "shapes": shapes,
        "checksum": checksum_of(bucket, names, dtype_names, shapes),
        "protocol": PROTOCOL,
    }
    return entries, bucket


def checksum_of(
    bucket: Tensor, names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]]
) -> str:
    """Checksum of a bucket's bytes, each at its place, and of the names, dtypes and shapes of its tensors.

    SHA-256 of the description and of :func:`sum_of`, whose limits it has.
    """
    described = json.dumps([list(names), list(dtype_names), [list(shape) for shape in shapes], sum_of(bucket)])
    return hashlib.sha256(described.encode()).hexdigest()


def opened(
    bucket: Tensor,
    names: Sequence[str],
    dtype_names: Sequence[str],
    shapes: Sequence[Sequence[int]],
    checksum: str,
    protocol: str = "",
) -> list[tuple[str, Tensor]]:
    """Return the names and tensors of a bucket, each in memory of its own.

    All arguments but ``bucket`` come from the sender's HTTP request, see :func:`buckets`.

    Raises ValueError if they are not what a sender of this release sends, RuntimeError if bytes, names, dtypes or
    shapes are not those of the sender's bucket.
    """
    _check_protocol(protocol)
    _check_texts("names", names)
    sizes = bytes_of(dtype_names, shapes)
    if not len(names) == len(sizes) > 0:
        raise _unexpected("names", names, f"{len(sizes)} names, one for each shape")
    if sum(sizes) != bucket.numel() or checksum_of(bucket, names, dtype_names, shapes) != checksum:
        # The content of memory must not be found in an error: so neither checksum is named.
        raise RuntimeError(
            f"the bytes, dtypes or shapes of {names[0]} to {names[-1]} are not those that the trainer sent: their "
            "checksums differ"
        )
    parts = zip(names, bucket.split(sizes), dtype_names, shapes, strict=True)
    # A part may begin at a byte at which no number of its type may.
    return [(name, part.clone().view(getattr(torch, kind)).reshape(shape)) for name, part, kind, shape in parts]


def bytes_of(dtype_names: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[int]:
    """Bytes of each tensor of a bucket; ValueError for other values than a sender's ``dtype_names`` and ``shapes``."""
    _check_texts("dtype_names", dtype_names)
    if not isinstance(shapes, (list, tuple)) or len(shapes) != len(dtype_names):
        raise _unexpected("shapes", shapes, "one shape for each dtype")
    sizes = []
    for dtype_name, shape in zip(dtype_names, shapes, strict=True):
        dtype = getattr(torch, dtype_name, None)
        if not isinstance(dtype, torch.dtype):
            raise _unexpected("dtype_names", dtype_name, "a dtype of torch")
        if not isinstance(shape, (list, tuple)):
            raise _unexpected("shapes", shape, "a list of integers")
        for length in shape:
            check_integer("shapes", length, least=0)
        sizes.append(math.prod(shape) * dtype.itemsize)
    return sizes


def _check_texts(name: str, texts: object) -> None:
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise _unexpected(name, texts, "a list of texts")
