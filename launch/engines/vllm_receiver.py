"""vLLM's side of ``--rollout-weight-transfer``: a weight transfer engine in each of a server's processes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from megatron_rc.launch.engines.weight_stream import (
    StreamGroup,
    bytes_of,
    check_integer,
    join,
    opened,
    read_shared,
)


@dataclass
class Meeting(WeightTransferInitInfo):  # type: ignore[misc]
    """Place at which a sender waits for the server's processes."""

    sender: int  # number of the trainer's rank
    address: str
    port: int
    transport: str  # ``gloo`` or ``nccl``
    size: int  # members of the group: the sender and the server's processes
    timeout: float  # seconds
    word: str = ""  # the sender's random word; absent from senders of older releases, as the protocol
    protocol: str = ""  # ``PROTOCOL`` of :mod:`weight_stream`


@dataclass
class Bucket(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Description of the bucket that a sender broadcasts, or has in its memory; see :mod:`weight_stream`."""

    sender: int
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    checksum: str
    protocol: str = ""  # as in :class:`Meeting`
    process: int | None = None  # of the memory; None: the bucket is broadcast
    memory: int | None = None  # number of the memory among the process's files


class StreamReceiver(WeightTransferEngine[Meeting, Bucket]):  # type: ignore[misc]
    """Receives buckets in one process of a server, and loads their tensors.

    Its messages are JSON from whoever reaches the server's port; :mod:`weight_stream` checks their types and values.
    """

    init_info_cls = Meeting
    update_info_cls = Bucket

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.groups: dict[int, StreamGroup] = {}
        self._is_open = False

    def init_transfer_engine(self, init_info: Meeting) -> None:
        """Join a sender's group, in the place of an earlier one, as of a trainer that was started again."""
        meeting = asdict(init_info)
        sender = meeting.pop("sender")
        check_integer("sender", sender, least=0)
        self.groups.pop(sender, None)
        config = self.parallel_config
        rank = 1 + config.data_parallel_index * config.world_size + config.rank
        self.groups[sender] = join(rank, **meeting)

    def start_weight_update(self) -> None:
        """Begin an update; one that was left unfinished is ended first, so that no layer keeps a part of it."""
        if self._is_open:
            self.finish_weight_update()
        initialize_layerwise_reload(self.model)
        self._is_open = True

    def receive_weights(self, update_info: Bucket) -> None:
        """Receive one bucket and load its tensors."""
        entries = asdict(update_info)
        sender, process, memory = (entries.pop(name) for name in ("sender", "process", "memory"))
        check_integer("sender", sender, least=0)
        try:
            if memory is None:
                size = sum(bytes_of(update_info.dtype_names, update_info.shapes))
                if sender not in self.groups:
                    raise RuntimeError(f"sender {sender} has not met this server: start the run again")
                bucket = self.groups[sender].receive(size, self.device)
            else:
                bucket = read_shared(process, memory, self.device)
            weights = opened(bucket, **entries)
        except BaseException:
            # The sender sees the end of the connection, and waits no longer.
            self.groups.pop(sender, None)
            raise
        self.model.load_weights(weights)

    def finish_weight_update(self) -> None:
        """Load the layers that have not been loaded yet."""
        self._is_open = False
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave all groups."""
        self.groups.clear()
