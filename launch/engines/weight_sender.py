"""Senders of this rank's weights, each to the processes of one server; see :mod:`weight_stream`."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit

from torch import Tensor

from megatron_rc.launch.engines import EngineError
from megatron_rc.launch.engines.http_client import HttpClient
from megatron_rc.launch.engines.weight_stream import (
    ARRIVED,
    BACKEND,
    BUCKET_BYTES,
    PROTOCOL,
    StreamGroup,
    address_towards,
    buckets,
    members_of,
    open_store,
    shared,
)

_LEAVE_SECONDS = 10.0  # for a server that is asked to leave a group, and may be gone
_PAUSE = 1e-3  # seconds between two looks at the group and at the server's answer


def send_weights(
    weights: Iterable[tuple[str, Tensor]], senders: Sequence[WeightSender], bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Send weights, one bucket after the other, each to one server after the other.

    One after the other, because two senders that waited for two servers at once could wait for each other. A bucket has
    at most ``bucket_bytes``; memory is twice as large for a moment. Raises EngineError if a server, or one of its
    processes, did not take a bucket.
    """
    for entries, bucket in buckets(weights, bucket_bytes):
        for sender in senders:
            try:
                sender.send(entries, bucket)
            except RuntimeError as problem:
                sender.close()
                names = entries["names"]
                raise EngineError(
                    f"{sender.client.url} did not take {names[0]} to {names[-1]}: {problem}: see its log"
                ) from problem


class MemorySender:
    """Sends this rank's part of an update to vLLM through memory of the machine that both run on; see :func:`shared`.

    Args:
        client: client of the server; a request that the server answers with an error must not be repeated.
        number: number of this sender among all senders to this server.
    """

    def __init__(self, client: HttpClient, number: int) -> None:
        self.client = client
        self.number = number

    def send(self, entries: dict[str, Any], bucket: Tensor) -> None:
        """Let the server's processes read a bucket, see :func:`buckets`; EngineError if the server does not take it."""
        with shared(bucket) as memory:
            self.client.call("POST", "/update_weights", {"update_info": {"sender": self.number, **memory, **entries}})

    def close(self) -> None:
        """Do nothing: the memory of a bucket is given back when the server has answered."""


class GroupSender(ABC):
    """Sends as :class:`MemorySender`, over a process group with the server's processes; by ``gloo`` or ``nccl``."""

    _counts_receivers = True  # whether the server's processes say when they wait for a bucket

    def __init__(self, client: HttpClient, number: int, transport: str) -> None:
        self.client = client
        self.number = number
        self.transport = transport
        self._group: StreamGroup | None = None

    def send(self, entries: dict[str, Any], bucket: Tensor) -> None:
        """Meet the server's processes, the first time, and broadcast a bucket to them, see :func:`buckets`.

        Raises EngineError if the server did not take it, RuntimeError from the process group.
        """
        if self._group is None:
            parts = urlsplit(self.client.url)
            address = address_towards(str(parts.hostname), parts.port or 80)
            self._group = self._meet(address, open_store(address, self.client.timeout))
        group = self._group
        answer = _in_background(self._announce, entries)
        self._wait(lambda: not self._counts_receivers or group.is_awaited(), answer)
        work = group.send(bucket)
        self._wait(work.is_completed, answer)
        work.wait()
        answer.result()

    @abstractmethod
    def _meet(self, address: str, store: Any) -> StreamGroup:
        """The group, after the server's processes have come to the store at this address."""

    @abstractmethod
    def _announce(self, entries: dict[str, Any]) -> None:
        """Tell the server which tensors the next bucket has; it answers when it has loaded them."""

    def close(self) -> None:
        """Leave the group; this waits for a broadcast under way."""
        self._group = None

    def _wait(self, is_done: Callable[[], bool], answer: Future[Any]) -> None:
        """Wait until it is done; an error in the server's answer ends the wait."""
        begun = time.monotonic()
        while not is_done():
            if answer.done():
                answer.result()
            if time.monotonic() - begun > self.client.timeout:
                raise EngineError(f"{self.client.url} took no weights for {self.client.timeout:g} s: see its log")
            time.sleep(_PAUSE)


class VllmSender(GroupSender):
    """Sends to vLLM between ``/start_weight_update`` and ``/finish_weight_update``; see :mod:`vllm_receiver`."""

    def _meet(self, address: str, store: Any) -> StreamGroup:
        size = 1 + int(self.client.json("GET", "/get_world_size")["world_size"])
        # Only the server is told the word: a stranger who connects to the store first is not counted, nor joins.
        word = secrets.token_hex(16)
        meeting = {
            "sender": self.number,
            "address": address,
            "port": store.port,
            "transport": self.transport,
            "size": size,
            "timeout": self.client.timeout,
            "word": word,
            "protocol": PROTOCOL,
        }
        answer = _in_background(self.client.call, "POST", "/init_weight_transfer_engine", {"init_info": meeting})
        members = members_of(store, word)
        self._wait(lambda: members.add(ARRIVED, 0) >= size - 1, answer)
        group = StreamGroup(members, 0, size, self.transport, address, self.client.timeout)
        answer.result()
        return group

    def _announce(self, entries: dict[str, Any]) -> None:
        self.client.call("POST", "/update_weights", {"update_info": {"sender": self.number, **entries}})


class SglangSender(GroupSender):
    """Sends to SGLang's own group for weights, in the form that SGLang names ``flattened_bucket``.

    SGLang makes the group by ``init_custom_process_group`` of ``sglang/srt/utils/common.py``: torch then puts its keys
    under the name of the group, twice, and the kind of device.
    """

    _counts_receivers = False
    _name = ""

    def _meet(self, address: str, store: Any) -> StreamGroup:
        size = 1 + int(self.client.json("GET", "/get_server_info")["tp_size"])
        # A server keeps the groups of earlier trainers, so each has a name of its own. It is random, so that a stranger
        # who connects to the store does not find the group.
        self._name = f"{BACKEND}-{secrets.token_hex(16)}"
        prefix = f"{self._name}/{self._name}//{'cpu' if self.transport == 'gloo' else 'cuda'}/"
        meeting = {
            "master_address": address,
            "master_port": store.port,
            "group_name": self._name,
            "rank_offset": 1,
            "world_size": size,
            "backend": self.transport,
        }
        answer = _in_background(self.client.call, "POST", "/init_weights_update_group", meeting)
        timeout = self.client.timeout
        group = _in_background(StreamGroup, store, 0, size, self.transport, address, timeout, prefix)
        self._wait(group.done, answer)
        answer.result()
        joined: StreamGroup = group.result()
        return joined

    def _announce(self, entries: dict[str, Any]) -> None:
        tensors = {"names": entries["names"], "dtypes": entries["dtype_names"], "shapes": entries["shapes"]}
        form = {"load_format": "flattened_bucket", "flush_cache": False, "group_name": self._name}
        self.client.call("POST", "/update_weights_from_distributed", tensors | form)

    def close(self) -> None:
        """Leave the group, with the server's processes, so that a broadcast that they do not receive ends."""
        if self._group is not None:
            self.client.timeout = _LEAVE_SECONDS  # the last request
            with contextlib.suppress(EngineError):
                self.client.call("POST", "/destroy_weights_update_group", {"group_name": self._name})
        super().close()


WeightSender = MemorySender | GroupSender


def _in_background(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Call ``function`` on a thread of its own, and return the future of its result or exception.

    The thread is a daemon: a server that never answers does not keep the process alive.
    """
    future: Future[Any] = Future()

    def call() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:  # ``future.result()`` raises it in the caller
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return future
