"""Rollout servers that run in threads, and engines that use them."""

import functools
import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from megatron_rc.launch.engines.http_client import HttpClient
from megatron_rc.launch.engines.model_directory import ModelDirectory
from megatron_rc.launch.engines.publishers import FilePublisher
from megatron_rc.launch.engines.requests import Retries
from megatron_rc.launch.engines.server import ServerEngine
from megatron_rc.launch.engines.sglang_client import SglangClient
from megatron_rc.launch.engines.vllm_client import ROUTE, VllmClient
from megatron_rc.launch.tasks.ends import ResponseEnds
from megatron_rc.records.rollout import SamplingParams

EOS = 1
TOKENS = 4
ENDS = ResponseEnds((EOS,))

QUICK = Retries(attempts=4, first_wait=0.01, longest_wait=0.05)

CONFIG = LlamaConfig(
    vocab_size=13,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    tie_word_embeddings=True,
)

GENERATE = {VllmClient: ROUTE, SglangClient: "/generate"}
OF_ENGINE = {"concurrency", "partial_rollouts", "max_versions"}  # arguments of an engine; others are its client's


class Server(ThreadingHTTPServer):
    """Answers as vLLM 0.32 and SGLang 0.5 document; tokens and log-probs depend on prompt and seed.

    Attributes:
        seen: (path, body) of all requests.
        lines: paths of all requests, with what follows a question mark.
        faults: by path, one for each coming request: (status, body), a function that changes the answer, or seconds.
        always: by path, a function that changes every answer.
        most: largest number of requests at the same time.
        hold: seconds that a response takes.
        together: a barrier that every response waits for, or None.
        breaks: True: connections end without an answer.
        route_status: answer to an empty request for tokens; 403: vLLM without its routes, 404: an older one.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, port=0):
        super().__init__(("127.0.0.1", port), Handler)
        self.lock = threading.Lock()
        self.seen = []
        self.lines = []
        self.faults = {}
        self.always = {}
        self.most = self.now = 0
        self.hold = 0.0
        self.together = None
        self.version = "default"
        self.breaks = False
        self.route_status = 422
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def paths(self):
        return [path for path, _ in self.seen]

    def handle_error(self, request, address):
        """Ignore the error of a client that gave up."""

    def respond(self, path, body):
        """(status, answer) of one request."""
        if self.breaks:
            raise ConnectionResetError
        if path == ROUTE and not body:  # without its fields
            return self.route_status, {"detail": "refused"}
        with self.lock:
            self.seen.append((path, body))
            fault = self.faults[path].pop(0) if self.faults.get(path) else None
            self.now += 1
            self.most = max(self.most, self.now)
        if path in GENERATE.values():
            if self.together:
                self.together.wait()
            time.sleep(self.hold)
        with self.lock:
            self.now -= 1
        if isinstance(fault, float):
            time.sleep(fault)
        if isinstance(fault, tuple):
            return fault
        answer = self.answer(path, body)
        for change in (self.always.get(path), fault if callable(fault) else None):
            answer = change(answer) if change else answer
        return 200, answer

    def answer(self, path, body):
        match path:
            case "/v1/models":
                return {"object": "list", "data": [{"id": "tiny", "object": "model"}]}
            case "/server_info":
                return {"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}}}
            case "/update_weight_version":
                self.version = body["new_version"]
            case "/weight_info":
                return {"weight_version": self.version}
            case "/collective_rpc":
                return {"results": [None]}
            case "/reset_prefix_cache":
                return {"success": True}
            case "/update_weights_from_disk":
                self.version = body["weight_version"]
                return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
            case "/inference/v1/generate":
                return token_answer(body, self.version)
            case "/generate":
                return generation(body, self.version)
        return {}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self):
        self.do_POST()

    def do_POST(self):
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        self.server.lines.append(self.path)
        status, answer = self.server.respond(self.path.partition("?")[0], body)
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *message):
        pass


def draw(prompt, seed, count):
    """(tokens without an end of text, log-probs)."""
    tokens = [2 + (prompt[-1] + seed + step) % 11 for step in range(count)]
    return tokens, [-0.25 - 0.001 * token for token in tokens]


def content_of(tokens, values):
    """vLLM's log-probs of some tokens."""
    pairs = zip(tokens, values, strict=True)
    return {"content": [{"token_id": token, "logprob": value, "rank": 1, "top_logprobs": []} for token, value in pairs]}


def token_answer(body, version):
    sampling = body["sampling_params"]
    tokens, values = draw(body["token_ids"], sampling["seed"], sampling["max_tokens"])
    choice = {"index": 0, "logprobs": content_of(tokens, values), "finish_reason": "length", "stop_reason": None}
    spans = [{"version": version, "start": 0, "end": len(tokens)}]
    choice |= {"token_ids": tokens, "routed_experts": None, "sampling_mask": None, "weight_versions": spans}
    return {"request_id": "0", "model": body["model"], "choices": [choice], "prompt_token_ids": body["token_ids"]}


def generation(body, version):
    sampling = body["sampling_params"]
    tokens, values = draw(body["input_ids"], sampling["sampling_seed"], sampling["max_new_tokens"])
    pairs = [[value, token, None] for token, value in zip(tokens, values, strict=True)]
    meta = {"id": "0", "finish_reason": {"type": "length", "length": len(tokens)}, "weight_version": version}
    meta |= {"prompt_tokens": len(body["input_ids"]), "completion_tokens": len(tokens), "output_token_logprobs": pairs}
    meta["output_top_logprobs"] = [[[-0.5 / sampling["temperature"], 3, None]]]
    return {"text": "", "output_ids": tokens, "meta_info": meta}


@pytest.fixture
def server():
    with running() as started:
        yield started


@contextmanager
def running(port=0, kind=Server):
    started = kind(port)
    thread = threading.Thread(target=started.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield started
    started.shutdown()
    thread.join()
    started.server_close()


def random_weights(config, seed):
    torch.manual_seed(seed)
    return dict(AutoModelForCausalLM.from_config(config).named_parameters())


@functools.cache
def weights(seed=0):
    return random_weights(CONFIG, seed)


def make_engine(kind, server, folder, start_timeout=30.0, **more):
    http = HttpClient(getattr(server, "url", server), timeout=more.pop("timeout", 5.0), retries=QUICK)
    ends = more.pop("ends", ENDS)
    directory = ModelDirectory(folder / "weights", CONFIG, ends.eos_token_id)
    publisher = more.pop("publisher", FilePublisher)(directory)
    of_engine = {name: more.pop(name) for name in OF_ENGINE & more.keys()}
    if kind is VllmClient:
        more["needs_versions"] = of_engine.get("partial_rollouts", False)
        more["max_versions"] = of_engine.get("max_versions")
    return ServerEngine(kind(http, **more), publisher, ends, start_timeout=start_timeout, **of_engine)


def given(kind, server, folder, version=0, **options):
    """An engine that has its weights."""
    engine = make_engine(kind, server, folder, **options)
    engine.load_weights(weights().items(), version)
    return engine


@pytest.fixture(params=GENERATE, ids=["vllm", "sglang"])
def engine(request, server, tmp_path):
    made = given(request.param, server, tmp_path, 3)
    server.seen.clear()
    return made


def generate_path(engine):
    return GENERATE[type(engine.client)]


def sample(engine, prompts=((5, 6),), tokens=TOKENS, **params):
    return engine.sample(prompts, SamplingParams(**params), tokens, seed=9)
