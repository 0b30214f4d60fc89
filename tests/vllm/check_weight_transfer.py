"""Weights that reach vLLM's server over process groups: each token is scored again by the weights of its version."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron_rc.launch.engines import weight_stream
from megatron_rc.launch.engines.http_client import HttpClient
from megatron_rc.launch.engines.model_directory import ModelDirectory
from megatron_rc.launch.engines.publishers import StreamPublisher
from megatron_rc.launch.engines.requests import Retries
from megatron_rc.launch.engines.server import ServerEngine
from megatron_rc.launch.engines.server_client import INCOMPLETE
from megatron_rc.launch.engines.vllm_client import STREAMED_START, VllmClient
from megatron_rc.launch.engines.weight_sender import MemorySender, VllmSender, send_weights
from megatron_rc.records.rollout import SamplingParams
from tests.support.partial_rollouts import (
    CLOSE,
    CONFIG,
    PROMPTS,
    SEED,
    check_versions_of,
    farthest,
    sample_over,
    wait_until,
    weights_of,
)
from tests.support.paths import ROOT
from tests.vllm.check_partial_rollouts import BETWEEN, TASK, WORDS, check_records, check_tokens, run_beside_server
from tests.vllm.check_vllm import ENDS, EOS, free_port, number_of, start_server

# The flags that errors and the pages name.
STREAMED = shlex.split(STREAMED_START.partition("processed_logprobs")[2])
PARTIAL = ("--rl-partial-rollouts", "--rollout-staleness=2")
BUCKET_BYTES = 9000  # several buckets, and tensors that are larger than one


class Trainer:
    """An engine and two senders, as the first ranks of two pipeline stages have them."""

    def __init__(self, url, folder, *, ipc=False):
        http_without_retries = HttpClient(url, 60, Retries(attempts=1))
        directory = ModelDirectory(folder / "weights", CONFIG, EOS)
        client = VllmClient(HttpClient(url, 60), http_without_retries=http_without_retries)
        publisher = StreamPublisher(directory, torch.float32)
        self.engine = ServerEngine(client, publisher, ENDS, start_timeout=300)
        make = MemorySender if ipc else partial(VllmSender, transport="gloo")
        self.senders = [make(http_without_retries, stage) for stage in range(2)]
        self.parts = [{name for name, _ in weights_of(0) if ("layers.0" in name) == (not stage)} for stage in range(2)]

    def give(self, version):
        self.engine.begin_update(version)
        errors = self.send(version)
        for error in errors:
            raise error
        self.engine.end_update()

    def send(self, version):
        """Both senders at once; returns their errors."""
        errors = []
        threads = [threading.Thread(target=self._send, args=(stage, version, errors)) for stage in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return errors

    def _send(self, stage, version, errors):
        try:
            send_weights(self.tensors(stage, version), [self.senders[stage]], BUCKET_BYTES)
        except Exception as error:
            errors.append(error)

    def tensors(self, stage, version):
        pairs_of_stage = [pair for pair in weights_of(version) if pair[0] in self.parts[stage]]
        return self.engine.publisher.directory.tensors(pairs_of_stage, self.parts[stage])


@contextmanager
def started(folder, *more):
    """A trainer and its server, which has the weights of version 0."""
    port = free_port()
    trainer = Trainer(f"http://127.0.0.1:{port}", folder)
    trainer.engine.publisher.directory.write_config(torch.float32)
    process = start_server(folder / "weights", port, folder / "log", [*STREAMED, *more])
    try:
        trainer.give(0)
        trainer.engine.sample(PROMPTS, SamplingParams(), 4, SEED)  # the first requests take longer
        yield trainer
    finally:
        sys.stderr.write((folder / "log").read_text()[-4000:])
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Address and folder of a server."""
    folder = Path(tmp_path_factory.mktemp("server"))
    with started(folder) as trainer:
        yield trainer.engine.client.url, folder


@pytest.fixture
def server(place):
    """A trainer that comes to the server after another."""
    trainer = Trainer(*place)
    trainer.give(0)
    return trainer


def check(engine, version):
    samples = engine.sample(PROMPTS, SamplingParams(), 20, SEED)
    assert {number for sample in samples for number in sample.versions} == {version}
    assert max(farthest(sample, prompt) for prompt, sample in zip(PROMPTS, samples, strict=True)) < CLOSE


@pytest.mark.parametrize("ipc", [False, True])
def test_two_senders_give_all_weights(place, ipc):
    trainer = Trainer(*place, ipc=ipc)
    for version in (1, 2, 0):
        trainer.give(version)
        check(trainer.engine, version)
        assert [*trainer.engine.publisher.directory.path.glob("*")] == [
            trainer.engine.publisher.directory.path / "config.json"
        ]


def test_a_server_of_two_processes_which_share_each_tensor(tmp_path):
    with started(tmp_path, "--tensor-parallel-size=2") as trainer:
        second_trainer = Trainer(trainer.engine.client.url, tmp_path, ipc=True)
        for version, sender in ((1, trainer), (2, trainer), (3, second_trainer)):
            sender.give(version)
            check(sender.engine, version)


def test_weights_change_within_responses(server):
    server.engine.partial_rollouts = True

    def update():
        for version in (1, 2):
            sampled = number_of(server.engine.client.url, "generation_tokens_total")
            wait_until(lambda: number_of(server.engine.client.url, "generation_tokens_total") >= sampled + BETWEEN)  # noqa: B023
            server.give(version)

    samples = sample_over(server.engine, update)
    assert {version for sample in samples for version in sample.versions} >= {0, 1}
    check_versions_of(samples)


def state(engine):
    """Whether the server is paused, and the version that it names."""
    paused = engine.client.http.json("GET", "/is_paused")
    state_of_server = engine.client.http.json("GET", "/weight_info")
    return paused["is_paused"], state_of_server["weight_version"]


def test_an_update_without_one_sender_is_named_and_replaced(server):
    """The first sender has sent all, the second nothing; then another trainer comes."""
    server.engine.begin_update(1)
    send_weights(server.tensors(0, 1), server.senders[:1], BUCKET_BYTES)
    assert state(server.engine) == (True, INCOMPLETE)
    check_another_trainer(server)


@pytest.mark.parametrize("moment", ["between buckets", "while the server waits"])
def test_a_sender_that_is_killed_leaves_no_mixture_in_service(server, moment):
    url = server.engine.client.url
    folder = server.engine.publisher.directory.path.parent
    command = [sys.executable, "-m", "tests.vllm.check_weight_transfer", url, str(folder), moment]
    run = subprocess.run(command, cwd=ROOT, timeout=120, check=False)
    assert run.returncode == -signal.SIGKILL
    assert state(server.engine) == (True, INCOMPLETE)
    check_another_trainer(server)


def check_another_trainer(server):
    """It takes over the server: it connects again, and its weights are complete."""
    engine = Trainer(server.engine.client.url, server.engine.publisher.directory.path.parent)
    engine.give(2)
    check(engine.engine, 2)
    assert state(engine.engine) == (False, "2")


def test_bytes_that_changed_under_way_are_an_error_that_names_them(server):
    server.engine.begin_update(1)
    with mock.patch.object(weight_stream, "sum_of", lambda bucket: int(bucket.sum()) + 1):
        errors = server.send(1)
    assert len(errors) == 2
    assert "model.embed_tokens.weight" in "".join(map(str, errors))
    assert state(server.engine) == (True, INCOMPLETE)
    server.give(2)
    check(server.engine, 2)


@pytest.mark.timeout(1800)  # a whole run beside a server
def test_a_run_of_two_stages_beside_each_of_two_servers(tmp_path):
    """Each token of its records against the model that the run saved at the token's version."""
    (tmp_path / "long_task.py").write_text(TASK)
    arguments = [word for word in WORDS.split() if word not in PARTIAL]
    arguments += """--pipeline-model-parallel-size=2 --rollout-weight-transfer=gloo --max-response-length=24
        --train-iters=3 --rollout-concurrency=16""".split()
    status, output = run_beside_server(tmp_path, arguments, ranks=4, servers=2, more=STREAMED)
    assert status == 0, output
    assert check_tokens(tmp_path) == ({1, 2}, 0)
    assert not [*(tmp_path / "weights").rglob("*.safetensors")]


@pytest.mark.timeout(1800)  # a whole run beside a server
@pytest.mark.parametrize("killed", ["server", "rank"])
def test_a_run_goes_on_after_kill_9(tmp_path, killed):
    """The ranks are started again, meet the server again, and go on from the last checkpoint."""
    (tmp_path / "long_task.py").write_text(TASK)
    files = [f"--save={tmp_path}/checkpoints", f"--load={tmp_path}/checkpoints", "--save-interval=1"]
    arguments = [*WORDS.split(), "--rollout-weight-transfer=gloo", "--max-response-length=100", *files]
    status, output = run_beside_server(tmp_path, arguments, kills=[killed], more=STREAMED)
    assert status == 0, output
    lines = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    check_records(tmp_path)


def die(url, folder, moment):
    """Begin an update in this process, and kill it."""
    trainer = Trainer(url, Path(folder))
    kill = partial(os.kill, os.getpid(), signal.SIGKILL)
    trainer.engine.begin_update(1)

    def tensors():
        for number, pair in enumerate(trainer.tensors(0, 1)):
            if number == 3 and moment == "between buckets":
                kill()
            yield pair

    if moment != "between buckets":
        weight_stream.StreamGroup.send = lambda *_: kill()
    send_weights(tensors(), trainer.senders[:1], BUCKET_BYTES)


if __name__ == "__main__":
    die(*sys.argv[1:])
