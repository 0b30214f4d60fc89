"""Responses of batches under way, in checkpoints: what is kept, what still fits, and runs that go on with them."""

import functools
import itertools
import os
import signal
from unittest import mock

import pytest
import torch

from megatron_rc.launch.engines import Sample
from megatron_rc.launch.rollouts.open_rollouts import OpenRollouts
from megatron_rc.launch.tasks.ends import ResponseEnds
from megatron_rc.records.rollout import SamplingParams, load_rollouts
from tests.launch.rollouts.test_partial_rollouts import LENGTH, OpenEngine, partial
from tests.launch.rollouts.test_scheduler import SECONDS, run_with
from tests.support.partial_rollouts import wait_until
from tests.support.ranks import Layout
from tests.support.recorded_training import SEQUENCES, run_config
from tests.support.training_runs import rows

PROMPTS = [[3, 4], [5], [6, 7, 8]]
LONGEST = 4
ENDS = ResponseEnds((1,))


def response(tokens, versions, finish="length", **more):
    return Sample(tokens, [-0.5 - 0.125 * token for token in tokens], finish, versions=versions, **more)


@pytest.fixture
def made(tmp_path):
    """Makes the open rollouts of a run."""

    def make(replica=0, *words):
        return OpenRollouts(run_config(partial(tmp_path, "--train-iters=9", *words)), replica)

    return make


def through_a_checkpoint(before, after, folder, step):
    """Write and read; the second load finds nothing of the first one's."""
    folder.mkdir()
    before.save(folder, step)
    after.load(folder)
    return sorted(path.name for path in folder.iterdir())


def test_responses_come_back_to_the_call_that_asked_for_them(made, tmp_path):
    before = made()
    after = made()
    first, second = (before.progress(4, seed, PROMPTS, SamplingParams(), LONGEST, ENDS) for seed in (10, 11))
    samples = {2: response([3, 9, 9, 9], [3, 3, 4, 4]), 0: response([5, 1], [4, 4], "stop")}
    first.samples.update(samples)
    second.samples[1] = response([7, 7, 7, 7], [3] * 4)
    before.progress(3, 9, PROMPTS, SamplingParams(), LONGEST, ENDS).samples[0] = response([7, 1], [3, 3], "stop")
    names = through_a_checkpoint(before, after, tmp_path / "step", 4)
    assert names == ["rollouts-0000-4-10.safetensors", "rollouts-0000-4-11.safetensors"]
    assert after.progress(4, 10, PROMPTS, SamplingParams(), LONGEST, ENDS).samples == samples
    # What was not asked for yet goes on to the next checkpoint.
    last = made()
    assert through_a_checkpoint(after, last, tmp_path / "next", 4) == names
    assert last.progress(4, 11, PROMPTS, SamplingParams(), LONGEST, ENDS).samples == second.samples
    assert last.progress(4, 12, PROMPTS, SamplingParams(), LONGEST, ENDS).samples == {}
    last.forget_before(5)
    assert through_a_checkpoint(last, made(), tmp_path / "later", 4) == []


def test_experts_and_kept_tokens_come_back_too(made, tmp_path):
    before = made()
    after = made()
    experts = torch.randint(0, 99, (5, 3, 2), dtype=torch.int16)
    support = torch.tensor([3, 4, 9, 9, 5, 9]).int(), torch.tensor([2, 1, 2, 1]).int()
    sample = response([3, 9, 9, 9], [4] * 4, routed_experts=experts, support=support)
    params = SamplingParams(top_p=0.9)
    before.progress(4, 1, PROMPTS, params, LONGEST, ENDS).samples[0] = sample
    through_a_checkpoint(before, after, tmp_path / "step", 4)
    restored = after.progress(4, 1, PROMPTS, params, LONGEST, ENDS).samples[0]
    assert torch.equal(restored.routed_experts, experts)
    assert torch.equal(restored.support[0], support[0])
    assert torch.equal(restored.support[1], support[1])


def test_bad_responses_are_not_kept(made, tmp_path):
    before = made()
    bad = {0: response([], []), 1: response([3, 9, 9, 9], [4] * 4, fault="the log-prob is nan")}
    before.progress(4, 1, PROMPTS, SamplingParams(), LONGEST, ENDS).samples.update(bad)
    assert through_a_checkpoint(before, made(), tmp_path / "step", 4) == []


WHOLE = response([3, 9, 9, 9], [3, 3, 4, 4])
ENDED = response([5, 1], [4, 4], "stop")
OTHERS = {
    "another-prompt": (WHOLE, [[3, 4, 5], *PROMPTS[1:]], SamplingParams(), LONGEST, 0),
    "another-temperature": (WHOLE, PROMPTS, SamplingParams(temperature=0.7), LONGEST, 0),
    "too-long-now": (WHOLE, PROMPTS, SamplingParams(), 3, 0),
    "cut-off-before": (WHOLE, PROMPTS, SamplingParams(), 5, 0),
    "ended-before": (ENDED, PROMPTS, SamplingParams(), 5, 1),
    "too-old": (response([3, 9, 9, 9], [2, 2, 4, 4]), PROMPTS, SamplingParams(), LONGEST, 0),
    "as-it-was": (WHOLE, PROMPTS, SamplingParams(), LONGEST, 1),
}


@pytest.mark.parametrize(("sample", "prompts", "params", "longest", "kept"), OTHERS.values(), ids=OTHERS)
def test_responses_that_other_flags_would_not_give_are_asked_for_again(
    made, tmp_path, sample, prompts, params, longest, kept
):
    before = made()
    after = made()
    before.progress(4, 1, PROMPTS, SamplingParams(), LONGEST, ENDS).samples[0] = sample
    through_a_checkpoint(before, after, tmp_path / "step", 4)
    assert len(after.progress(4, 1, prompts, params, longest, ENDS).samples) == kept


class HalfEngine(OpenEngine):
    """Ends half of a batch's responses at once, and the others when the trainer comes to the batch."""

    passes = 1

    def __init__(self):
        super().__init__()
        self.asked = {}
        self.halves = set()

    def sample(self, prompts, params, max_new_tokens, seed, progress=None):
        missing = [index for index in range(len(prompts)) if index not in progress.samples]
        self.asked[progress.batch] = missing
        for index in missing:
            if index % 2 == 0:
                progress.samples[index] = self.response(index, [self.version] * LENGTH)
        self.halves.add(progress.batch)
        with self.news:
            if not self.news.wait_for(lambda: self.version >= self.passes * progress.batch, SECONDS):
                raise TimeoutError("the trainer did not come to the batch")
        for index in missing:
            if index % 2:
                progress.samples[index] = self.response(index, [self.version] * LENGTH)
        return [progress.samples[index] for index in range(len(prompts))]


def stop_after(step, engines, iteration):
    """Stop the run in a step, when the two batches ahead have half of their responses on each replica."""
    if iteration != step - 1:
        return
    for engine in engines:
        wait_until(lambda made=engine: iteration // made.passes + 2 in made.halves)
    if torch.distributed.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGTERM)


def go_on(engines, iteration):
    """Let the run go on to its end."""


def run_half(words, watch, passes):
    """(error, missing responses of each batch by engine) of a run, on each rank."""
    made = []

    class Engine(HalfEngine):
        def __init__(self):
            super().__init__()
            self.passes = passes
            made.append(self)

    # The threads still wait for weights at the end.
    with mock.patch("megatron_rc.launch.rollouts.work_threads.GRACE_SECONDS", 0.01):
        error, *_ = run_with(words, Engine, watch)
    for engine in made:
        engine.load_weights([], 10**9)
    return error, [engine.asked for engine in made]


TWO = ["--rollout-staleness=4", "--grpo-iterations=2"]
ODD = [*range(1, SEQUENCES, 2)]
# Layout, flags, step of the stop, and the missing responses of the batches in the checkpoint.
CASES = {
    "dp2": (Layout(dp=2), ["--rollout-staleness=2"], 3, dict.fromkeys((3, 4), ODD[: SEQUENCES // 4])),
    "pp2-async": (Layout(pp=2), ["--rollout-staleness=2", "--async-save", "--save-interval=2"], 3, {3: ODD, 4: ODD}),
    # Batch 1 begins again with all its responses, so that the next ones come a step later and would be too old.
    "within-a-batch": (Layout(), TWO, 3, {1: [], 2: [*range(SEQUENCES)], 3: [*range(SEQUENCES)]}),
}


@pytest.mark.parametrize(("layout", "more", "step", "missing"), CASES.values(), ids=CASES)
def test_a_resumed_run_asks_for_what_is_missing(ranks, tmp_path, layout, more, step, missing):
    """The even responses of the batches ahead come from the checkpoint, as they were."""
    arguments = partial(tmp_path, *layout.flags(), "--train-iters=9", *more, servers=layout.dp)
    arguments += [f"--save={tmp_path}/save", f"--load={tmp_path}/save", f"--save-rollouts={tmp_path}/rollouts"]
    arguments.append(f"--max-response-length={LENGTH}")
    passes = 2 if more == TWO else 1
    for error, _ in ranks.run(run_half, layout, arguments, functools.partial(stop_after, step), passes):
        assert error is None
    assert [row["step"] for row in rows(tmp_path)] == [*range(1, step + 1)]
    files = sorted((tmp_path / "save" / f"iter_{step:07d}").glob("rollouts-*"))
    kept = [(*map(int, path.name.split("-")[1:3]), load_rollouts(path)) for path in files]
    assert [(replica, number) for replica, number, _ in kept] == [*itertools.product(range(layout.dp), missing)]
    for error, engines in ranks.run(run_half, layout, arguments, go_on, passes):
        assert error is None
        for asked in engines:
            assert {number: asked[number] for number in missing} == missing
            assert all(len(asked[number]) == SEQUENCES // layout.dp for number in asked.keys() - missing)
    assert [row["step"] for row in rows(tmp_path)] == [*range(1, 10)]
    files = sorted((tmp_path / "rollouts").glob("*"))
    records = {(int(path.stem[-4:]), int(path.stem.split("-")[1]) // passes): path for path in files}
    for replica, number, batch in kept:
        record = load_rollouts(records[replica, number])
        for row, index in enumerate(batch.sample_ids.tolist()):
            if index in missing[number]:
                continue
            mask = record.response_mask[index]
            length = batch.tokens.shape[1]
            assert torch.equal(record.tokens[index, :length], batch.tokens[row])
            assert torch.equal(record.rollout_log_probs[index][mask], batch.rollout_log_probs[row][mask[:length]])
            assert torch.equal(record.policy_versions[index][mask], batch.policy_versions[row][mask[:length]])


def test_responses_that_end_otherwise_now_are_asked_for_again(made, tmp_path):
    before = made()
    call = before.progress(4, 1, PROMPTS, SamplingParams(), LONGEST, ENDS)
    call.samples.update({0: WHOLE, 1: ENDED, 2: response([7, 1], [4, 4], "stop")})
    through_a_checkpoint(before, made(), tmp_path / "step", 4)
    kept_by_ends = {(9, 1): [1, 2], (5,): [0], (1, 7): [0, 1]}
    for token_ids, kept in kept_by_ends.items():
        after = made()
        after.load(tmp_path / "step")
        call = after.progress(4, 1, PROMPTS, SamplingParams(), LONGEST, ResponseEnds(token_ids))
        assert sorted(call.samples) == kept, token_ids
