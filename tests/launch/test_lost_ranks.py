"""Ends of other machines' ranks, through a real store: told, or seen from a machine that is silent."""

import signal
import socket
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from megatron_rc.launch import lost_ranks
from megatron_rc.launch.ending import messages, tell_start
from megatron_rc.launch.lost_ranks import LostRanks, tell_other_machines
from tests.support.runs import wait_for

LOOK = 0.05
LIMIT = 10 * LOOK
STORE = """
import time
import torch.distributed as dist

store = dist.TCPStore("127.0.0.1", 0, is_master=True)
print(store.port, flush=True)
time.sleep(600)
"""


@pytest.fixture
def join(monkeypatch):
    """Make the threads of a rank, each alone on its machine; ``left`` has what ranks left with."""
    monkeypatch.setattr(lost_ranks, "LOOK_SECONDS", LOOK)
    monkeypatch.setattr(lost_ranks, "_SILENT_SECONDS", 3 * LOOK)
    made = []
    left = []

    def join_run(port, rank, attempt=0, limit=60.0):
        values = {"RANK": rank, "LOCAL_RANK": 0, "GROUP_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1}
        values |= {"GROUP_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in (values | {"TORCHELASTIC_RESTART_COUNT": attempt}).items():
            monkeypatch.setenv(name, str(value))
        threads = LostRanks(limit, lambda words, is_cut_off: left.append((rank, words, is_cut_off)))
        threads.start()
        made.append(threads)
        return threads

    join_run.left = left
    yield join_run
    for threads in made:
        threads.close()


@pytest.fixture
def port():
    """The port of a store that lives as long as the test."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    yield server.port
    del server


def test_a_store_that_does_not_answer_ends_the_rank_at_the_limit(join):
    """The system accepts connections and data for a process that stands still: calls of the store wait for ever."""
    with subprocess.Popen([sys.executable, "-c", STORE], stdout=subprocess.PIPE, text=True) as server:
        try:
            rank = join(int(server.stdout.readline()), 1, limit=LIMIT)
            wait_for(lambda: rank._looks_without_answer == 0)
            assert rank.cut_off() is None
            server.send_signal(signal.SIGSTOP)
            wait_for(lambda: join.left, seconds=20)
            assert "has not answered" in rank.cut_off()
        finally:
            server.kill()
    number, message, is_cut_off = join.left[0]
    assert (number, is_cut_off) == (1, True)
    assert message.startswith("the machine of rank 0 (127.0.0.1) has not answered for ")
    assert "--distributed-timeout-minutes" in message


def test_a_launcher_tells_the_ranks_of_other_machines(join, port, monkeypatch):
    join(port, 1)
    with messages():
        tell_start()
        tell_other_machines(f"a rank of the machine {socket.gethostname()} failed")
    wait_for(lambda: join.left)
    assert join.left[0] == (1, f"a rank of the machine {socket.gethostname()} failed", False)


def test_ranks_that_are_started_again_end_those_of_the_start_before(join, port):
    join(port, 1)
    join(port, 0, attempt=1)
    wait_for(lambda: join.left)
    assert join.left[0] == (1, "a rank failed: all are started again", False)


@pytest.mark.parametrize("state", ["silent", "ended"])
def test_a_machine_that_is_silent_ends_the_run_and_one_that_has_ended_does_not(join, port, state):
    other = join(port, 1)
    first = join(port, 0, limit=LIMIT)
    wait_for(lambda: first._signs.get(1, 0) > 1)
    if state == "ended":
        other.close()
        wait_for(lambda: first._signs[1] >= lost_ranks._ENDED)
        time.sleep(2 * LIMIT)
        assert not join.left
    else:
        other._look = lambda *_: None
        wait_for(lambda: join.left, seconds=20)
        number, message, _ = join.left[0]
        assert number == 0
        assert message.startswith("machine 1 of this run has not answered for ")
