"""A real transformers engine behind vLLM's HTTP interface, in a process that tests can kill.

``python -m tests.support.served_engine PORT DIRECTORY`` serves the directory's model with random weights until it gets
others. Like a server that was started again, it has no weight version before.
"""

import sys
import threading
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from megatron_rc.launch.engines.transformers_engine import TransformersEngine
from megatron_rc.launch.tasks.ends import ResponseEnds
from megatron_rc.records.rollout import SamplingParams
from tests.support.rollout_servers import ROUTE, Server, content_of


class EngineServer(Server):
    """The server that plays vLLM, with a model's answers."""

    def __init__(self, port, directory):
        config = AutoConfig.from_pretrained(directory)
        self.engine = TransformersEngine(config, "fp32", ResponseEnds((config.eos_token_id,)), 0, torch.device("cpu"))
        self.turn = threading.Lock()
        super().__init__(port)

    def answer(self, path, body):
        with self.turn:
            if path == "/collective_rpc":
                files = sorted(Path(body["kwargs"]["weights_path"]).glob("*.safetensors"))
                self.engine.load_weights([item for file in files for item in load_file(file).items()], 0)
            if path == ROUTE:
                return self.tokens(body)
            return super().answer(path, body)

    def tokens(self, body):
        sampling = body["sampling_params"]
        prompt = body["token_ids"]
        params = SamplingParams(temperature=sampling["temperature"], top_p=sampling["top_p"], top_k=sampling["top_k"])
        (got,) = self.engine.sample([prompt], params, sampling["max_tokens"], sampling["seed"])
        choice = {"logprobs": content_of(got.token_ids, got.log_probs), "finish_reason": got.finish_reason}
        return {
            "model": body["model"],
            "choices": [choice | {"token_ids": got.token_ids}],
            "prompt_token_ids": prompt,
        }


if __name__ == "__main__":
    EngineServer(int(sys.argv[1]), sys.argv[2]).serve_forever()
