"""A rollout server in threads, whose processes, which are threads too, receive weights over gloo as vLLM's do."""

import threading

import torch
import torch.distributed as dist

from megatron_rc.launch.engines.weight_stream import (
    ARRIVED,
    BACKEND,
    StreamGroup,
    address_towards,
    bytes_of,
    checksum,
    unpack,
)
from tests.support.rollout_servers import Server


class StreamServer(Server):
    """A server of ``processes`` processes.

    Attributes:
        received: by process, the weights of the update under way or of the last one.
        buckets: sizes in bytes of all buckets.
    """

    processes = 2

    def __init__(self, port=0):
        super().__init__(port)
        self.groups = {}
        self.received = [{} for _ in range(self.processes)]
        self.buckets = []
        self._one_at_a_time = threading.Lock()

    def answer(self, path, body):
        match path:
            case "/server_info":
                mode = {"logprobs_mode": "processed_logprobs"}
                return {"vllm_config": {"model_config": mode, "weight_transfer_config": {"backend": BACKEND}}}
            case "/get_world_size":
                return {"world_size": self.processes}
            case "/start_weight_update":
                self.received = [{} for _ in range(self.processes)]
            case "/init_weight_transfer_engine":
                self._on_all(self._join, body["init_info"])
            case "/update_weights":
                with self._one_at_a_time:
                    self._on_all(self._receive, body["update_info"])
                    self.buckets.append(sum(bytes_of(*self._types(body["update_info"]))))
            case _:
                return super().answer(path, body)
        return {}

    def server_close(self):
        """Close, and leave the groups: gloo's threads must not live until Python ends."""
        super().server_close()
        self.groups.clear()

    @staticmethod
    def _types(info):
        return info["dtype_names"], info["shapes"]

    def _on_all(self, function, info):
        threads = [threading.Thread(target=function, args=(rank, info)) for rank in range(self.processes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _join(self, rank, info):
        place = (info["address"], info["port"])
        store = dist.TCPStore(*place, is_master=False)
        store.add(ARRIVED, 1)
        own = address_towards(*place)
        group = StreamGroup(store, 1 + rank, info["size"], info["transport"], own, info["timeout"])
        self.groups[info["sender"], rank] = group

    def _receive(self, rank, info):
        size = sum(bytes_of(*self._types(info)))
        bucket = self.groups[info["sender"], rank].receive(size, torch.device("cpu"))
        assert checksum(bucket) == info["checksum"]
        self.received[rank].update(zip(info["names"], unpack(bucket, *self._types(info)), strict=True))
