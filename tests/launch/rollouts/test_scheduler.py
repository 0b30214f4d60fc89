"""Rollouts of older weights: who sampled what, sampling while the trainer goes on, errors and ends, recorded ones."""

import threading
from dataclasses import replace
from unittest import mock

import pytest
import torch

from megatron_rc.launch.engines import Sample
from megatron_rc.launch.rollouts import collector, work_threads
from megatron_rc.launch.rollouts.collector import RolloutCollector, check_versions
from megatron_rc.launch.rollouts.scheduler import RolloutScheduler
from tests.support.ranks import Layout, RankFailure
from tests.support.recorded_training import flags, recorded_batch, run_config
from tests.support.training_runs import HELD_OUT, LIVE, rows, run_training, without_times

SECONDS = 30  # nothing here waits for a time-out unless it is broken


def scheduler(folder, sample, *, is_elsewhere, ahead=2):
    """A scheduler of a run that samples this number of batches ahead."""
    arguments = flags(folder, *LIVE, f"--rollout-staleness={ahead}", "--train-iters=9")
    return RolloutScheduler(run_config(arguments), sample, is_elsewhere=is_elsewhere)


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_batches_are_sampled_one_at_a_time_in_their_order(tmp_path, is_elsewhere):
    seen = []
    main = threading.get_ident()

    def sample(step):
        seen.append((step, threading.get_ident() == main))
        if step == 9:
            raise TimeoutError("no answer")
        return -step

    made = scheduler(tmp_path, sample, is_elsewhere=is_elsewhere)
    made.order([4, 6, 8, 9])
    assert [made.take(step) for step in (4, 6, 8)] == [-4, -6, -8]
    with pytest.raises(TimeoutError, match="no answer"):
        made.take(9)
    assert made.take(3) == -3, "not ordered: obtained at once"
    made.close()
    assert seen == [*((step, not is_elsewhere) for step in (4, 6, 8, 9)), (3, True)]


def turns(made, steps, *, evaluates=False):
    """For each step, whether weights are sent before and after its batch, and whether it begins a window."""
    seen = []
    for step in steps:
        turn = made.turn(step, evaluates=evaluates)
        assert turn.orders_before == []
        made.take(step)
        made.order(turn.orders_after)
        seen.append((turn.syncs_before, turn.syncs_after, turn.begins_window))
    return seen


FRESH = (True, False, True)
WITHIN = (False, False, False)
LAST = (False, True, True)


def test_weights_change_when_the_last_batch_of_a_window_is_there(tmp_path):
    """Two batches ahead, nine steps: the last window has nothing to follow, and is ended for an evaluation alone."""
    made = scheduler(tmp_path, abs, is_elsewhere=False)
    assert turns(made, range(7)) == [FRESH, WITHIN, LAST, WITHIN, LAST, WITHIN, LAST]
    assert turns(made, [7]) == [WITHIN]
    assert turns(made, [8], evaluates=True) == [LAST]
    again = scheduler(tmp_path, abs, is_elsewhere=False)
    assert again.go_on(step=7, version=6) == [7, 8]
    again.order([7, 8])
    assert turns(again, [7, 8]) == [WITHIN, (False, False, True)]
    assert scheduler(tmp_path, abs, is_elsewhere=False).go_on(step=6, version=-1) == []


def test_closing_drops_what_waits_and_leaves_a_batch_that_does_not_end(tmp_path, monkeypatch):
    """An error of the trainer is not kept back by it."""
    monkeypatch.setattr(work_threads, "GRACE_SECONDS", 0.01)
    begun = threading.Event()
    go = threading.Event()
    seen = []

    def slow(step):
        seen.append(step)
        begun.set()
        go.wait(SECONDS)

    made = scheduler(tmp_path, slow, is_elsewhere=True)
    made.order([1, 2, 3])
    assert begun.wait(SECONDS)
    made.close()
    (left,) = (thread for thread in threading.enumerate() if thread.name == "rollouts")
    assert left.daemon
    go.set()
    left.join(SECONDS)
    assert seen == [1]
    assert not sampling_threads()


class Stuck:
    """An engine whose process does not end."""

    def close(self):
        raise OSError("still there")


def close_with_a_stuck_engine(words):
    from megatron_rc.launch.flags.configure import configure
    from megatron_rc.parallel import ParallelGroups
    from tests.support.training_runs import logged

    config, task = configure(words, 1)
    with logged() as messages:
        RolloutCollector(config, task, ParallelGroups.from_megatron(), engine=Stuck()).close()
    return messages


def test_an_engine_that_does_not_end_is_told_and_takes_no_errors_place(ranks, tmp_path):
    (messages,) = ranks.run(close_with_a_stuck_engine, Layout(), flags(tmp_path, *LIVE))
    assert messages == ["the rollout engine did not end cleanly: still there"]


def sampling_threads():
    return [thread.name for thread in threading.enumerate() if thread.name == "rollouts"]


# The loop


class CountingEngine:
    """Samples token 3 eight times; an error where it is called while it is busy."""

    is_elsewhere = True

    def __init__(self):
        self.version = -1
        self.busy = threading.Lock()
        self.calls = []
        self.threads = set()

    def load_weights(self, weights, version):
        with self.idle():
            for _ in weights:
                pass
            self.version = version

    def sample(self, prompts, params, max_new_tokens, seed):
        with self.idle():
            self.calls.append(self.version)
            self.threads.add(threading.current_thread().name)
            self.while_sampling()
            return [Sample([3] * 8, [-1.0] * 8, "length") for _ in prompts]

    def while_sampling(self):
        """Called while the engine samples; does nothing here."""

    def idle(self):
        if self.busy.locked():
            raise RuntimeError("the engine is called while it is busy")
        return self.busy


def run_with(words, engine, watch=lambda engines, iteration: None):
    """The loop with an engine of ours on the ranks that have one: (error, versions that sampled, threads left)."""
    from megatron_rc.launch.training.checks.batch_check import EngineDistance
    from megatron_rc.launch.training.checks.sync_check import SyncCheck
    from megatron_rc.launch.training.trainer import Trainer

    engines = []
    update = Trainer.update

    def make(*_):
        engines.append(engine())
        return engines[-1]

    def watched(trainer, prepared, mini_batch):
        watch(engines, trainer.iteration)
        return update(trainer, prepared, mini_batch)

    with (
        mock.patch.object(collector, "make_engine", make),
        mock.patch.object(Trainer, "update", watched),
        # The engine has no model that could agree.
        mock.patch.object(SyncCheck, "__call__", return_value={}),
        mock.patch.object(EngineDistance, "check", return_value={}),
    ):
        error = run_training(words)
    calls = [engine.calls for engine in engines]
    return error, calls, [engine.threads for engine in engines], sampling_threads()


AGES = [0, 1, 2, 1, 2, 1]  # with two batches ahead
STALE = ["--rollout-staleness=2", "--train-iters=6"]
# With two batches ahead; without the flag every batch is fresh.
VERSIONS = [
    (STALE, [0, 0, 0, 2, 2, 4], AGES),
    (["--train-iters=3"], [0, 1, 2], [0, 0, 0]),
]


@pytest.mark.parametrize(("more", "versions", "ages"), VERSIONS, ids=["ahead", "fresh"])
def test_versions_reach_the_metrics(ranks, tmp_path, more, versions, ages):
    arguments = flags(tmp_path, *LIVE, *more)
    ((error, calls, threads, left),) = ranks.run(run_with, Layout(), arguments, CountingEngine)
    assert (error, left) == (None, [])
    assert calls == [versions]
    assert threads[0] == ({"engine", "rollouts"} if max(ages) > 0 else {"engine"})
    for row, age in zip(rows(tmp_path), ages, strict=True):
        if max(ages) > 0:
            assert row["rollout/staleness_mean"] == row["rollout/staleness_max"] == age
            assert f"rollout_corr/rollout_rs_masked_fraction_staleness_{age}" in row
        names = [name for name in row if name.endswith("_token_fraction") and "staleness" in name]
        assert names == [f"rollout_corr/staleness_{age}_token_fraction"]
        assert row[names[0]] == 1


class PatientEngine(CountingEngine):
    """After its first batch, which nothing overlaps, samples only when the trainer has begun the next step."""

    def __init__(self):
        super().__init__()
        self.trains = threading.Event()

    def while_sampling(self):
        if len(self.calls) > 1 and not self.trains.wait(SECONDS):
            raise TimeoutError("the trainer waited for the batch that was to be sampled meanwhile")
        self.trains.clear()


def let_go(engines, _):
    for engine in engines:
        engine.trains.set()


def test_the_trainer_goes_on_while_the_engine_samples(ranks, tmp_path):
    """Each batch is handed out only after an update has begun that does not need it."""
    layout = Layout(tp=2)
    arguments = flags(tmp_path, *LIVE, *layout.flags(), "--rollout-staleness=1", "--train-iters=3")
    results = ranks.run(run_with, layout, arguments, PatientEngine, let_go)
    assert [error for error, *_ in results] == [None, None]
    assert [calls for _, calls, _, _ in results] == [[[0, 0, 1]], []]


def test_a_resumed_run_takes_the_same_steps(ranks, tmp_path):
    """Within a window, equal to the last digit, weight sync by weight sync."""
    layout = Layout(tp=2)
    arguments = [*LIVE, *layout.flags(), "--rollout-staleness=2", "--use-distributed-optimizer", "--bf16"]
    arguments += ["--rollout-dtype=bf16"]
    whole = tmp_path / "whole"
    broken = tmp_path / "broken"
    save = [f"--save={tmp_path}/s", f"--load={tmp_path}/s"]
    for folder, end, files in ((whole, 6, []), (broken, 4, save), (broken, 6, save)):
        assert set(ranks.run(run_training, layout, flags(folder, *arguments, *files, f"--train-iters={end}"))) == {None}
    # The last sync of a run that is to end has nobody to serve, and is not made.
    rows_of_broken = without_sync_error(broken)
    assert rows_of_broken == without_sync_error(whole)
    assert [row["rollout/staleness_max"] for row in rows_of_broken] == AGES


def without_sync_error(folder):
    return [{k: v for k, v in row.items() if k != "rollout/sync_error"} for row in without_times(folder)]


def test_evaluations_are_made_where_weights_are_new(ranks, tmp_path):
    """With two batches ahead that is every other step, and the end."""
    arguments = [*HELD_OUT, "--rollout-staleness=2", "--eval-problems=4", "--train-iters=5"]
    assert ranks.run(run_training, Layout(), flags(tmp_path, *arguments, "--eval-interval=2")) == [None]
    assert [row["step"] for row in rows(tmp_path) if "eval/reward" in row] == [0, 2, 4, 5]
    trained = [row for row in rows(tmp_path) if "loss/total" in row]
    assert ["rollout/sync_error" in row for row in trained] == [True, False, True, False, True]


# Recorded rollouts


def test_the_age_of_recorded_rollouts_is_checked(ranks, tmp_path):
    """Recorded ahead, read again: within the limit the same ages, beyond it an error, without the flag no question."""
    folder = tmp_path / "rollouts"
    ranks.run(run_with, Layout(), flags(tmp_path, *LIVE, *STALE, f"--save-rollouts={folder}"), CountingEngine)
    assert len(list(folder.glob("*.safetensors"))) == 6

    def read(*more):
        arguments = flags(tmp_path, *LIVE, f"--load-rollouts={folder}", "--train-iters=4", *more)
        (error,) = ranks.run(run_training, Layout(), arguments)
        return error

    assert read("--rollout-staleness=2") is None
    assert [row["rollout/staleness_max"] for row in rows(tmp_path)] == AGES[:4]
    with pytest.raises(RankFailure, match=r"step 2 failed: .* 2 steps behind .* --rollout-staleness allows 1"):
        read("--rollout-staleness=1")
    assert read() is None
    assert not [name for row in rows(tmp_path) for name in row if "staleness" in name]


def test_only_sampled_tokens_have_a_version():
    batch = recorded_batch(0)
    versions = torch.where(batch.response_mask, 4, 99).int()
    check_versions(replace(batch, policy_versions=versions.to(torch.uint8)), 5, 9)
    for limit in (1, 2):
        check_versions(replace(batch, policy_versions=versions), 5, limit)
    with pytest.raises(ValueError, match="1 steps behind the trainer at step 5: --rollout-staleness allows 0"):
        check_versions(replace(batch, policy_versions=versions), 5, 0)
    with pytest.raises(ValueError, match=r"version 4, newer .* step 3: "):
        check_versions(replace(batch, policy_versions=versions), 3, 9)
