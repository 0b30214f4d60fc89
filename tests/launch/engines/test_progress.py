"""Rollout batches that are sampled at once: their limit of requests, their order, and what a restart repeats."""

import asyncio
import threading

from megatron_rc.launch.engines import Progress
from megatron_rc.launch.engines.requests import RequestLimit
from megatron_rc.launch.engines.vllm_client import ROUTE, VllmClient
from megatron_rc.records.rollout import SamplingParams
from tests.launch.engines.test_servers import in_choice
from tests.support.partial_rollouts import wait_until
from tests.support.rollout_servers import TOKENS, given

SECONDS = 60


def call(engine, batch, samples, number=8):
    """(thread, the responses that it gets): a call for a rollout batch."""
    prompts = [[2 + batch, index] for index in range(number)]
    responses = []
    progress = Progress(batch, prompts, SamplingParams(), samples)
    thread = threading.Thread(
        target=lambda: responses.extend(engine.sample(prompts, SamplingParams(), TOKENS, batch, progress))
    )
    thread.start()
    return thread, responses


def asked(server):
    return [body["token_ids"] for path, body in server.seen if path == ROUTE]


def test_batches_share_the_limit_and_an_evaluation_does_not_wait(server, tmp_path):
    engine = given(VllmClient, server, tmp_path, 3, partial_rollouts=True, concurrency=3)
    server.together = gate = threading.Event()
    later = {}
    earlier = {}
    threads = [call(engine, 2, later)]
    wait_until(lambda: len(asked(server)) == 3)
    threads.append(call(engine, 1, earlier))
    wait_until(lambda: len(engine._limit_of_rollouts._waiting) == 5 + 8)
    evaluation = threading.Thread(target=lambda: engine.sample([[9, 9]], SamplingParams(), TOKENS, 0))
    evaluation.start()
    wait_until(lambda: len(asked(server)) == 4)
    gate.set()
    for thread in (evaluation, *(thread for thread, _ in threads)):
        thread.join(SECONDS)
    first = [prompt[0] for prompt in asked(server)[:10]]
    then = [prompt[0] for prompt in asked(server)[10:]]
    # Three requests that were sent at once may come in any order.
    assert (first, sorted(then)) == ([4] * 3 + [9] + [3] * 6, [3] * 2 + [4] * 5)
    for (_, responses), samples in zip(threads, (later, earlier), strict=True):
        assert responses == [samples[index] for index in range(8)]


def test_after_a_restart_the_missing_responses_alone_are_asked_again(server, tmp_path):
    engine = given(VllmClient, server, tmp_path, 3, partial_rollouts=True, concurrency=1)
    server.faults[ROUTE] = [None] * 5 + [in_choice(weight_versions=[{"version": "default", "start": 0, "end": TOKENS}])]
    thread, responses = call(engine, 3, {})
    thread.join(SECONDS)
    assert [prompt[1] for prompt in asked(server)] == [0, 1, 2, 3, 4, 5, 5, 6, 7]
    assert (len(responses), engine.restarts) == (8, 1)


def test_a_restarted_server_gets_its_weights_once(server, tmp_path):
    """Two batches lose responses by one restart."""
    engine = given(VllmClient, server, tmp_path, 3, partial_rollouts=True, concurrency=64)
    lost = in_choice(weight_versions=[{"version": "default", "start": 0, "end": TOKENS}])
    server.together = gate = threading.Event()
    server.faults[ROUTE] = [None] * 7 + [lost] + [None] * 7 + [lost]
    calls = [call(engine, 3, {})]
    wait_until(lambda: len(asked(server)) == 8)
    calls.append(call(engine, 4, {}))
    wait_until(lambda: len(asked(server)) == 16)
    gate.set()
    for thread, responses in calls:
        thread.join(SECONDS)
        assert len(responses) == 8
    assert engine.restarts == 1
    assert server.paths().count("/collective_rpc") == 2, "the first weights, and once more"


def test_a_request_that_is_cancelled_leaves_its_slot_to_others():
    limit = RequestLimit(1)
    taken = []

    async def request(name, end):
        async with limit.slot(0):
            taken.append(name)
            await end.wait()

    async def scene():
        ends = [asyncio.Event() for _ in range(4)]
        tasks = [asyncio.create_task(request(name, end)) for name, end in zip("abcd", ends, strict=True)]
        while not taken:
            await asyncio.sleep(0.001)
        tasks[1].cancel()  # it waits
        tasks[0].cancel()  # it has its slot
        while taken != ["a", "c"]:
            await asyncio.sleep(0.001)
        ends[2].set()
        await tasks[2]
        tasks[3].cancel()  # its slot is free, but it has not run since
        await asyncio.gather(*tasks, return_exceptions=True)
        ends[0].set()
        await asyncio.wait_for(request("e", ends[0]), SECONDS)

    asyncio.run(asyncio.wait_for(scene(), SECONDS))
    assert taken[-1] == "e"


def test_versions_are_counted_from_the_start_of_each_request(server, tmp_path):
    """A request that waits for its turn during an update is not under way."""
    engine = given(VllmClient, server, tmp_path, 0, partial_rollouts=True, concurrency=2)
    server.together = threading.Barrier(3, timeout=SECONDS)
    thread, _ = call(engine, 0, {}, number=6)
    for number in (2, 4, 6):
        wait_until(lambda least=number: len(asked(server)) == least and engine.open_samples.versions == 1)
        engine.open_samples.updated(went_on=True)
        assert engine.open_samples.versions == 2
        server.together.wait()
    thread.join(SECONDS)
    assert engine.open_samples.versions == 1
