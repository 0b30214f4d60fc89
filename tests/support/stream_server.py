"""A rollout server in threads, whose processes, which are threads too, receive weights over gloo as vLLM's do."""

import threading

import torch

from megatron_rc.launch.engines.weight_stream import BACKEND, bytes_of, join
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
                    info = body["update_info"]
                    self.buckets.append(sum(bytes_of(info["dtype_names"], info["shapes"])))
            case _:
                return super().answer(path, body)
        return {}

    def server_close(self):
        """Close, and leave the groups: gloo's threads must not live until Python ends."""
        super().server_close()
        self.groups.clear()

    def _on_all(self, function, info):
        threads = [threading.Thread(target=function, args=(rank, info)) for rank in range(self.processes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _join(self, rank, info):
        meeting = dict(info)
        sender = meeting.pop("sender")
        self.groups[sender, rank] = join(1 + rank, **meeting)

    def _receive(self, rank, info):
        entries = dict(info)
        group = self.groups[entries.pop("sender"), rank]
        self.received[rank].update(group.receive(torch.device("cpu"), **entries))
