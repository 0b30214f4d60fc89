"""Rollout servers over HTTP: what is sent, what is retried, what is refused. A server in a thread plays their part."""

import functools
import json
import logging
import os
import socket
import threading
import time
import traceback
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from megatron_rc.launch.engines import EngineError, Sample
from megatron_rc.launch.engines.answers import derive_seed
from megatron_rc.launch.engines.http_client import HttpClient
from megatron_rc.launch.engines.model_directory import ModelDirectory
from megatron_rc.launch.engines.requests import Retries
from megatron_rc.launch.engines.sglang_server import SglangServerEngine
from megatron_rc.launch.engines.vllm_engine import TORCHRUN, VllmEngine, without_torchrun
from megatron_rc.launch.engines.vllm_server import VllmServerEngine
from megatron_rc.launch.rollouts.samples import GoodSamples
from megatron_rc.records.rollout import SamplingParams
from tests.support.recorded_training import flags, run_config

EOS, TOKENS = 1, 4
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
GENERATE = {VllmServerEngine: "/v1/completions", SglangServerEngine: "/generate"}


class Server(ThreadingHTTPServer):
    """Answers as vLLM 0.32 and SGLang 0.5 document it; tokens and log-probs follow from prompt and seed.

    Attributes:
        seen: (path, body) of all requests.
        faults: by path, one for each coming request: (status, body), a function that changes the answer, or seconds.
        always: a function that changes every answer of a path.
        most: requests that were under way at once.
        connections: that were made.
        hold: seconds that a response takes.
        breaks: connections end without an answer.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, port=0):
        super().__init__(("127.0.0.1", port), Handler)
        self.lock = threading.Lock()
        self.seen, self.faults, self.always = [], {}, {}
        self.most = self.now = self.connections = 0
        self.hold, self.version, self.breaks = 0.0, "default", False
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def paths(self):
        return [path for path, _ in self.seen]

    def handle_error(self, request, address):
        """A client that gave up is no error."""

    def respond(self, path, body):
        """(status, answer) for one request."""
        if self.breaks:
            raise ConnectionResetError
        with self.lock:
            self.seen.append((path, body))
            fault = self.faults[path].pop(0) if self.faults.get(path) else None
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(self.hold if path in GENERATE.values() else 0)
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
            case "/v1/completions":
                return completion(body)
            case "/generate":
                return generation(body, self.version)
        return {}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self):
        super().setup()
        self.server.connections += 1

    def do_GET(self):
        self.do_POST()

    def do_POST(self):
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        status, answer = self.server.respond(self.path.partition("?")[0], body)
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words):
        pass


def draw(prompt, seed, count):
    """Tokens that are no end of text, and log-probs."""
    tokens = [2 + (prompt[-1] + seed + step) % 11 for step in range(count)]
    return tokens, [-0.25 - 0.001 * token for token in tokens]


def completion(body):
    tokens, values = draw(body["prompt"], body["seed"], body["max_tokens"])
    logprobs = {"text_offset": [], "token_logprobs": values, "tokens": [f"token_id:{t}" for t in tokens]}
    choice = {"index": 0, "text": "", "logprobs": logprobs, "finish_reason": "length", "stop_reason": None}
    choice |= {"token_ids": tokens, "prompt_token_ids": body["prompt"]}
    return {"id": "cmpl-0", "object": "text_completion", "model": body["model"], "choices": [choice]}


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
def running(port=0):
    started = Server(port)
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


def make_engine(kind, server, folder, **more):
    client = HttpClient(getattr(server, "url", server), timeout=more.pop("timeout", 5.0), retries=QUICK)
    return kind(client, ModelDirectory(folder / "weights", CONFIG, EOS), EOS, start_timeout=0.3, **more)


@pytest.fixture(params=GENERATE, ids=["vllm", "sglang"])
def engine(request, server, tmp_path):
    made = make_engine(request.param, server, tmp_path)
    made.load_weights(weights().items(), 3)
    server.seen.clear()
    return made


def generate_path(engine):
    return GENERATE[type(engine)]


def sample(engine, prompts=((5, 6),), tokens=TOKENS, **params):
    return engine.sample(prompts, SamplingParams(**params), tokens, seed=9)


def sample_to_train_on(engine, folder):
    """One response, as the trainer asks for it."""
    samples = GoodSamples(run_config(flags(folder)), engine, replica=0)
    return samples([[5, 6]], SamplingParams(), TOKENS, seed=9)


def test_samples_are_the_servers_in_the_order_of_the_prompts(engine, server):
    server.hold = 0.1
    prompts = [[2 + index % 9, index % 7] for index in range(40)]
    samples = sample(engine, prompts)
    for index, (prompt, got) in enumerate(zip(prompts, samples, strict=True)):
        assert got == Sample(*draw(prompt, derive_seed(9, index), TOKENS), "length")
    assert 8 <= server.most <= engine.concurrency == 64


def test_connections_are_kept_for_the_next_request(server, tmp_path):
    engine = make_engine(VllmServerEngine, server, tmp_path, concurrency=3)
    engine.load_weights(weights().items(), 0)
    before = server.connections
    sample(engine, [[2]] * 30)
    assert server.connections - before <= 3 + 1, "three sample, one asks for the version"


def test_requests_under_way_are_bounded(server, tmp_path):
    server.hold = 0.05
    engine = make_engine(VllmServerEngine, server, tmp_path, concurrency=3)
    engine.load_weights(weights().items(), 0)
    sample(engine, [[2]] * 12)
    assert server.most == 3


def test_every_sampling_parameter_is_named(engine, server):
    """What a request leaves out, a server takes from the model's generation_config.json."""
    sample(engine, temperature=0.6)
    body = dict(server.seen)[generate_path(engine)]
    sampling = body.get("sampling_params", body)
    fixed = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "top_p": 1.0}
    assert sampling.items() >= (fixed | {"temperature": 0.6, "stop_token_ids": [EOS]}).items()
    assert sampling["top_k"] == (0 if type(engine) is VllmServerEngine else -1)
    assert body.get("prompt", body.get("input_ids")) == [5, 6]


def test_seeds_differ_between_prompts_and_steps():
    seeds = {derive_seed(seed, index) for seed in range(30) for index in range(100)}
    assert len(seeds) == 3000
    assert all(0 <= seed < 2**31 for seed in seeds)


@pytest.mark.parametrize("fault", [(500, b"oops"), (503, b""), (429, b"busy")], ids=["500", "503", "429"])
def test_a_passing_fault_is_retried(engine, server, fault):
    server.faults[generate_path(engine)] = [fault, fault]
    (got,) = sample(engine)
    assert got.token_ids == draw([5, 6], derive_seed(9, 0), TOKENS)[0]
    assert server.paths().count(generate_path(engine)) == 3
    asked = {json.dumps(body) for path, body in server.seen if path == generate_path(engine)}
    assert len(asked) == 1, "a retry asks the same, seed included"


def test_retries_are_bounded(engine, server):
    server.faults[generate_path(engine)] = [(500, b"out of\n memory")] * 99
    with pytest.raises(EngineError, match=r"failed 4 times, at last with status 500: out of memory: check that"):
        sample(engine)
    assert server.paths().count(generate_path(engine)) == QUICK.attempts


def test_a_refusal_is_not_retried(engine, server):
    server.faults[generate_path(engine)] = [(400, b"maximum context length is 8")]
    with pytest.raises(EngineError, match="refused the request with status 400: maximum context length is 8"):
        sample(engine)
    assert len(server.seen) == 1


def test_the_first_error_ends_the_batch(server, tmp_path):
    engine = make_engine(VllmServerEngine, server, tmp_path, concurrency=2)
    engine.load_weights(weights().items(), 0)
    server.faults["/v1/completions"] = [(400, b"no")]
    server.hold = 0.01
    with pytest.raises(EngineError, match="status 400"):
        sample(engine, [[2]] * 200)
    assert server.paths().count("/v1/completions") < 100


def test_the_first_error_ends_those_under_way(server, tmp_path):
    engine = make_engine(VllmServerEngine, server, tmp_path)
    engine.load_weights(weights().items(), 0)
    server.faults["/v1/completions"] = [3.0, 3.0, (400, b"no")]
    begun = time.monotonic()
    with pytest.raises(EngineError, match="status 400"):
        sample(engine, [[2]] * 3)
    assert time.monotonic() - begun < 2


def test_waits_double_are_bounded_and_heed_the_server():
    retries = Retries(first_wait=1.0, longest_wait=8.0)
    for failures, longest in ((1, 1.0), (2, 2.0), (3, 4.0), (4, 8.0)):
        assert longest / 2 <= retries.wait(failures, 0) <= longest
    assert retries.wait(9, 0) == 8
    assert retries.wait(1, 5) == 5
    assert retries.wait(1, 500) == 8


LATE = r"/v1/completions gave no whole answer within 0.3 s: raise --rollout-timeout or lower --rollout-concurrency"


def test_a_silent_server_is_an_error_in_time(server, tmp_path):
    engine = make_engine(VllmServerEngine, server, tmp_path, timeout=0.3)
    engine.load_weights(weights().items(), 0)
    server.faults["/v1/completions"] = [1.5]
    start = time.monotonic()
    with pytest.raises(EngineError, match=LATE):
        sample(engine)
    assert time.monotonic() - start < 1.4
    assert server.paths().count("/v1/completions") == 1


@contextmanager
def raw_server(begin, part, pause):
    """Answers whatever it is sent with ``begin`` and then, without an end, with ``part``; yields url and bytes sent."""
    sent = [0]

    def answer(connection):
        with connection, suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(begin)
            while True:
                connection.sendall(part)
                sent[0] += len(part)
                time.sleep(pause)

    def accept():
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listening.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", sent
        listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    "begin",
    [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: "],
    ids=["body", "known-length", "headers"],
)
def test_an_answer_that_comes_byte_by_byte_has_a_limit_of_time(begin):
    client = HttpClient("http://localhost", timeout=0.3, retries=QUICK)
    with raw_server(begin, b"1", 0.02) as (client.url, _):
        start = time.monotonic()
        with pytest.raises(EngineError, match=LATE):
            client.call("POST", "/v1/completions", {})
        assert time.monotonic() - start < 1


def test_an_answer_has_a_limit_of_size(server, tmp_path):
    """It is the answer to a long request, and no more of it is held."""
    engine = make_engine(VllmServerEngine, server, tmp_path)
    engine.load_weights(weights().items(), 0)
    with raw_server(b"HTTP/1.1 200 OK\r\n\r\n", b" " * (1 << 16), 0) as (engine.client.url, sent):
        with pytest.raises(EngineError, match=r"answered with more than 1155072 bytes: is this the rollout server's"):
            sample(engine, tokens=102)
        assert sent[0] < 8 << 20, "sockets hold some of what was sent"
    server.faults["/v1/completions"] = [lambda answer: answer | {"id": "-" * 900_000}]
    engine.client.url = server.url
    assert sample(engine), "a large answer that may be one is read"


def test_a_refusal_without_an_end_is_a_refusal():
    client = HttpClient("http://localhost", retries=QUICK)
    answer = raw_server(b"HTTP/1.1 403 No\r\n\r\n", b"no " * 10000, 0)
    with answer as (client.url, _), pytest.raises(EngineError, match="refused the request with status 403: no no no"):
        client.call("GET", "/health")


def nowhere():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.parametrize("kind", GENERATE)
def test_a_server_that_is_not_there(kind, tmp_path):
    engine = make_engine(kind, nowhere(), tmp_path)
    with pytest.raises(
        EngineError, match=r"there is no rollout server at http.*ConnectionRefused.*: start it, or name its"
    ):
        engine.load_weights(weights().items(), 0)
    assert (tmp_path / "weights" / "config.json").is_file(), "a server can be started on the directory"
    with pytest.raises(EngineError, match="holds no weights of this trainer: call load_weights first"):
        sample(engine)


def test_a_server_that_dies_is_retried_then_named(tmp_path):
    with running() as server:
        engine = make_engine(VllmServerEngine, server, tmp_path, timeout=0.3)
        engine.load_weights(weights().items(), 0)
    begun = time.monotonic()
    with pytest.raises(
        EngineError, match=r"failed \d+ times, at last with ConnectionRefusedError.*: check that the ser"
    ):
        sample(engine)
    assert 0.3 < time.monotonic() - begun < 1.5


@pytest.mark.parametrize("kind", GENERATE)
def test_a_server_that_comes_back_costs_nothing_but_time(kind, tmp_path, caplog):
    """It was killed within a batch, and starts with weights of its own, which are not those of the trainer."""
    with running() as server:
        engine = make_engine(kind, server, tmp_path, concurrency=2)
        engine.load_weights(weights().items(), 5)
        sample(engine)
        server.hold = 0.05
        whole = []
        thread = threading.Thread(target=lambda: whole.extend(sample(engine, [[2, index] for index in range(12)])))
        thread.start()
        while len(server.paths()) < 12:
            time.sleep(0.01)
        server.breaks = True
    time.sleep(0.3)
    assert not whole
    with running(server.server_address[1]) as server:
        thread.join()
        assert [got.token_ids for got in whole] == [
            draw([2, index], derive_seed(9, index), TOKENS)[0] for index in range(12)
        ]
        assert server.version == "5"
        swapped = "/collective_rpc" if kind is VllmServerEngine else "/update_weights_from_disk"
        after = server.paths()[server.paths().index(swapped) :]
        assert after.count(GENERATE[kind]) == 12, "what the server sampled before it had the weights is not used"
    assert "lost the weights of step 5, as a server does that is restarted: it gets them again" in caplog.text


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://host", "http://", "http://host/v1", "http://host?a=b", "http://host:99999"]
)
def test_wrong_addresses(url):
    with pytest.raises(ValueError, match="expected http://host:port, without a path"):
        HttpClient(url)


def test_an_address_with_a_password_is_not_repeated():
    with pytest.raises(ValueError, match=r"user or a password in it: .* variable ROLLOUT_API_KEY$") as caught:
        HttpClient("http://me:secret@host:8000")
    assert "secret" not in str(caught.value)


def in_choice(**fields):
    def change(answer):
        choice = answer["choices"][0]
        return answer | {"choices": [{name: value for name, value in (choice | fields).items() if value != "absent"}]}

    return change


def with_log_probs(change):
    def apply(answer):
        values = answer["choices"][0]["logprobs"]["token_logprobs"]
        return in_choice(logprobs={"token_logprobs": change(list(values))})(answer)

    return apply


def shorter(answer):
    choice = answer["choices"][0]
    values = {"token_logprobs": choice["logprobs"]["token_logprobs"][:2]}
    return in_choice(token_ids=choice["token_ids"][:2], logprobs=values)(answer)


NO_LOG_PROB = "expected a finite number of at most 0"
WRONG_COMPLETIONS = {
    "html": ((200, b"<html>Not here</html>"), "answered '<html>Not here</html>', expected JSON"),
    "number": ((200, b"7"), "answered without model"),
    "other-json": (lambda _: {"ok": True}, "answered without model"),
    "other-model": (lambda answer: answer | {"model": "large"}, "model large answered, not tiny"),
    "no-choices": (lambda answer: answer | {"choices": []}, "has 0 choices, expected 1"),
    "two-choices": (lambda answer: answer | {"choices": answer["choices"] * 2}, "has 2 choices, expected 1"),
    "null-choices": (lambda answer: answer | {"choices": None}, "has None choices, expected 1"),
    "no-token-ids": (in_choice(token_ids="absent"), "answered without token_ids"),
    "null-token-ids": (in_choice(token_ids=None), "token ids are None, expected a list of integers"),
    "text-tokens": (in_choice(token_ids=["a"] * TOKENS), r"token ids are \['a'"),
    "empty": (in_choice(token_ids=[]), r"token ids are \[\]"),
    "no-log-probs": (in_choice(logprobs=None), "answered without logprobs.token_logprobs"),
    "null-log-probs": (in_choice(logprobs={"token_logprobs": None}), "log-probs are None, expected a list"),
    "fewer-log-probs": (with_log_probs(lambda values: values[1:]), "3 log-probs for 4 tokens"),
    "more-log-probs": (with_log_probs(lambda values: [*values, -1.0]), "5 log-probs for 4 tokens"),
    "null": (with_log_probs(lambda values: [None, *values[1:]]), f"token 0 is None, {NO_LOG_PROB}"),
    "nan": (with_log_probs(lambda values: [*values[:3], float("nan")]), f"token 3 is nan, {NO_LOG_PROB}"),
    "minus-infinity": (with_log_probs(lambda values: [-9999.0, *values[1:]]), f"token 0 is -9999.0, {NO_LOG_PROB}"),
    "positive": (with_log_probs(lambda values: [0.5, *values[1:]]), f"token 0 is 0.5, {NO_LOG_PROB}"),
    "text": (with_log_probs(lambda values: ["-1", *values[1:]]), f"token 0 is -1, {NO_LOG_PROB}"),
    "prompt-cut": (in_choice(prompt_token_ids=[6]), "read 1 prompt tokens, not the 2 that were sent"),
    "prompt-completed": (in_choice(prompt_token_ids=[0, 5, 6]), "read 3 prompt tokens, not the 2 that were sent"),
    "prompt-absent": (in_choice(prompt_token_ids=None), "read None prompt tokens"),
    "cut": (shorter, "cut after 2 of 4 tokens: raise the engine's longest sequence"),
    "other-stop": (lambda answer: in_choice(finish_reason="stop")(shorter(answer)), "which is not end-of-text token 1"),
    "aborted": (in_choice(finish_reason="abort"), "ended with 'abort'"),
    "unfinished": (in_choice(finish_reason=None), "ended with None"),
    "past-the-end": (in_choice(token_ids=[3, EOS, 3, 3]), "goes on after end-of-text token 1"),
}


@pytest.mark.parametrize(("fault", "message"), WRONG_COMPLETIONS.values(), ids=WRONG_COMPLETIONS)
def test_vllm_answers_that_cannot_be_trained_on(server, tmp_path, fault, message):
    engine = make_engine(VllmServerEngine, server, tmp_path)
    engine.load_weights(weights().items(), 0)
    server.faults["/v1/completions"] = [fault]
    with pytest.raises(EngineError, match=message) as caught:
        sample_to_train_on(engine, tmp_path)
    assert server.paths().count("/v1/completions") == 1
    assert server.url in str(caught.value)
    assert "\n" not in str(caught.value)


def in_meta(**fields):
    def change(answer):
        meta = answer["meta_info"] | fields
        return answer | {"meta_info": {name: value for name, value in meta.items() if value != "absent"}}

    return change


def pairs(*values):
    def change(answer):
        return in_meta(output_token_logprobs=[[v, t, None] for v, t in values])(answer) | {
            "output_ids": [token for _, token in values]
        }

    return change


WRONG_GENERATIONS = {
    "html": ((200, b"<html>"), "expected JSON"),
    "list": (lambda answer: [answer, answer], "2 answers came, expected 1"),
    "no-meta": (lambda answer: {"text": "a"}, "answered without meta_info"),
    "no-log-probs": (in_meta(output_token_logprobs="absent"), "answered without output_token_logprobs"),
    "null-log-probs": (in_meta(output_token_logprobs=None), r"is no list of \[log-prob, token id, text\]"),
    "bare-log-probs": (in_meta(output_token_logprobs=[-1.0] * TOKENS), "is no list of"),
    "other-tokens": (lambda answer: answer | {"output_ids": [7]}, "log-probs of other tokens than output_ids"),
    "nan": (pairs((float("nan"), 5), (-1, 5), (-1, 5), (-1, 5)), f"token 0 is nan, {NO_LOG_PROB}"),
    "null": (pairs((None, 5), (-1, 5), (-1, 5), (-1, 5)), f"token 0 is None, {NO_LOG_PROB}"),
    "prompt": (in_meta(prompt_tokens=3), "read 3 prompt tokens, 2 were sent"),
    "cut": (pairs((-1, 5)), "cut after 1 of 4 tokens"),
    "too-long": (pairs(*[(-1, 5)] * 5), "5 tokens came, 4 were asked for"),
    "aborted": (in_meta(finish_reason={"type": "abort", "message": "no"}), "ended with 'abort'"),
    "weights": (in_meta(weight_version="2"), "holds weights 2, expected 0: who else"),
}


@pytest.mark.parametrize(("fault", "message"), WRONG_GENERATIONS.values(), ids=WRONG_GENERATIONS)
def test_sglang_answers_that_cannot_be_trained_on(server, tmp_path, fault, message):
    engine = make_engine(SglangServerEngine, server, tmp_path)
    engine.load_weights(weights().items(), 0)
    server.faults["/generate"] = [fault]
    with pytest.raises(EngineError, match=message):
        sample_to_train_on(engine, tmp_path)
    assert server.paths().count("/generate") == 1


def test_end_of_text_at_the_last_place_is_a_whole_response(engine, server):
    """Servers call it ``length``."""
    ends = [5, 5, 5, EOS]
    values = [-1.0] * TOKENS
    change = pairs(*zip(values, ends, strict=True))
    if type(engine) is VllmServerEngine:
        change = in_choice(token_ids=ends, logprobs={"token_logprobs": values})
    server.faults[generate_path(engine)] = [change]
    assert sample(engine) == [Sample(ends, values, "stop")]


@pytest.mark.parametrize(
    ("prompts", "params", "tokens", "message"),
    [
        ([[5], []], {}, 4, "prompt 1 is empty"),
        ([[5]], {"temperature": 0.0}, 4, "temperature is 0.0: expected a number above 0"),
        ([[5]], {}, 0, "max_new_tokens is 0: expected at least 1"),
    ],
    ids=["empty", "temperature", "tokens"],
)
def test_requests_that_no_engine_takes(engine, server, prompts, params, tokens, message):
    with pytest.raises(ValueError, match=message):
        sample(engine, prompts, tokens, **params)
    assert not server.seen


def test_no_prompts_are_no_requests(engine, server):
    assert sample(engine, []) == []
    assert generate_path(engine) not in server.paths()


def test_vllm_takes_weights_over_while_it_is_paused(server, tmp_path):
    engine = make_engine(VllmServerEngine, server, tmp_path)
    engine.load_weights(weights().items(), 0)
    swap = ["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"]
    assert server.paths()[-5:] == swap
    body = dict(server.seen)["/collective_rpc"]
    assert body == {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "weights")}}
    assert engine.model == "tiny"
    server.seen.clear()
    engine.load_weights(weights(seed=1).items(), 1)
    assert server.paths() == swap, "a server is met once"
    assert engine.version == 1


def test_sglang_takes_weights_over_and_flushes(server, tmp_path):
    engine = make_engine(SglangServerEngine, server, tmp_path)
    engine.load_weights(weights().items(), 7)
    assert server.paths()[-2:] == ["/update_weights_from_disk", "/flush_cache"]
    body = dict(server.seen)["/update_weights_from_disk"]
    assert body == {"model_path": str(tmp_path / "weights"), "flush_cache": True, "weight_version": "7"}


@pytest.mark.parametrize(
    ("kind", "path", "fault", "message"),
    [
        (
            VllmServerEngine,
            "/server_info",
            (404, b""),
            r"/server_info.* status 404: start it as VLLM_SERVER_DEV_MODE=1 vllm",
        ),
        (VllmServerEngine, "/pause", (404, b""), r"/pause.* status 404: start it as VLLM_SERVER_DEV_MODE=1 vllm"),
        (VllmServerEngine, "/v1/models", lambda _: {"data": [{"id": "a"}, {"id": "b"}]}, "serves a, b, not None: name"),
        (VllmServerEngine, "/v1/models", lambda _: {"data": None}, "serves no model, not None: name"),
        (
            VllmServerEngine,
            "/server_info",
            lambda _: {"vllm_config": {"model_config": {"logprobs_mode": "raw_logprobs"}}},
            "reports raw_logprobs, expected processed_logprobs",
        ),
        (VllmServerEngine, "/collective_rpc", (500, b"disk"), "failed 4 times, at last with status 500: disk"),
        (VllmServerEngine, "/reset_prefix_cache", lambda _: {"success": False}, "kept its prefix cache"),
        (
            SglangServerEngine,
            "/update_weights_from_disk",
            lambda _: {"success": False, "message": "shape"},
            "did not take the weights over: shape",
        ),
        (SglangServerEngine, "/flush_cache", (400, b"requests are running"), "status 400: requests are running"),
    ],
)
def test_after_a_failed_sync_nothing_is_sampled(server, tmp_path, kind, path, fault, message):
    engine = make_engine(kind, server, tmp_path)
    server.faults[path] = [fault] * (4 if isinstance(fault, tuple) and fault[0] == 500 else 1)
    with pytest.raises(EngineError, match=message):
        engine.load_weights(weights().items(), 0)
    assert "/resume" not in server.paths()
    with pytest.raises(EngineError, match="call load_weights first"):
        sample(engine)
    engine.load_weights(weights().items(), 0)
    assert len(sample(engine)) == 1


def test_a_named_model_is_chosen(server, tmp_path):
    server.always["/v1/models"] = lambda _: {"data": [{"id": "a"}, {"id": "b"}]}
    engine = make_engine(VllmServerEngine, server, tmp_path, model="b")
    engine.load_weights(weights().items(), 0)
    sample(engine)
    assert dict(server.seen)["/v1/completions"]["model"] == "b"


@pytest.mark.parametrize(
    ("holds", "message"),
    [("7", "holds weights 7, expected 5: who else updates it"), ("default", "lost the weights of step 5, as a server")],
)
def test_a_server_with_other_weights_is_found_out(engine, server, holds, message):
    """Whether another trainer gives it some, or it never keeps them."""
    engine.load_weights(weights().items(), 5)
    sample(engine)
    give = "/update_weight_version" if type(engine) is VllmServerEngine else "/update_weights_from_disk"
    server.always[give] = lambda answer: setattr(server, "version", holds) or answer
    server.version = holds
    with pytest.raises(EngineError, match=message):
        sample(engine)
    assert server.paths().count(give) == (1 if holds == "7" else 3), "it gets them twice more"


def test_a_server_without_versions_that_was_away_gets_its_weights_again(server, tmp_path):
    engine = make_engine(VllmServerEngine, server, tmp_path)
    server.faults["/update_weight_version"] = [(404, b"")] * 3
    engine.load_weights(weights().items(), 5)
    server.faults["/v1/completions"] = [(503, b"")]
    server.seen.clear()
    assert sample(engine)
    assert server.paths().count("/collective_rpc") == 1
    server.seen.clear()
    assert sample(engine)
    assert server.paths() == ["/v1/completions"]


def test_a_server_that_goes_away_while_it_takes_weights_gets_them_from_the_beginning(server, tmp_path):
    engine = make_engine(VllmServerEngine, server, tmp_path)
    server.faults["/reset_prefix_cache"] = [(502, b"")]
    engine.load_weights(weights().items(), 5)
    swap = ["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"]
    assert server.paths()[-11:] == [*swap[:3], *swap[2:], *swap]
    server.faults["/reset_prefix_cache"] = [(502, b"")]
    server.always["/reset_prefix_cache"] = lambda answer: (
        server.faults["/reset_prefix_cache"].append((502, b"")) or answer
    )
    with pytest.raises(EngineError, match="went away in each of 3 hand-overs of weights"):
        engine.load_weights(weights().items(), 6)


def test_a_vllm_server_that_keeps_no_versions_is_not_asked(server, tmp_path):
    engine = make_engine(VllmServerEngine, server, tmp_path)
    server.faults["/update_weight_version"] = [(404, b"")]
    engine.load_weights(weights().items(), 5)
    sample(engine)
    assert server.paths()[-2:] == ["/resume", "/v1/completions"]


def raw(answer):
    return in_meta(output_top_logprobs=[[[-0.5, 3, None]]])(answer)


def test_sglang_with_log_probs_before_temperature_is_found_out(server, tmp_path):
    engine = make_engine(SglangServerEngine, server, tmp_path)
    engine.load_weights(weights().items(), 0)
    server.always["/generate"] = raw
    assert sample(engine), "at temperature 1 they are equal"
    with pytest.raises(EngineError, match=r"log-probs before temperature 0.5: start it without SGLANG_RETURN_ORIG"):
        sample(engine, temperature=0.5)
    server.always.clear()
    server.seen.clear()
    sample(engine, temperature=0.5)
    sample(engine, temperature=0.5)
    assert len(server.seen) == 4, "two more requests, once"
    with pytest.raises(EngineError, match=r"before top_p=0.9 and top_k=0: sample with top_p=1"):
        sample(engine, top_p=0.9)
    with pytest.raises(EngineError, match=r"before top_p=1.0 and top_k=2: sample with top_p=1"):
        sample(engine, top_k=2)
    assert sample(engine, top_k=1), "the likeliest tokens, which evaluations ask for"
    assert server.seen[-1][-1]["sampling_params"]["top_k"] == 1


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("shard_bytes", [1 << 30, 600], ids=["one-file", "files"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_directory_is_a_model_with_an_output_layer_of_its_own(tmp_path, family, shard_bytes, tied):
    small = {"vocab_size": 13, "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 16}
    config = {"llama": LlamaConfig(**{**CONFIG.to_dict(), "tie_word_embeddings": tied})}.get(family) or GPT2Config(
        **small, tie_word_embeddings=tied
    )
    directory = ModelDirectory(tmp_path / "weights", config, EOS, shard_bytes=shard_bytes)
    for seed in (0, 1):
        given = random_weights(config, seed)
        path = directory.write(given.items())
    assert config.tie_word_embeddings == tied, "the caller's config is left alone"
    stored = json.loads((path / "config.json").read_text())
    assert stored["tie_word_embeddings"] is False
    assert stored["eos_token_id"] == EOS
    assert stored["architectures"] == [{"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel"}[family]]
    files = sorted(path.glob("*.safetensors"))
    assert (len(files) > 2) == (shard_bytes == 600)
    names = [name for file in files for name in safe_open(file, "pt").keys()]  # noqa: SIM118
    assert sorted(names) == sorted({*given, "lm_head.weight"})
    model = AutoModelForCausalLM.from_pretrained(path)
    assert all(torch.equal(parameter, given[name]) for name, parameter in model.named_parameters() if name in given)
    tokens = torch.tensor([[3, 4, 5]])
    want = AutoModelForCausalLM.from_config(config)
    want.load_state_dict(given, strict=not tied)
    want.tie_weights()
    torch.testing.assert_close(model.eval()(tokens).logits, want.eval()(tokens).logits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: [*w.items(), ("model.extra", torch.zeros(1))], "has no weight model.extra"),
        (lambda w: [*w.items(), ("lm_head.weight", torch.zeros(13, 8))], "has no weight lm_head.weight"),
        (lambda w: [*w.items(), *w.items()], "weight model.embed_tokens.weight came twice"),
        (lambda w: (w | {"model.norm.weight": torch.zeros(5)}).items(), r"model.norm.weight is \(8,\), got \(5,\)"),
        (lambda w: list(w.items())[:-1], "weight model.norm.weight never came"),
    ],
    ids=["unknown", "tied-head", "twice", "shape", "missing"],
)
def test_wrong_weights_leave_the_old_ones(engine, tmp_path, change, message):
    stored = (tmp_path / "weights" / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(ValueError, match=message):
        engine.load_weights(change(weights()), 4)
    assert (tmp_path / "weights" / "model.safetensors").stat().st_mtime_ns == stored
    assert engine.version == -1


def test_the_directory_needs_a_parent(tmp_path):
    with pytest.raises(ValueError, match=r"absent does not exist"):
        ModelDirectory(tmp_path / "absent" / "weights", CONFIG, EOS)


def test_a_directory_that_cannot_be_written_is_an_error_of_the_engine(engine, tmp_path):
    (tmp_path / "weights.part").write_text("in the way")
    with pytest.raises(EngineError, match=r"cannot be written to .*weights: .*File exists.*: make room there"):
        engine.load_weights(weights().items(), 4)
    assert engine.version == -1


def test_the_key_is_sent(server):
    keys = []
    handler = server.RequestHandlerClass
    server.RequestHandlerClass = type(
        "Keyed", (handler,), {"do_GET": lambda self: (keys.append(self.headers["Authorization"]), handler.do_GET(self))}
    )
    HttpClient(server.url, api_key="secret").call("GET", "/health")
    assert keys == ["Bearer secret"]


def test_the_key_is_never_shown(server, caplog):
    caplog.set_level(logging.DEBUG)
    client = HttpClient(server.url, api_key="secret-7", retries=QUICK)
    for status in (401, 200, 500):
        server.faults["/x"] = [(status, b"no such key: secret-7")] * 4
        with pytest.raises(EngineError, match="no such key: ROLLOUT_API_KEY") as caught:
            client.json("GET", "/x")
        assert "secret" not in "".join(traceback.format_exception(caught.value))
    assert "secret" not in caplog.text


@pytest.mark.parametrize("key", ["secret\n", "se cret", "sécret", "\x00secret"])
def test_a_key_that_no_header_can_carry(key):
    with pytest.raises(
        ValueError, match="variable ROLLOUT_API_KEY has characters other than printable ASCII without spaces"
    ):
        HttpClient("http://host", api_key=key)


def test_vllm_in_process_needs_vllm(tmp_path, monkeypatch):
    directory = ModelDirectory(tmp_path / "weights", CONFIG, EOS)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EngineError, match="needs vllm, which is not installed: pip install vllm"):
        VllmEngine(directory, "fp32", EOS, 64)
    with pytest.raises(ValueError, match="dtype is 'fp8-e4m3': expected one of fp32, bf16"):
        VllmEngine(directory, "fp8-e4m3", EOS, 64)


def test_torchruns_environment_is_hidden_and_restored(monkeypatch):
    given = {"RANK": "3", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with without_torchrun({}):
        assert not [name for name in os.environ if name.startswith(TORCHRUN)]
    assert {name: os.environ[name] for name in given} == given
