"""Process groups in a process that lives on; interfaces; processes that end with their parent."""

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rc.launch.distributed import alone, choose_interfaces
from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.train_ppo import cpu_backend
from megatron_rc.parallel import ParallelGroups
from tests.support.paths import ROOT
from tests.support.runs import ONE, wait_for

NAMED = {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "eth7"}


@pytest.mark.parametrize(
    ("local_ranks", "interfaces", "expected"),
    [("2", {}, ["lo", "=lo"]), ("2", NAMED, ["eth7", "eth7"]), ("1", {}, [None, None])],
)
def test_ranks_of_one_machine_listen_on_its_loopback(monkeypatch, local_ranks, interfaces, expected):
    for name in NAMED:
        monkeypatch.setenv(name, "so that it is taken back")
        monkeypatch.delenv(name)
    for name, value in {"LOCAL_WORLD_SIZE": local_ranks, "WORLD_SIZE": "2", **interfaces}.items():
        monkeypatch.setenv(name, value)
    choose_interfaces()
    assert [os.environ.get(name) for name in NAMED] == expected


def number_of_threads():
    """Of any language; those of gloo end by themselves, a moment later."""
    return len(list(Path("/proc/self/task").iterdir()))


def meet(config):
    """Threads while there are groups; something that goes round in a circle, as models and trainers do, keeps them."""
    with cpu_backend(), alone(config):
        circle = [ParallelGroups.from_megatron()]
        circle.append(circle)
        return number_of_threads()


@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="this system does not list threads")
def test_the_threads_of_process_groups_go_with_the_last_reference(tmp_path):
    config, _ = configure(["--config=count_up", *ONE, f"--runs-dir={tmp_path}"], 1)
    meet(config)
    gc.collect()
    wait_for(lambda: number_of_threads() < 20)
    before = number_of_threads()
    assert meet(config) > before + 10
    assert number_of_threads() > before
    gc.collect()
    wait_for(lambda: number_of_threads() == before)


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
    wait_for(lambda: not Path(f"/proc/{int(done.stdout)}").exists())
