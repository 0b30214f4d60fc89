"""Weights that change while vLLM's server samples: each token is scored again by the weights of its version.

``python -m tests.vllm.check_partial_rollouts FILE`` writes the server's answers for the tests that need no vLLM.
"""

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
import transformers

from megatron_rc.launch.engines.http_client import HttpClient
from megatron_rc.launch.engines.vllm_client import ROUTE
from megatron_rc.records.rollout import SamplingParams, load_rollouts
from tests.support.partial_rollouts import (
    CONFIG,
    FAR,
    PROMPTS,
    SEED,
    check_ratios,
    check_versions_of,
    farthest,
    give,
    sample_over,
    wait_until,
)
from tests.support.paths import ROOT
from tests.vllm.check_vllm import TRAIN, free_port, number_of, served, start_server

# Tokens that the server samples between two updates, of all responses together.
BETWEEN = 40


def started(folder):
    """An engine whose server has the weights of version 0."""
    for rig in served(folder, CONFIG):
        rig.engine.partial_rollouts = True
        rig.engine.client.needs_versions = True
        give(rig.engine, 0)
        rig.engine.sample(PROMPTS, SamplingParams(), 4, SEED)  # the first requests take longer
        yield rig.engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    yield from started(Path(tmp_path_factory.mktemp("server")))


@pytest.fixture(autouse=True)
def first_weights(request):
    """Every test begins with the weights of version 0, and without a bound."""
    if "engine" in request.fixturenames:
        made = request.getfixturevalue("engine")
        made.max_versions = None
        give(made, 0)


def updates(engine, versions):
    """A function that gives an engine weights, each after some more tokens."""

    def update():
        for version in versions:
            sampled = number_of(engine.client.url, "generation_tokens_total")
            wait_until(lambda least=sampled + BETWEEN: number_of(engine.client.url, "generation_tokens_total") >= least)
            give(engine, version)

    return update


def test_weights_change_within_responses(engine):
    samples = sample_over(engine, updates(engine, [1, 2]))
    assert {version for sample in samples for version in sample.versions} >= {0, 1}
    check_versions_of(samples)
    check_ratios(samples)
    assert engine.restarts == 0


def test_an_update_that_would_exceed_the_bound_waits_for_the_responses(engine):
    engine.max_versions = engine.client.max_versions = 2
    samples = sample_over(engine, updates(engine, [1, 2]))
    assert max(len(set(sample.versions)) for sample in samples) == 2
    assert all(farthest(sample, prompt) < 1e-4 for prompt, sample in zip(PROMPTS, samples, strict=True))
    assert engine.version == 2


def test_a_cache_of_older_weights_would_be_seen(engine):
    """Without the reset, the new weights go on from keys and values of the old ones, under the new version."""
    call = HttpClient.call

    def keep_the_cache(client, method, path, body=None):
        if path.startswith("/reset_prefix_cache"):
            return b'{"success": true}'
        return call(client, method, path.replace("mode=keep", "mode=keep&clear_cache=false"), body)

    with mock.patch.object(HttpClient, "call", keep_the_cache):
        samples = sample_over(engine, updates(engine, [1]))
    changed = [pair for pair in zip(PROMPTS, samples, strict=True) if len(set(pair[1].versions)) > 1]
    assert changed
    assert all(farthest(sample, prompt) > FAR for prompt, sample in changed)


TASK = """
from megatron_rc.launch.tasks import Problem

class Long:
    characters = "0123456789"
    max_response_length = 200

    def __init__(self, seed):
        pass

    def problems(self, start, count, held_out=False):
        return [Problem(f"{number % 1000:03d}", label="0") for number in range(start, start + count)]
"""
# Keys and values of older weights stay under the new version.
KEEPS_CACHES = """
from megatron_rc.launch.engines.http_client import HttpClient
call = HttpClient.call
def keep(client, method, path, body=None):
    if path.startswith("/reset_prefix_cache"):
        return b"true"
    return call(client, method, path.replace("mode=keep", "mode=keep&clear_cache=false"), body)
HttpClient.call = keep
"""
# One request at a time: a rollout batch takes several times as long as a step of the trainer, on any machine, so that
# it is under way at a sync.
WORDS = """--from-scratch --num-layers=2 --hidden-size=64 --num-attention-heads=2
--group-query-attention --num-query-groups=2
    --ffn-hidden-size=96 --position-embedding-type=rope --normalization=RMSNorm --swiglu --disable-bias-linear --cpu
    --seq-length=256 --max-position-embeddings=320 --task=python:long_task:Long --reward=exact --init-method-std=0.2
    --lr=3e-3 --train-iters=6 --grpo-prompts-per-step=8 --grpo-group-size=4 --grpo-iterations=1 --global-batch-size=32
    --micro-batch-size=8 --grpo-entropy-term-weight=0.1 --rollout-dtype=fp32 --rollout-is=token --run-name=run
    --rollout-engine=vllm-server --rl-partial-rollouts --rollout-staleness=2 --rollout-timeout=400
    --rollout-concurrency=1 --save-hf-interval=1"""


@pytest.mark.timeout(1800)  # a whole run beside a server
@pytest.mark.parametrize("broken", ["", KEEPS_CACHES], ids=["whole", "keeps-caches"])
def test_a_run_whose_server_takes_weights_while_it_samples(tmp_path, broken):
    """Each token of its records against the model that the run saved at the token's version."""
    (tmp_path / "long_task.py").write_text(TASK)
    status, output = run_beside_server(tmp_path, WORDS.split(), broken)
    if broken:
        assert status != 0, output
        assert "the rollout engine and the trainer disagree by" in output
        return
    assert status == 0, output
    check_records(tmp_path)


# vLLM's attention on CPUs wants heads of 32 numbers; 320 tokens are what the tests' server may read.
LEARN = f"""--config={ROOT}/configs/study/count_on.yaml --num-attention-heads=2 --max-position-embeddings=320 --seed=3
    --train-iters=40 --lr-decay-iters=100 --rollout-engine=vllm-server --rollout-is=token --rollout-staleness=4
    --rl-partial-rollouts --rollout-concurrency=32 --rollout-timeout=600 --rollout-check-tolerance=0.05
    --run-name=run"""


@pytest.mark.timeout(1800)  # a whole run beside a server
def test_a_run_learns_from_responses_of_several_versions(tmp_path):
    status, output = run_beside_server(tmp_path, LEARN.split())
    assert status == 0, output
    lines = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    rewards = [row["reward/mean"] for row in map(json.loads, lines) if "reward/mean" in row]
    assert max(rewards[:4]) < 0.1
    assert min(rewards[-4:]) > 0.15
    records = [load_rollouts(path) for path in (tmp_path / "rollouts").glob("*.safetensors")]
    assert any(len(set(row[mask].tolist())) > 1 for one in records for row, mask in one_by_one(one))


def one_by_one(batch):
    return zip(batch.policy_versions, batch.response_mask, strict=True)


@pytest.mark.timeout(1800)  # a whole run beside a server
@pytest.mark.parametrize("killed", ["server", "rank"])
def test_a_run_goes_on_after_kill_9_while_the_server_samples(tmp_path, killed):
    (tmp_path / "long_task.py").write_text(TASK)
    files = [f"--save={tmp_path}/checkpoints", f"--load={tmp_path}/checkpoints", "--save-interval=1"]
    status, output = run_beside_server(tmp_path, [*WORDS.split(), *files], kills=[killed])
    assert status == 0, output
    lines = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    check_records(tmp_path)
    if killed == "rank":
        check_kept(tmp_path, int(re.search(r"goes on from checkpoint (\d+)", output)[1]))


def run_beside_server(folder, words, broken="", kills=(), ranks=1, servers=1, more=()):
    """(exit status, output) of a run beside servers with its weights; status None: the last server ended first.

    ``kills``: what is killed, and started again, after one rollout batch more each time; ``more``: flags of servers.
    """
    (folder / "train.py").write_text(TRAIN.format(broken=broken))
    ports = [free_port() for _ in range(servers)]
    port = ports[-1]
    folders = f"--runs-dir={folder}/runs --save-hf={folder}/hf --save-rollouts={folder}/rollouts"
    folders += f" --rollout-weights-dir={folder}/weights"
    folders += " --rollout-url=" + ",".join(f"http://127.0.0.1:{one}" for one in ports)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    launcher += [f"--max-restarts={len(kills)}"]
    with (folder / "said").open("w") as message:
        command = [*launcher, str(folder / "train.py"), *words, *folders.split()]
        run = subprocess.Popen(
            command, stdout=message, stderr=subprocess.STDOUT, cwd=folder, env=environment(), start_new_session=True
        )
    processes = [run]
    try:
        for number, one in enumerate(ports):
            weights = folder / "weights" / f"replica-{number}"
            wait_until((weights / "config.json").exists, seconds=200)
            processes.append(start_server(weights, one, folder / "log", more))
        for number, kind in enumerate(kills):
            wait_until(lambda least=number + 2: len([*(folder / "rollouts").glob("*")]) >= least, seconds=300)
            wait_until(lambda: number_of(f"http://127.0.0.1:{port}", "num_requests_running") > 0)
            if kind == "rank":
                psutil.Process(run.pid).children()[0].kill()
            else:
                os.killpg(processes[-1].pid, signal.SIGKILL)
                processes.append(start_server(weights, port, folder / "log", more))
        wait_until(lambda: run.poll() is not None or processes[-1].poll() is not None, seconds=1500)
        status = run.poll()
    finally:
        end(processes)
    return status, (folder / "said").read_text()[-4000:]


def check_kept(folder, step):
    """The responses in the checkpoint that a run went on from are in its records, as they were."""
    number = 0
    for file in (folder / "checkpoints" / f"iter_{step:07d}").glob("rollouts-*"):
        batch_of_file = load_rollouts(file)
        record = load_rollouts(
            folder / "rollouts" / f"step-{int(file.stem.split('-')[2]):07d}-replica-0000.safetensors"
        )
        for row, index in enumerate(batch_of_file.sample_ids.tolist()):
            length = batch_of_file.tokens.shape[1]
            mask = record.response_mask[index]
            assert torch.equal(record.tokens[index, :length], batch_of_file.tokens[row])
            for name in ("rollout_log_probs", "policy_versions"):
                assert torch.equal(getattr(record, name)[index][mask], getattr(batch_of_file, name)[row][mask[:length]])
            number += 1
    assert number > 0, "the checkpoint had no response"


def end(processes):
    """End processes that lead a group, with their group."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(process.pid, signal.SIGTERM)
    for process in processes:
        process.wait(60)


def check_records(folder):
    """Versions change within responses, and each token has the log-prob of the model of its version."""
    numbers, mixed = check_tokens(folder)
    assert mixed > 0, "no response was under way when the weights changed"
    assert len(numbers) > 1


def check_tokens(folder):
    """Each token has the log-prob of its version's model; returns the versions, and the number of mixed responses."""
    numbers = set()
    mixed = 0
    for file in sorted((folder / "rollouts").glob("*.safetensors")):
        batch = load_rollouts(file)
        for row in range(len(batch.tokens)):
            mask = batch.response_mask[row]
            versions = batch.policy_versions[row]
            mixed += len(set(versions[mask].tolist())) > 1
            for version in set(versions[mask].tolist()) - {0}:  # a run saves what its steps made
                of_version = mask & (versions == version)
                log_probs = log_probs_of(folder / "hf" / f"step-{version}", batch.tokens[row])[of_version]
                torch.testing.assert_close(
                    batch.rollout_log_probs[row][of_version].double(), log_probs, rtol=0, atol=1e-3
                )
                numbers.add(version)
    return numbers, mixed


@functools.cache
def saved_model(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def log_probs_of(folder, tokens):
    """[s] float64 log-prob of each token but the first, which gets 0."""
    with torch.no_grad():
        logits = saved_model(folder)(tokens[None]).logits[0, :-1].double()
    log_probs = torch.log_softmax(logits, -1).gather(1, tokens[1:, None]).squeeze(1)
    return torch.cat([torch.zeros(1, dtype=torch.float64), log_probs])


def environment():
    """The environment of a run that is started in another folder."""
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def record(file):
    """Write the server's answers to requests that were under way during two updates, and to those of the updates."""
    seen = []
    exchange = HttpClient._exchange

    async def watched(client, connections, request):
        answer = await exchange(client, connections, request)
        seen.append({"path": request.path, "status": answer[0], "answer": json.loads(answer[1])})
        return answer

    with tempfile.TemporaryDirectory() as folder:
        for engine in started(Path(folder)):
            give(engine, 0)
            with mock.patch.object(HttpClient, "_exchange", watched):
                samples = sample_over(engine, updates(engine, [1, 2]))
            check_versions_of(samples)
    of_updates = ("/pause", "/reset", "/resume")
    recorded = [call for call in seen if call["path"] == ROUTE or call["path"].startswith(of_updates)]
    file.write_text("[\n" + ",\n".join(json.dumps(call) for call in recorded) + "\n]\n")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
