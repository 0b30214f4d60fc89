"""Ctrl-C and SIGTERM in the midst of whatever a run does: what was made is kept, and all ranks are gone soon."""

import logging
import signal
import time

import psutil
import pytest

from tests.support.faults import STARTS, Fault, environment
from tests.support.runs import SMALL, TWO, children, finish, launch, read, rows_of, start, torchrun, wait_for

SECONDS = 100  # less than the engine takes
WORDS = [*SMALL, *TWO, "--train-iters=1000", "--lr-decay-iters=1000", "--eval-interval=2", "--eval-problems=5"]
WORDS += ["--task=python:tests.support.user_rewards:Doubles"]
# An engine that takes so long would not be waited for.
LONG = 200.0


def words(how, folder):
    before, between = STARTS[how]
    return [*before, "--nproc-per-node=2", *between, *WORDS, f"--runs-dir={folder}", f"--save={folder}/save"]


def end(process, ranks, told):
    code, _, errors = finish(process, SECONDS + 40)
    logging.info("gone after %.1f s", time.time() - told)
    assert time.time() - told < SECONDS, errors
    assert not [pid for pid in ranks if psutil.pid_exists(pid)]
    return code, errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("how", STARTS)
@pytest.mark.parametrize(
    ("phase", "more"),
    [
        ("the rollout of step 3", {"longer": LONG, "delay": 1.0}),
        ("the evaluation", {"longer": LONG, "delay": 1.0, "after": "the training of step 3"}),
        ("the training of step 3", {}),
        ("the saving of step 4", {}),
        ("the saving of step 4", {"delay": 0.02}),
    ],
    ids=["rollout", "evaluation", "training", "saving", "late in saving"],
)
def test_what_is_under_way_is_given_up_or_ended_and_saved(phase, more, how, number, tmp_path):
    fault = Fault(phase, 0, number, str(tmp_path / "hits"), to="parent", **more)
    process = start([*words(how, tmp_path), "--save-interval=4"], env=environment([fault]))
    wait_for(lambda: len(children(process.pid)) == 2, process)
    ranks = children(process.pid)
    wait_for((tmp_path / "hits").exists, process)
    code, errors = end(process, ranks, (tmp_path / "hits").stat().st_mtime)
    assert code == (0 if how == "launcher" else 1), errors
    saved = int((tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text())
    assert saved == read(tmp_path / "count_up")[-1]["step"] >= 2
    assert f"at step {saved}, saved to" in errors
    if how == "launcher":
        assert "Traceback" not in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("how", ["torchrun", "launcher"])
@pytest.mark.parametrize("delay", [0.2, 1.0, 2.0])
def test_during_start_up_all_ranks_end_at_once(how, number, delay, tmp_path):
    """``delay``: seconds after the ranks began. In the first moments Python itself can lose a Ctrl-C."""
    flags = [*WORDS, f"--runs-dir={tmp_path}", f"--save={tmp_path}/save"]
    command = launch("--nproc-per-node=2", *flags) if how == "launcher" else torchrun(2, "launch/train_ppo.py", *flags)
    process = start(command)
    wait_for(lambda: len(children(process.pid)) == 2, process)
    ranks = children(process.pid)
    time.sleep(delay)
    assert not rows_of(tmp_path / "count_up"), "this is no start-up any more"
    process.send_signal(number)
    code, errors = end(process, ranks, time.time())
    assert not (tmp_path / "save" / "latest_checkpointed_iteration.txt").exists()
    assert code == (128 + number if how == "launcher" else 1), errors
    if how == "launcher":
        assert "Traceback" not in errors
        assert errors.splitlines()[-1].startswith(f"stopped by {number.name} before all ranks could save: "), errors
