"""Two machines as two launchers on this one: they meet, make one run together, and end alike."""

import contextlib
import os
import random
import re
import signal
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_rc.launch.ranks import run_ranks
from tests.support.forked import ForkedCall, launch_forked
from tests.support.meets import meet
from tests.support.runs import ONE, SMALL, children, finish, launch, listening, read, rows_of, start, wait_for

# Seconds that a collective may take.
LIMIT = 10


def free_port():
    """A port below those that the system hands out: no other process gets it before it is used."""
    for port in random.SystemRandom().sample(range(20_000, 30_000), 100):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise OSError("a hundred ports of 127.0.0.1 are in use")


@pytest.mark.processes
def test_two_machines_that_are_numbered_meet(tmp_path):
    met = tmp_path / "met"
    met.mkdir()
    code, _, errors = finish(ForkedCall(tmp_path, meet, free_port(), str(met)))
    assert code == 0, errors
    assert {path.name: path.read_text() for path in met.iterdir()} == {"0": "3", "1": "3"}


def end_of_lonely_machine(number):
    """The launcher's end on a machine of two, whose other machine never comes."""
    words = ["--nnodes=2", f"--node-rank={number}", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    outcome = run_ranks([*words, "--nproc-per-node=1", "--module", "unused"])
    sys.stderr.write(outcome.words)
    return outcome.code


def catches_sigterm(pid):
    caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[1]
    return int(caught, 16) >> (signal.SIGTERM - 1) & 1


@pytest.mark.processes
@pytest.mark.parametrize("number", [0, 1])
def test_a_launcher_that_waits_for_another_machine_can_be_ended(tmp_path, monkeypatch, number):
    """It waits in compiled code of torch's store, which runs no handler of Python's."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "written").mkdir()
    launcher = ForkedCall(tmp_path / "written", end_of_lonely_machine, number)
    wait_for(lambda: catches_sigterm(launcher.pid), launcher)
    if number == 0:
        wait_for(lambda: listening(launcher.pid), launcher)
    launcher.send_signal(signal.SIGTERM)
    code, _, errors = finish(launcher, timeout=20)
    assert code == 143
    # In front of it torch's store may say that its system call was interrupted.
    assert errors.splitlines()[-1] == "stopped by SIGTERM before the machines of this run came together"
    assert list(tmp_path.glob("megatron-rc-*")) == [], "the launcher's own folder is gone"


@pytest.fixture
def machines(tmp_path, monkeypatch):
    """The launchers of two machines whose ranks train, each with one rank."""
    monkeypatch.setenv("LIMIT_SECONDS", str(LIMIT))
    arguments = [
        "--nnodes=2",
        "--nproc-per-node=1",
        "--master-addr=127.0.0.1",
        f"--master-port={free_port()}",
        *SMALL,
        *ONE,
    ]
    arguments += ["--train-iters=100000", "--lr-decay-iters=100000", f"--runs-dir={tmp_path}"]
    started = []
    for number in range(2):
        folder = tmp_path / f"machine-{number}"
        folder.mkdir()
        started.append(launch_forked(folder, [f"--node-rank={number}", *arguments], "tests.support.slow_engine"))
    wait_for(lambda: rows_of(tmp_path / "count_up") > 1, started[0])
    yield started
    for launcher in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)


@pytest.mark.processes
def test_a_machine_that_is_cut_off_ends_in_one_sentence(machines):
    """The processes of machine 0, with the ranks' store, stand still: the system goes on to take what they are sent."""
    first, second = machines
    frozen = [first.pid, *children(first.pid)]
    try:
        for process in frozen:
            os.kill(process, signal.SIGSTOP)
        begun = time.monotonic()
        code, _, errors = finish(second, LIMIT + 60)
        assert time.monotonic() - begun < LIMIT + 30
    finally:
        for process in frozen:
            os.kill(process, signal.SIGKILL)
    assert code == 1
    last = errors.splitlines()[-1]
    assert last.startswith("error: the machine of rank 0 (127.0.0.1) has not answered for "), errors
    assert errors.count("has not answered for") == 1
    assert "Traceback" not in errors


@pytest.mark.processes
def test_a_launcher_that_is_killed_leaves_no_rank_on_its_machine(machines):
    first, second = machines
    ranks = children(second.pid)
    os.kill(second.pid, signal.SIGKILL)
    wait_for(lambda: not any(map(psutil.pid_exists, ranks)), seconds=5)
    # The other machine sees that connections break, or waits for its engine.
    code, _, errors = finish(first, LIMIT + 60)
    assert code == 1
    assert errors.splitlines()[-1].startswith(("error: rank 0: ", "error: machine 1 of this run has not answered for"))


@pytest.mark.long
def test_two_machines_meet_and_train_together(tmp_path):
    """What their ranks write goes to the launchers and to files; the one rank 0 writes the run's."""
    meeting = ["--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=7"]
    arguments = [*meeting, "--local-addr=127.0.0.1", "--nproc-per-node=1", "--tee=3", *SMALL, *ONE, "--train-iters=1"]
    folders = [f"--runs-dir={tmp_path}", f"--save={tmp_path}/save", f"--load={tmp_path}/save", "--save-interval=1"]
    machines = [start(launch(*arguments, *folders, f"--log-dir={tmp_path}/{name}")) for name in "ab"]
    ends = [finish(machine) for machine in machines]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert len(read(tmp_path / "count_up")) == 1
    message = [next((tmp_path / name).rglob("stderr.log")).read_text() for name in "ab"]
    assert sorted("finished at step 1" in text for text in message) == [False, True]
    assert sorted("[default0]:" in errors for _, _, errors in ends) == [False, True]
