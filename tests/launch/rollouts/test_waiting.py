"""A rollout of any length: who waits, how it is given up, and what is kept then."""

import os
import signal
import threading
import time
from unittest import mock

import pytest
import torch

from megatron_rc.launch.checkpoint_folders import iterations
from megatron_rc.launch.engines import Sample
from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.rollouts import collector
from megatron_rc.launch.rollouts.collector import RolloutCollector
from megatron_rc.launch.rollouts.engine_work import EngineWork
from megatron_rc.launch.stopping import StopRequest
from tests.support.ranks import Layout, RankFailure
from tests.support.recorded_training import flags
from tests.support.training_runs import LIVE, rows, run_training, without_times

LAYOUT = Layout(dp=2)
FOREVER = 300
# Before the first rollout the engine is asked for the check of its weights.
ROLLOUT_1 = 3


class SlowEngine:
    """Of replica 1: the n-th rollout takes long, or fails."""

    def __init__(self, seconds, slow, error=None):
        self.seconds = seconds
        self.slow = slow
        self.error = error
        self.version = 0
        self.asked = 0

    def load_weights(self, weights, version):
        self.version = len(list(weights)) and version

    def sample(self, prompts, params, max_new_tokens, seed):
        self.asked += 1
        if self.asked == self.slow and torch.distributed.get_rank() == 1:
            if self.error:
                raise TimeoutError(self.error)
            time.sleep(self.seconds)
        return [Sample([3 + index % 2, 4], [-2.2, -2.2], "stop") for index, _ in enumerate(prompts)]


def run_slowly(words, engine, signalled=None):
    """A run with this engine, how it ended, and its seconds; ``signalled`` gets SIGTERM in the slow rollout."""
    take = RolloutCollector.collect

    def collect(self, step):
        if signalled is not None and engine.asked == engine.slow - 1 and torch.distributed.get_rank() == signalled:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return take(self, step)

    begun = time.monotonic()
    with (
        mock.patch.object(collector, "make_engine", return_value=engine),
        mock.patch.object(RolloutCollector, "collect", collect),
    ):
        return run_training(words), time.monotonic() - begun


def words_of(folder, *more):
    save = [f"--save={folder}/save", f"--load={folder}/save"]
    return flags(folder, *LIVE, "--rollout-check-tolerance=100", "--train-iters=3", *save, *LAYOUT.flags(), *more)


@pytest.mark.parametrize("signalled", [0, 1], ids=["the-one-that-waits", "the-one-that-works"])
def test_a_signal_ends_a_long_rollout_and_keeps_the_steps(ranks, tmp_path, signalled):
    """The rank that works is told by its own signal, as torchrun sends it to all; then it goes on to the same steps."""
    whole = tmp_path / "whole"
    for error, _ in ranks.run(run_slowly, LAYOUT, words_of(whole), SlowEngine(0, slow=ROLLOUT_1)):
        assert error is None
    slow = SlowEngine(FOREVER if signalled else 1, slow=ROLLOUT_1)
    for error, seconds in ranks.run(run_slowly, LAYOUT, words_of(tmp_path), slow, signalled):
        assert error is None
        assert seconds < FOREVER
    assert [row["step"] for row in rows(tmp_path)] == [1]
    assert iterations(tmp_path / "save") == [1]
    for error, _ in ranks.run(run_slowly, LAYOUT, words_of(tmp_path), SlowEngine(0, slow=ROLLOUT_1)):
        assert error is None
    assert without_times(tmp_path) == without_times(whole)


GIVEN_UP = {
    "too-slow": (None, r"step 1 failed: it did not end in 0\.02 minutes \(--rollout-wait-minutes\)"),
    "dead": ("no answer in 60 s", "step 1 failed: TimeoutError: no answer in 60 s"),
}


@pytest.mark.parametrize(("error", "sentence"), GIVEN_UP.values(), ids=GIVEN_UP)
def test_an_engine_that_is_given_up_ends_its_rank(ranks, tmp_path, error, sentence):
    """The other rank waits; the end of the process, which is not seen here, ends it."""
    arguments = [*words_of(tmp_path), "--rollout-wait-minutes=0.02"]
    with pytest.raises(RankFailure, match=f"rank 1 of 2:[^$]*EngineError: the rollout of {sentence}"):
        ranks.run(run_slowly, LAYOUT, arguments, SlowEngine(FOREVER, slow=ROLLOUT_1, error=error))
    assert [row["step"] for row in rows(tmp_path)] == [1]


def meet_twice(words):
    """Rank 0 has the engine, and does not wait for rank 1, which is late."""
    rank = torch.distributed.get_rank()
    work = EngineWork(configure(words, 2)[0], 0, rank == 0, StopRequest())
    time.sleep(0.3 * rank)
    work.meet("the first")
    work.meet("the second")
    return work.meetings


def test_a_rank_that_looks_late_finds_what_it_waits_for(ranks, tmp_path):
    layout = Layout(tp=2)
    assert ranks.run(meet_twice, layout, flags(tmp_path, *LIVE, *layout.flags())) == [2, 2]


def start_where_an_engine_fails(words):
    """The engine of replica 1 cannot be made."""

    def make(config, text, replica):
        if torch.distributed.get_rank() == 1:
            raise OSError("no port is free")
        return SlowEngine(0, slow=None)

    with mock.patch.object(collector, "make_engine", make):
        return run_training(words)


def test_an_engine_that_does_not_start_ends_its_rank(ranks, tmp_path):
    with pytest.raises(
        RankFailure, match=r"rank 1 of 2:[^$]*the start of the engines failed: OSError: no port is free"
    ):
        ranks.run(start_where_an_engine_fails, LAYOUT, words_of(tmp_path))
