"""Requests to rollout servers: what is retried, how long and how much is waited for, and the key."""

import functools
import json
import logging
import socket
import threading
import time
import traceback
from contextlib import contextmanager, suppress

import pytest

from megatron_rc.launch.engines import EngineError
from megatron_rc.launch.engines.answers import derive_seed
from megatron_rc.launch.engines.http_client import HttpClient
from megatron_rc.launch.engines.requests import check_key, check_url
from megatron_rc.launch.engines.vllm_client import ROUTE, VllmClient
from tests.support.rollout_servers import QUICK, TOKENS, draw, make_engine, running, sample, weights
from tests.support.rollout_servers import given as loaded_engine


@pytest.fixture
def loaded(server, tmp_path):
    """Makes an engine that has its weights."""
    return functools.partial(loaded_engine, VllmClient, server, tmp_path)


def test_passing_faults_are_retried(server, loaded):
    engine, server.faults[ROUTE] = loaded(), [(500, b"oops"), (503, b""), *[(429, b"busy")] * 4]
    (got,) = sample(engine)
    assert got.token_ids == draw([5, 6], derive_seed(9, 0), TOKENS)[0]
    asked = [json.dumps(body) for path, body in server.seen if path == ROUTE]
    assert (len(asked), len(set(asked))) == (7, 1), "a retry asks the same, seed included"


def test_retries_are_bounded_and_refusals_are_not_retried(server, loaded):
    engine, server.faults[ROUTE] = loaded(), [(400, b"maximum context length is 8")]
    with pytest.raises(EngineError, match="refused the request with status 400: maximum context length is 8"):
        sample(engine)
    assert server.paths().count(ROUTE) == 1
    server.faults[ROUTE] = [(500, b"out of\n memory")] * 99
    with pytest.raises(EngineError, match=r"failed 4 times, at last with status 500: out of memory: check that"):
        sample(engine)
    assert server.paths().count(ROUTE) == 1 + QUICK.attempts


def test_the_first_error_ends_the_batch_and_what_is_under_way(server, loaded):
    engine = loaded(concurrency=2)
    server.faults[ROUTE] = [(400, b"no")]
    server.hold = 0.01
    with pytest.raises(EngineError, match="status 400"):
        sample(engine, [[2]] * 200)
    assert server.paths().count(ROUTE) < 100
    engine = loaded()
    begun = time.monotonic()
    server.faults[ROUTE] = [9.0, 9.0, (400, b"no")]
    with pytest.raises(EngineError, match="status 400"):
        sample(engine, [[2]] * 3)
    assert time.monotonic() - begun < 8


LATE = (
    r"/inference/v1/generate gave no whole answer within 0.3 s: raise --rollout-timeout or lower --rollout-concurrency"
)


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
            client.call("POST", "/inference/v1/generate", {})
        assert time.monotonic() - start < 8
    answer = raw_server(b"HTTP/1.1 403 No\r\n\r\n", b"no " * 10000, 0)
    with answer as (client.url, _), pytest.raises(EngineError, match="refused the request with status 403: no no no"):
        client.call("GET", "/health")


def test_an_answer_has_a_limit_of_size(server, loaded):
    """It is the answer to a long request, and no more of it is held."""
    engine = loaded()
    with raw_server(b"HTTP/1.1 200 OK\r\n\r\n", b" " * (1 << 16), 0) as (engine.client.http.url, sent):
        with pytest.raises(EngineError, match=r"answered with more than 1155072 bytes: is this the rollout server's"):
            sample(engine, tokens=102)
        assert sent[0] < 8 << 20, "sockets hold some of what was sent"
    engine.client.http.url = server.url
    server.faults[ROUTE] = [lambda answer: answer | {"id": "-" * 1_155_000}]
    with pytest.raises(EngineError, match="more than 1155072 bytes"):
        sample(engine, tokens=102)
    server.faults[ROUTE] = [lambda answer: answer | {"id": "-" * 900_000}]
    assert sample(engine), "a large answer that may be one is read"


def test_a_server_that_is_not_there(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        nowhere = f"http://127.0.0.1:{free.getsockname()[1]}"
    engine = make_engine(VllmClient, nowhere, tmp_path, start_timeout=0.3)
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:.*ConnectionRefused"):
        engine.load_weights(weights().items(), 0)
    assert (tmp_path / "weights" / "config.json").is_file(), "a server can be started on the directory"
    with pytest.raises(EngineError, match="holds no weights of this trainer: call load_weights first"):
        sample(engine)


def test_a_server_that_dies_is_retried_then_named(tmp_path):
    with running() as server:
        engine = loaded_engine(VllmClient, server, tmp_path)
        engine.client.http.timeout = 0.3
    begun = time.monotonic()
    with pytest.raises(EngineError, match=r"failed \d+ times, .*ConnectionRefusedError"):
        sample(engine)
    assert 0.3 < time.monotonic() - begun < 8


ADDRESSES = ["localhost:8000", "ftp://host", "http://", "http://host/v1", "http://host?a=b", "http://host:99999"]


@pytest.mark.parametrize("url", [*ADDRESSES, "http://host\n", "http://me:secret@host:8000"])
def test_wrong_addresses(url):
    password = r"user or a password in it: .* variable ROLLOUT_API_KEY$"
    with pytest.raises(ValueError, match=password if "@" in url else "expected http://host:port") as caught:
        check_url(url)
    assert "secret" not in str(caught.value)


def test_the_key_is_sent_and_never_shown(server, caplog):
    caplog.set_level(logging.DEBUG)
    keys = []
    handler = server.RequestHandlerClass
    server.RequestHandlerClass = type(
        "Keyed", (handler,), {"do_GET": lambda self: (keys.append(self.headers["Authorization"]), handler.do_GET(self))}
    )
    client = HttpClient(server.url, api_key="secret-7", retries=QUICK)
    client.call("GET", "/health")
    assert keys == ["Bearer secret-7"]
    for status in (401, 200, 500):
        server.faults["/x"] = [(status, b"no such key: secret-7")] * 4
        with pytest.raises(EngineError, match="no such key: ROLLOUT_API_KEY") as caught:
            client.json("GET", "/x")
        assert "secret" not in "".join(traceback.format_exception(caught.value))
    assert "secret" not in caplog.text
    for key in ("secret\n", "se cret", "sécret", "\x00secret"):
        with pytest.raises(ValueError, match="ROLLOUT_API_KEY") as caught:
            check_key(key)
        assert "secret" not in str(caught.value)
