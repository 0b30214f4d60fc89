"""Versions of the weights of each token, and weights that change while vLLM's server samples, as it answered.

``vllm_answers.json`` has the answers of vLLM 0.32 on a CPU; ``tests/vllm/check_partial_rollouts.py`` wrote it.
"""

import json
import threading
from pathlib import Path

import pytest

from megatron_rc.launch.engines import EngineError
from megatron_rc.launch.engines.model_directory import ModelDirectory
from megatron_rc.launch.engines.publishers import FilePublisher
from megatron_rc.launch.engines.server import ServerEngine
from megatron_rc.launch.engines.sglang_client import SglangClient
from megatron_rc.launch.engines.vllm_client import ROUTE, VllmClient
from megatron_rc.launch.tasks.ends import ResponseEnds
from tests.launch.engines.test_servers import in_choice, in_meta
from tests.support.partial_rollouts import (
    CONFIG,
    PROMPTS,
    check_ratios,
    check_versions_of,
    give,
    sample_over,
    wait_until,
)
from tests.support.rollout_servers import QUICK, TOKENS, HttpClient, Server, given, running, sample, weights

RECORDED = json.loads((Path(__file__).parent / "vllm_answers.json").read_text())
KEEP = "/pause?mode=keep"
RESET = "/reset_prefix_cache?reset_running_requests=true"


class PlayedServer(Server):
    """Answers with the recorded responses, each when the server has got the version of its last tokens."""

    def __init__(self, port=0):
        super().__init__(port)
        answers = [one["answer"] for one in RECORDED if one["path"] == ROUTE]
        self.answers = {tuple(answer["prompt_token_ids"]): answer for answer in answers}
        self.resumed = threading.Condition()

    def answer(self, path, body):
        if path == ROUTE:
            answer = self.answers[tuple(body["token_ids"])]
            last = answer["choices"][0]["weight_versions"][-1]["version"]
            with self.resumed:
                assert self.resumed.wait_for(lambda: self.version.isdecimal() and int(self.version) >= int(last), 60)
            return answer
        answer = super().answer(path, body)
        with self.resumed:
            self.resumed.notify_all()
        return answer


def test_the_recorded_responses_have_the_versions_of_their_tokens(tmp_path):
    """Each token is scored by the weights of its version, and the ratios of each version against the newest weights."""
    with running(kind=PlayedServer) as server:
        directory = ModelDirectory(tmp_path / "weights", CONFIG, eos_token_id=1)
        client = VllmClient(HttpClient(server.url, 60.0, QUICK), needs_versions=True)
        engine = ServerEngine(client, FilePublisher(directory), ResponseEnds((1,)), partial_rollouts=True)
        give(engine, 0)

        def updates():
            wait_until(lambda: server.paths().count(ROUTE) == len(PROMPTS))
            for version in (1, 2):
                give(engine, version)

        samples = sample_over(engine, updates)
        lines = [line for line in server.lines if line.startswith(("/pause", "/reset", "/resume"))]
    check_versions_of(samples)
    check_ratios(samples)
    assert {len(set(one.versions)) for one in samples} == {1, 2, 3}
    recorded = [one["path"] for one in RECORDED if one["path"] != ROUTE]
    assert lines == [KEEP, RESET, "/resume", *recorded], "the routes that vLLM answered, and the first weights"
    assert {one["status"] for one in RECORDED} == {200}


def spans(*parts):
    return [{"version": version, "start": start, "end": end} for version, start, end in parts]


def test_each_token_has_the_version_of_its_span(server, tmp_path):
    engine = given(VllmClient, server, tmp_path, 3, partial_rollouts=True)
    engine._given = 5
    server.always[ROUTE] = in_choice(weight_versions=spans(("4", 0, 2), ("4", 2, 2), ("5", 2, TOKENS)))
    assert sample(engine)[0].versions == [4, 4, *[5] * (TOKENS - 2)]


WRONG_SPANS = {
    "gap": (spans(("3", 0, 1), ("3", 2, TOKENS)), "'end': 4}, expected version, start 1 and an end of at most 4"),
    "short": (spans(("3", 0, 3)), "covers 3 of 4 tokens"),
    "no-list": (7, "weight_versions has 7, expected version, start 0"),
    "future": (spans(("3", 0, 1), ("4", 1, TOKENS)), "holds weights 4, expected 3: does another program update them"),
    "number": (spans((3, 0, TOKENS)), "names its weights 3, expected a number in quotes"),
}


@pytest.mark.parametrize(("wrong", "message"), WRONG_SPANS.values(), ids=WRONG_SPANS)
def test_wrong_spans_end_in_one_error(server, tmp_path, wrong, message):
    engine = given(VllmClient, server, tmp_path, 3)
    server.always[ROUTE] = in_choice(weight_versions=wrong)
    with pytest.raises(EngineError, match=message) as caught:
        sample(engine)
    assert server.paths().count(ROUTE) == 1
    assert server.url in str(caught.value)
    assert "\n" not in str(caught.value)


def test_weights_do_not_become_older_within_a_response(server, tmp_path):
    engine = given(VllmClient, server, tmp_path, 3, partial_rollouts=True)
    engine._given = 5
    server.always[ROUTE] = in_choice(weight_versions=spans(("5", 0, 1), ("4", 1, TOKENS)))
    with pytest.raises(EngineError, match="weights 4 sampled after weights 5"):
        sample(engine)
    server.always[ROUTE] = in_choice(weight_versions=spans(("6", 0, TOKENS)))
    with pytest.raises(EngineError, match="holds weights 6, expected 3 to 5"):
        sample(engine)


def test_an_answer_without_versions_has_the_engines(server, tmp_path):
    """A release that names none; responses of several versions need them."""
    server.always[ROUTE] = in_choice(weight_versions=None)
    assert sample(given(VllmClient, server, tmp_path, 3))[0].versions is None
    engine = given(VllmClient, server, tmp_path, 3, partial_rollouts=True)
    with pytest.raises(EngineError, match="weight_versions has None"):
        sample(engine)


def test_sglangs_version_is_that_of_all_tokens(server, tmp_path):
    engine = given(SglangClient, server, tmp_path, 3)
    assert sample(engine)[0].versions == [3] * TOKENS
    server.always["/generate"] = in_meta(weight_version=3)
    with pytest.raises(EngineError, match="names its weights 3, expected a number in quotes"):
        sample(engine)
    server.always["/generate"] = in_meta(weight_version="absent")
    assert sample(given(SglangClient, server, tmp_path, 4))[0].versions is None


def test_an_update_waits_for_responses_that_have_as_many_versions_as_allowed(server, tmp_path):
    engine = given(VllmClient, server, tmp_path, 0, partial_rollouts=True, max_versions=2)
    server.together = threading.Barrier(9, timeout=60)
    server.lines.clear()

    def updates():
        wait_until(lambda: server.paths().count(ROUTE) == len(PROMPTS))
        for version in range(1, 5):
            engine.load_weights(weights().items(), version)
        server.together.wait()

    samples = sample_over(engine, updates)
    paused = [line for line in server.lines if line.startswith("/pause")]
    assert paused == [KEEP, "/pause?mode=wait", KEEP, "/pause?mode=wait"]
    resets = [line for line in server.lines if line.startswith("/reset")]
    assert resets == [RESET, "/reset_prefix_cache"] * 2
    assert {tuple(one.versions) for one in samples} == {(4,) * len(samples[0].token_ids)}
    server.together = None
    server.always[ROUTE] = in_choice(weight_versions=spans(("4", 0, 1), ("5", 1, 2), ("6", 2, TOKENS)))
    engine._given = 6
    with pytest.raises(EngineError, match="has 3 versions of weights, --rollout-max-versions allows 2"):
        sample(engine)


def test_a_restart_while_weights_change(server, tmp_path, caplog):
    """The server gets its weights once more, under one update at a time, and samples all responses again."""
    engine = given(VllmClient, server, tmp_path, 3, partial_rollouts=True)
    lost = in_choice(weight_versions=spans(("default", 0, TOKENS)))
    server.faults[ROUTE] = [None] * 3 + [lost]
    with engine._updating:
        thread_is_there = threading.Event()
        thread = threading.Thread(target=lambda: (thread_is_there.set(), sample(engine, [[5, 6]] * 8)))
        thread.start()
        thread_is_there.wait(60)
        wait_until(lambda: server.paths().count(ROUTE) >= 4)
        assert server.paths().count("/collective_rpc") == 1, "an update is under way"
    thread.join()
    assert server.paths().count("/collective_rpc") == 2
    assert engine.restarts == 1
    assert "lost the weights of step 3" in caplog.text
    # An update that failed meanwhile has told why; the server stays paused.
    server.faults[ROUTE] = [lambda answer: setattr(engine, "version", -1) or lost(answer)]
    with pytest.raises(EngineError, match="lost the weights of step 3"):
        sample(engine)
    assert server.paths().count("/collective_rpc") == 2
