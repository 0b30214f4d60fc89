"""Rollout servers in threads, with threads as processes that receive weights, as those of vLLM and SGLang do."""

import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_rc.launch.engines.weight_stream import BACKEND, bytes_of, join, opened, read_shared
from tests.support.rollout_servers import Server


class StreamServer(Server):
    """vLLM's server of ``processes`` processes.

    Attributes:
        received: by process, the weights of the update under way or of the last one.
        buckets: sizes in bytes of all buckets.
    """

    processes = 2
    # paths
    joins = "/init_weight_transfer_engine"
    takes = "/update_weights"

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
        cpu = torch.device("cpu")
        sender, process, memory = (entries.pop(name, None) for name in ("sender", "process", "memory"))
        if memory is None:
            bucket = self.groups[sender, rank].receive(sum(bytes_of(info["dtype_names"], info["shapes"])), cpu)
        else:
            bucket = read_shared(process, memory, cpu)
        self.received[rank].update(opened(bucket, **entries))


class SglangStreamServer(StreamServer):
    """SGLang's server of ``processes`` tensor-parallel processes."""

    joins = "/init_weights_update_group"
    takes = "/update_weights_from_distributed"

    def answer(self, path, body):
        match path:
            case "/get_server_info":
                return {"tp_size": self.processes, "pp_size": 1, "dp_size": 1}
            case "/get_model_info":
                return {"model_path": "", "is_generation": True, "weight_version": self.version}
            case "/init_weights_update_group":
                self._on_all(self._join, body)
            case "/update_weights_from_distributed":
                with self._one_at_a_time:
                    assert body["load_format"] == "flattened_bucket"
                    self._on_all(self._receive, body)
                    self.buckets.append(sum(bytes_of(body["dtypes"], body["shapes"])))
            case "/destroy_weights_update_group":
                for rank in range(self.processes):
                    del self.groups[body["group_name"], rank]
            case _:
                return super().answer(path, body)
        return {"success": True, "message": ""}

    def _join(self, rank, info):
        """As SGLang's ``init_custom_process_group`` does, in a process that has no other group of this name."""
        store = dist.TCPStore(info["master_address"], info["master_port"], info["world_size"], is_master=False)
        for prefix in (info["group_name"], f"{info['group_name']}/", "cpu/"):
            store = dist.PrefixStore(prefix, store)
        group = dist.ProcessGroupGloo(store, info["rank_offset"] + rank, info["world_size"], timedelta(seconds=60))
        self.groups[info["group_name"], rank] = group

    def _receive(self, rank, info):
        """As SGLang's ``_update_bucketed_weights_from_distributed`` does."""
        kinds = [getattr(torch, name) for name in info["dtypes"]]
        made = [torch.empty(shape, dtype=kind) for shape, kind in zip(info["shapes"], kinds, strict=True)]
        flat = torch.cat([tensor_of_part.flatten().view(torch.uint8) for tensor_of_part in made])
        self.groups[info["group_name"], rank].broadcast(flat, 0).wait()
        parts = flat.split([tensor_of_part.nbytes for tensor_of_part in made])
        for name, part, tensor_of_part in zip(info["names"], parts, made, strict=True):
            self.received[rank][name] = part.clone().view(tensor_of_part.dtype).reshape(tensor_of_part.shape)
