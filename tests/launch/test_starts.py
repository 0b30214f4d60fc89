"""Ranks that torchrun starts again, with the store that it keeps."""

import gc
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_rc.launch.distributed import _store_of_this_start
from megatron_rc.launch.train_ppo import _collect_garbage_again
from tests.support.paths import ROOT


@pytest.fixture
def agents_store(monkeypatch):
    """That of torchrun's agent, and the environment that its ranks find."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    variables = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": server.port}
    for name, value in {**variables, "TORCHELASTIC_USE_AGENT_STORE": True}.items():
        monkeypatch.setenv(name, str(value))
    return server


def test_garbage_is_collected_again_after_a_start():
    """What was made until then is passed over; a process that collects all the time is left alone."""
    assert gc.isenabled()
    frozen = gc.get_freeze_count()
    _collect_garbage_again()
    assert gc.get_freeze_count() == frozen
    gc.disable()
    try:
        _collect_garbage_again()
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()
        gc.enable()


def test_each_start_has_keys_of_its_own(agents_store, monkeypatch):
    stores = []
    for start in ("0", "0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", start)
        store, rank, world = _store_of_this_start(timedelta(seconds=30))
        assert (rank, world) == (0, 2)
        stores.append(store)
    first, other_rank, again = stores
    first.set("address of rank 1", "dead")
    assert other_rank.get("address of rank 1") == b"dead"
    assert not again.check(["address of rank 1"])


FORK = """
import os, signal, time
from megatron_rc.launch.ending import end_forks_with_this_process

end_forks_with_this_process()
child = os.fork()
if not child:
    time.sleep(60)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_rank_forked_ends_with_it():
    """As the writers of a checkpoint, when the rank is killed while it saves."""
    done = subprocess.run(
        [sys.executable, "-c", FORK], stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT, timeout=120
    )
    assert done.returncode == -signal.SIGKILL
    begun = time.monotonic()
    while Path(f"/proc/{int(done.stdout)}").exists():
        assert time.monotonic() - begun < 60
        time.sleep(0.05)
