"""Weights that change while vLLM's server samples: each token is scored again by the weights of its version.

``python -m tests.vllm.check_partial_rollouts FILE`` writes the server's answers for the tests that need no vLLM.
"""

import json
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest

from megatron_rc.launch.engines.http_client import HttpClient
from megatron_rc.launch.engines.vllm_server import ROUTE
from megatron_rc.records.rollout import SamplingParams
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
from tests.vllm.check_vllm import number_of, served

# Tokens that the server samples between two updates, of all responses together.
BETWEEN = 150


def started(folder):
    """An engine whose server has the weights of version 0."""
    for rig in served(folder, CONFIG):
        rig.engine.partial_rollouts = True
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
    assert {version for sample in samples for version in sample.versions} == {0, 1, 2}
    check_versions_of(samples)
    check_ratios(samples)
    assert engine.restarts == 0


def test_an_update_that_would_exceed_the_bound_waits_for_the_responses(engine):
    engine.max_versions = 2
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


def record(file):
    """Write the server's answers to requests that were under way during two updates, and to those of the updates."""
    seen, exchange = [], HttpClient._exchange

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
    kept = [one for one in seen if one["path"] == ROUTE or one["path"].startswith(("/pause", "/reset", "/resume"))]
    file.write_text("[\n" + ",\n".join(json.dumps(one) for one in kept) + "\n]\n")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
