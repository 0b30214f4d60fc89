"""Ranks that are killed again and again, in every phase: started again, they take the uninterrupted run's steps."""

import contextlib
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest

from tests.support.faults import STARTS, Fault, environment
from tests.support.runs import SMALL, TWO, finish, launch, start, steps

ROUNDS = 3  # of a kill in every phase
STEPS = 4 * ROUNDS + 2
KILLS = 4 * ROUNDS
WORDS = [*SMALL, *TWO, f"--train-iters={STEPS}", f"--lr-decay-iters={STEPS}", "--save-interval=2"]


def files(folder):
    return [f"--runs-dir={folder}", f"--save={folder}/save", f"--load={folder}/save"]


def kills(log):
    """Every phase in turn, each time on another step; in its first moment, and in later rounds in its midst."""
    rng = random.Random(0)
    faults = []
    for step in range(1, 4 * ROUNDS + 1):
        # The rollout is that of the step that lies behind; every second step is saved.
        names = f"the rollout of step {step - 1}", f"the scoring of step {step}", f"the training of step {step}"
        phase = (*names, f"the saving of step {step}")[(step - 1) % 4]
        delay = rng.uniform(0, 0.03) if step > 4 else 0.0
        faults.append(Fault(phase, rng.randrange(2), signal.SIGKILL, str(log), delay=delay))
    return faults


@contextlib.contextmanager
def busy(number):
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The uninterrupted run's steps."""
    folder = tmp_path_factory.mktemp("whole")
    code, _, errors = finish(start(launch("--nproc-per-node=2", *WORDS, *files(folder))), 300)
    assert code == 0, errors
    return steps(folder / "count_up")


@pytest.mark.parametrize("loops", [0, os.cpu_count()], ids=["idle", "busy"])
@pytest.mark.parametrize("how", STARTS)
def test_ranks_that_are_killed_again_and_again_take_the_same_steps(how, loops, whole, tmp_path):
    before, between = STARTS[how]
    arguments = [*before, "--nproc-per-node=2", f"--max-restarts={KILLS}", *between, *WORDS, *files(tmp_path)]
    begun = time.monotonic()
    with busy(loops):
        process = start(arguments, env=environment(kills(tmp_path / "hits")))
        code, _, errors = finish(process, 3000)
    assert code == 0, errors
    hits = (tmp_path / "hits").read_text().splitlines()
    phases = Counter(hit.removeprefix("the ").partition(" ")[0] for hit in hits)
    logging.info("%d kills and starts in %.0f s: %s", len(hits), time.monotonic() - begun, dict(phases))
    assert len(hits) == KILLS
    assert set(phases) >= {"rollout", "scoring", "training", "saving"}
    assert f"restart {KILLS} of {KILLS}" in errors
    assert len(whole) == STEPS
    assert steps(tmp_path / "count_up") == whole, "to the last digit"
