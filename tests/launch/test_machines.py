"""Two machines as two launchers on this one: they meet, make one run together, and end alike."""

import contextlib
import random
import socket

import pytest

from tests.support.forked import ForkedCall
from tests.support.meets import meet
from tests.support.runs import ONE, SMALL, finish, launch, read, start


def free_port():
    """A port below those that the system hands out: no other process gets it before it is used."""
    for port in random.SystemRandom().sample(range(20_000, 30_000), 100):
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port
    raise OSError("a hundred ports of 127.0.0.1 are in use")


@pytest.mark.processes
def test_two_machines_that_are_numbered_meet(tmp_path):
    met = tmp_path / "met"
    met.mkdir()
    code, _, errors = finish(ForkedCall(tmp_path, meet, free_port(), str(met)))
    assert code == 0, errors
    assert {path.name: path.read_text() for path in met.iterdir()} == {"0": "3", "1": "3"}


@pytest.mark.long
def test_two_machines_meet_and_train_together(tmp_path):
    """What their ranks write goes to the launchers and to files; the one rank 0 writes the run's."""
    meeting = ["--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=7"]
    words = [*meeting, "--local-addr=127.0.0.1", "--nproc-per-node=1", "--tee=3", *SMALL, *ONE, "--train-iters=1"]
    folders = [f"--runs-dir={tmp_path}", f"--save={tmp_path}/save", f"--load={tmp_path}/save", "--save-interval=1"]
    machines = [start(launch(*words, *folders, f"--log-dir={tmp_path}/{name}")) for name in "ab"]
    ends = [finish(machine) for machine in machines]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert len(read(tmp_path / "count_up")) == 1
    said = [next((tmp_path / name).rglob("stderr.log")).read_text() for name in "ab"]
    assert sorted("finished at step 1" in text for text in said) == [False, True]
    assert sorted("[default0]:" in errors for _, _, errors in ends) == [False, True]
