"""A rollout server in a thread, whose weights can be read back as from SGLang 0.5 and vLLM 0.32."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support.rollout_servers import Server

VOCABULARY_MULTIPLE = 64


def joined_as_vllm(weights):
    """Weights as vLLM writes them on a GPU; ``tests/vllm/check_read_back.py`` compares them with vLLM's files."""
    stored = {name: weight.detach().contiguous() for name, weight in weights.items()}
    for name in list(stored):
        if name.endswith("q_proj.weight"):
            parts = [stored.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
            stored[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif name.endswith("gate_proj.weight"):
            parts = [stored.pop(name.replace("gate_proj", f"{part}_proj")) for part in ("gate", "up")]
            stored[name.replace("gate_proj", "gate_up_proj")] = torch.cat(parts)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in stored:
            rows = len(stored[name])
            stored[name] = torch.nn.functional.pad(stored[name], (0, 0, 0, -rows % VOCABULARY_MULTIPLE))
    if "lm_head.weight" not in stored:
        stored["lm_head.weight"] = stored.pop("model.embed_tokens.weight")
    return stored


class ReadableServer(Server):
    """A server that has weights, by Hugging Face name.

    Attributes:
        settings: SGLang's settings.
        file_name: the file that vLLM writes; None: it writes nothing.
    """

    def __init__(self, port=0):
        super().__init__(port)
        self.weights = {}
        self.settings = {"tp_size": 1, "dp_size": 1, "pp_size": 1, "quantization": None}
        self.file_name = "model-rank-0-part-0.safetensors"

    def answer(self, path, body):
        match path:
            case "/get_server_info":
                return self.settings
            case "/get_weights_by_name":
                return self.weights[body["name"]].float().tolist()[: body["truncate_size"]]
            case "/collective_rpc" if body["method"] == "save_sharded_state":
                if self.file_name:
                    save_file(joined_as_vllm(self.weights), Path(body["kwargs"]["path"]) / self.file_name)
        return super().answer(path, body)
