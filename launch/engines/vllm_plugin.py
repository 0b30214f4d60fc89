"""vLLM's side of ``--rollout-weight-transfer gloo|nccl``: a weight transfer engine that every vLLM process registers.

vLLM finds :func:`register` by an entry point of this package, which has to be installed beside vLLM. A server takes
weights with ``--weight-transfer-config '{"backend": "megatron_rc"}'``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from megatron_rc.launch.engines.weight_stream import (
    ARRIVED,
    BACKEND,
    StreamGroup,
    address_towards,
    bytes_of,
    checksum,
    unpack,
)


def register() -> None:
    """Register the engine in this process; vLLM may call it several times."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, StreamEngine)


@dataclass
class Meeting(WeightTransferInitInfo):  # type: ignore[misc]
    """Place at which a sender waits for the server's processes."""

    sender: int  # pipeline stage of the trainer's rank
    address: str
    port: int
    transport: str  # ``gloo`` or ``nccl``
    size: int  # members of the group: the sender and the server's processes
    timeout: float  # seconds


@dataclass
class Bucket(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Description of the bucket that a sender broadcasts; see :func:`weight_stream.buckets`."""

    sender: int
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    checksum: int


class StreamEngine(WeightTransferEngine[Meeting, Bucket]):  # type: ignore[misc]
    """Receives buckets in one process of a server, and loads their tensors."""

    init_info_cls, update_info_cls = Meeting, Bucket

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.groups: dict[int, StreamGroup] = {}
        self._is_open = False

    def init_transfer_engine(self, init_info: Meeting) -> None:
        """Join a sender's group, in the place of an earlier one, as of a trainer that was started again."""
        self.groups.pop(init_info.sender, None)
        config = self.parallel_config
        rank = 1 + config.data_parallel_index * config.world_size + config.rank
        place = (init_info.address, init_info.port)
        store = dist.TCPStore(*place, is_master=False)  # type: ignore[attr-defined]
        store.add(ARRIVED, 1)
        self.groups[init_info.sender] = StreamGroup(
            store, rank, init_info.size, init_info.transport, address_towards(*place), init_info.timeout
        )

    def start_weight_update(self) -> None:
        """Begin an update; one that was left unfinished is ended first, so that no layer keeps a part of it."""
        if self._is_open:
            self.finish_weight_update()
        initialize_layerwise_reload(self.model)
        self._is_open = True

    def receive_weights(self, update_info: Bucket) -> None:
        """Receive one bucket, compare its checksum, and load its tensors."""
        try:
            size = sum(bytes_of(update_info.dtype_names, update_info.shapes))
            bucket = self.groups[update_info.sender].receive(size, self.device)
            found = checksum(bucket)
            if found != update_info.checksum:
                raise RuntimeError(
                    f"the bytes of {update_info.names[0]} to {update_info.names[-1]} have the sum {found}, the sender "
                    f"had {update_info.checksum}"
                )
        except BaseException:
            # The sender sees the end of the connection, and waits no longer.
            self.groups.pop(update_info.sender, None)
            raise
        tensors = unpack(bucket, update_info.dtype_names, update_info.shapes)
        del bucket
        self.model.load_weights(zip(update_info.names, tensors, strict=True))

    def finish_weight_update(self) -> None:
        """Load the layers that have not been loaded yet."""
        self._is_open = False
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave all groups."""
        self.groups.clear()
