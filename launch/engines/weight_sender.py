"""One rank's part of the weights, sent to all processes of a server; see :mod:`weight_stream`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit

from torch import Tensor

from megatron_rc.launch.engines import EngineError
from megatron_rc.launch.engines.http_client import HttpClient
from megatron_rc.launch.engines.weight_stream import (
    ARRIVED,
    BUCKET_BYTES,
    StreamGroup,
    address_towards,
    awaits,
    buckets,
    open_store,
)

_PAUSE = 1e-3  # seconds between two looks at the group and at the server's answer


class WeightSender:
    """Sends weights between the server's ``/start_weight_update`` and ``/finish_weight_update``.

    Args:
        client: client of the server; a request that the server answers with an error must not be repeated.
        sender: number of this sender; a server has one group for each.
        transport: ``gloo`` or ``nccl``.
        bucket_bytes: largest number of bytes that are packed together; memory is twice as large for a moment.
    """

    def __init__(self, client: HttpClient, sender: int, transport: str, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.client, self.sender, self.transport, self.bucket_bytes = client, sender, transport, bucket_bytes
        self._group: StreamGroup | None = None

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Send weights, one bucket after the other.

        Raises:
            EngineError: the server, or one of its processes, did not take a bucket.
            ValueError: from the iterator.
        """
        if self._group is None:
            self._group = self._met()
        for entries, bucket in buckets(weights, self.bucket_bytes):
            answer = _in_background(self._announce, entries)
            try:
                self._wait(self._group.is_awaited, answer)
                work = self._group.send(bucket)
                self._wait(work.is_completed, answer)
                work.wait()
                answer.result()
            except RuntimeError as problem:
                self._group = None
                raise EngineError(
                    f"{self.client.url} did not take {entries['names'][0]} to {entries['names'][-1]}: {problem}: see "
                    "its log"
                ) from problem

    def _announce(self, entries: dict[str, Any]) -> None:
        """Tell the server which tensors the next bucket has; it answers when it has loaded them."""
        self.client.call("POST", "/update_weights", {"update_info": {"sender": self.sender, **entries}})

    def _met(self) -> StreamGroup:
        """The group of this sender and the server's processes."""
        size = 1 + int(self.client.json("GET", "/get_world_size")["world_size"])
        parts = urlsplit(self.client.url)
        address = address_towards(str(parts.hostname), parts.port or 80)
        store = open_store(address, self.client.timeout)
        place = {"address": address, "port": store.port, "transport": self.transport}
        meeting = place | {"sender": self.sender, "size": size, "timeout": self.client.timeout}
        answer = _in_background(self.client.call, "POST", "/init_weight_transfer_engine", {"init_info": meeting})
        self._wait(lambda: awaits(store, ARRIVED, size - 1), answer)
        group = StreamGroup(store, 0, size, self.transport, address, self.client.timeout)
        answer.result()
        return group

    def _wait(self, is_done: Callable[[], bool], answer: Future[Any]) -> None:
        """Wait until it is done; an error in the server's answer ends the wait."""
        begun = time.monotonic()
        while not is_done():
            if answer.done():
                answer.result()
            if time.monotonic() - begun > self.client.timeout:
                raise EngineError(f"{self.client.url} took no weights for {self.client.timeout:g} s: see its log")
            time.sleep(_PAUSE)


def _in_background(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Result of a call on a thread that does not keep the process alive."""
    future: Future[Any] = Future()

    def call() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as problem:  # the caller raises it
            future.set_exception(problem)

    threading.Thread(target=call, daemon=True).start()
    return future
