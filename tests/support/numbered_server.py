"""A rollout server that answers each numbered prompt under the weights that it is told to.

Which weights sample a response that is under way at a weight sync follows from timing. Here it follows from the prompt:
the server, which plays vLLM with a real model, holds a request back until it has the weights of the request's step.
So a run with partial rollouts can be repeated to the last digit.
"""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from tests.support.numbered_rollouts import CHARACTERS

# transformers replaces a method of its models while it reads one: two servers must not read at the same time.
READING = threading.Lock()


def number_of(token_ids):
    """The number that a prompt spells; the first three tokens of the vocabulary are no digits."""
    return int("".join(CHARACTERS[token - 3] for token in token_ids))


class NumberedServer(ThreadingHTTPServer):
    """vLLM's interface, before a transformers model on the CPU.

    Args:
        step_of: function from the number of a prompt to the optimizer step whose weights answer it.
        port: port on the loopback; 0: a free one.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, step_of, port=0):
        super().__init__(("127.0.0.1", port), _Handler)
        self.step_of = step_of
        self.model = None
        self.version = "default"
        self.news = threading.Condition()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, path, body):
        """(status, answer) of one request."""
        match path:
            case "/v1/models":
                return 200, {"object": "list", "data": [{"id": "numbers", "object": "model"}]}
            case "/server_info":
                return 200, {"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}}}
            case "/collective_rpc":
                with READING:
                    model = AutoModelForCausalLM.from_pretrained(body["kwargs"]["weights_path"], dtype=torch.float32)
                self.model = model.eval()
                return 200, {"results": [None]}
            case "/reset_prefix_cache":
                return 200, {"success": True}
            case "/update_weight_version":
                with self.news:
                    self.version = body["new_version"]
                    self.news.notify_all()
            case "/weight_info":
                return 200, {"weight_version": self.version}
            case "/inference/v1/generate":
                if not body:  # whether the server takes token ids
                    return 422, {"detail": "no token ids"}
                return 200, self.generated(body)
        return 200, {}

    def generated(self, body):
        """The answer to a request for a response."""
        prompt = body["token_ids"]
        sampling = body["sampling_params"]
        step = self.step_of(number_of(prompt))
        with self.news:
            self.news.wait_for(lambda: self.version.isdecimal() and int(self.version) >= step)
            version = self.version
            token_ids, log_probs = sample(self.model, prompt, sampling)
        choice = {
            "index": 0,
            "token_ids": token_ids,
            "logprobs": {
                "content": [
                    {"token_id": token, "logprob": log_prob}
                    for token, log_prob in zip(token_ids, log_probs, strict=True)
                ]
            },
            "finish_reason": "stop" if token_ids[-1] in sampling["stop_token_ids"] else "length",
            "weight_versions": [{"version": version, "start": 0, "end": len(token_ids)}],
        }
        return {"model": body["model"], "choices": [choice], "prompt_token_ids": prompt}


@torch.no_grad()
def sample(model, prompt, sampling):
    """Token ids and log-probs of one response; they depend on the prompt, the seed and the weights alone."""
    generator = torch.Generator().manual_seed(sampling["seed"])
    token_ids = []
    log_probs = []
    while len(token_ids) < sampling["max_tokens"]:
        logits = model(torch.tensor([prompt + token_ids])).logits[0, -1]
        distribution = torch.log_softmax(logits, dim=-1)
        token = int(torch.multinomial(distribution.exp(), 1, generator=generator))
        token_ids.append(token)
        log_probs.append(float(distribution[token]))
        if token in sampling["stop_token_ids"]:
            break
    return token_ids, log_probs


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self):
        self.do_POST()

    def do_POST(self):
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        status, answer = self.server.answer(self.path.partition("?")[0], body)
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *message):
        pass


@contextlib.contextmanager
def numbered_servers(count, step_of):
    """Start servers in threads; yields their addresses."""
    logging.disable_progress_bar()
    servers = [NumberedServer(step_of) for _ in range(count)]
    threads = [threading.Thread(target=server.serve_forever, daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield [server.url for server in servers]
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
