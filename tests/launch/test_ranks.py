"""How the end of ranks is told: real processes under torchrun, of which one fails, is killed or is told to stop."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from megatron_rc.launch import ranks
from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.stopping import signals_to_ranks
from megatron_rc.launch.train_ppo import _outcome_of
from tests.support.paths import ROOT

# All cases in one process, since torch loads for two seconds.
RUN = """
import sys
import threading
import time
from megatron_rc.launch.ranks import run_ranks

for case in sys.argv[1:]:
    words = ["--nproc-per-node=2", "--standalone"]
    if case.startswith("restarts"):
        words.append("--max-restarts=1")
    outcome = run_ranks([*words, "--module", "tests.support.rank_ends", *case.split()])
    print(f"{case}: {outcome.code} {outcome.words}", flush=True)
"""
NOT_KEPT = "no checkpoint was written: with --save DIR the run could go on from where it stopped"
CASES = {
    "agrees": r"1 error: the rollout of step 3 failed: no answer in 60 s",
    "usage 1": r"2 error: --lr 0 must be positive",
    "killed 1": r"1 error: rank 1 \(process \d+\) was ended by SIGKILL: by hand, or by the system when memory ran out",
    "leaves 1": r"1 error: rank 1 \(process \d+\) ended with exit code 7: see above what it said",
    "saves": r"0 ",
    "saves-late": r"0 ",
    "vanishes": r"1 error: 2 of 2 ranks ended with exit code 0 before the run did: look for .* your own modules",
    "stops": f"130 stopped by SIGINT, and {NOT_KEPT}",
    "interrupts": r"130 stopped by SIGINT before all ranks could save: what no checkpoint holds is lost",
    "afterwards": r"0 the run is over and nothing is lost; afterwards the last evaluation failed",
    "told": f"1 error: a rank was told to stop, and {NOT_KEPT}",
    "restarts": r"0 ",
    "restarts-guard": r"3 error: stopped by --stop-if 'lr > 0'",
    "restarts-stopped": r"143 stopped by SIGTERM before all ranks could save: what no checkpoint holds is lost",
}


@pytest.fixture(scope="module")
def temporary(tmp_path_factory):
    """The folder of temporary files of these runs."""
    return tmp_path_factory.mktemp("temporary")


@pytest.fixture(scope="module")
def told(temporary):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
    # Less than one rank takes to save: the launcher's ranks have the time that they need.
    environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "1"
    return subprocess.run(
        [sys.executable, "-c", RUN, *CASES],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=environment,
        timeout=600,
    )


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES)
def test_the_end_of_ranks_is_one_code_and_one_sentence(told, case):
    (line,) = (line for line in told.stdout.splitlines() if line.startswith(f"{case}: "))
    assert re.fullmatch(f"{re.escape(case)}: {CASES[case]}", line)


@pytest.mark.processes
def test_torchrun_adds_no_line_and_no_start_and_no_end_leaves_a_folder(told, temporary):
    # PyTorch's own line on a machine without a name server, if the system's library looks up ::ffff:127.0.0.1 there.
    without_name_server = r"^\[W.* The hostname of the client socket cannot be retrieved\. .*\n"
    lines = re.sub(without_name_server, "", told.stderr, flags=re.MULTILINE)
    # One of two ranks may be ended before it says its line.
    assert set(lines.splitlines()) == {"what a rank says is above the last line"}
    assert 1 <= len(lines.splitlines()) <= 2
    assert list(temporary.iterdir()) == []


def test_ranks_get_as_long_as_the_environment_says(monkeypatch):
    """As docs/launching.md says of torchrun."""
    from torch.distributed.launcher.api import LaunchConfig

    assert LaunchConfig(1, 1, 1).shutdown_timeout == 30
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    assert LaunchConfig(1, 1, 1).shutdown_timeout == 600


def test_a_signal_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_to_ranks(leave=os._exit):
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_run_that_is_left_on_the_way_is_not_done():
    with pytest.raises(RuntimeError, match=r"^sys\.exit\(0\) was called within the run: raise an error instead$"):
        _outcome_of(lambda config, task: sys.exit(0), None, None)


NAMELESS = {
    "--node-rank=0 --master-addr=nowhere.invalid": "--master-addr nowhere.invalid",
    "--rdzv-endpoint=nowhere.invalid:29500": "--rdzv-endpoint nowhere.invalid:29500",
    # Others reach this machine by its name.
    "--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:1": "this machine",
    "--master-addr=127.0.0.1": "this machine",
}


@pytest.mark.parametrize("flags", NAMELESS)
def test_a_name_without_an_address_is_one_sentence(monkeypatch, flags):
    monkeypatch.setattr(ranks, "LOOKUP_SECONDS", 0.1)
    monkeypatch.setattr(ranks.socket, "gethostname", lambda: "nowhere.invalid")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with pytest.raises(ConfigurationError, match=f"^{NAMELESS[flags]}: the name nowhere.invalid has no address"):
        ranks.run_ranks(["--nnodes=2", *flags.split(), "--module", "unused"])


def test_a_name_server_that_does_not_answer_holds_up_nothing(monkeypatch):
    answer = threading.Event()
    monkeypatch.setattr(ranks, "LOOKUP_SECONDS", 0.1)
    monkeypatch.setattr(ranks.socket, "getaddrinfo", lambda *_: answer.wait(60))
    begun = time.monotonic()
    try:
        with pytest.raises(ConfigurationError, match=r"^--master-addr slow\.invalid: the name"):
            ranks.run_ranks(["--nnodes=2", "--node-rank=0", "--master-addr=slow.invalid", "--module", "unused"])
        assert time.monotonic() - begun < 30
    finally:
        answer.set()
