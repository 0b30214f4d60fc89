"""The launcher's commands as processes: starting, watching and ending them, and reading their files."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.support.paths import ROOT

SMALL = """--config count_up --grpo-prompts-per-step 4 --grpo-group-size 4 --global-batch-size 16 --micro-batch-size 4
--grpo-iterations 1 --lr-decay-iters 6""".split()
TWO = ["--tensor-model-parallel-size=2", "--pipeline-model-parallel-size=1"]
# A layout for any number of processes.
ONE = ["--tensor-model-parallel-size=1", "--pipeline-model-parallel-size=1", "--no-sequence-parallel"]

# Listening sockets' state in /proc/net/tcp, and 127.0.0.1 in that file.
_LISTEN = "0A"
LOOPBACK = "0100007F"


def as_in_a_shell():
    """The environment of a shell in which this Python, and the checkout, come first."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def start(command, **options):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        text=True,
        start_new_session=True,
        **{"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )


def finish(process, timeout=300):
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, output, errors


def launch(*arguments):
    return ["-m", "megatron_rc.launch", *arguments]


def torchrun(number, *arguments):
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number), *arguments]


def read(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps(folder):
    """The rows without times, which differ from run to run."""
    return [{name: value for name, value in row.items() if not name.startswith("perf/")} for row in read(folder)]


def rows_of(folder):
    """The number of rows that a run has written."""
    metrics = folder / "metrics.jsonl"
    return len(metrics.read_bytes().splitlines()) if metrics.is_file() else 0


def wait_for(condition, process=None, seconds=250):
    """Wait for a condition, while the process runs."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds
        assert process is None or process.poll() is None, process.communicate()[1]
        time.sleep(0.02)


def children(pid):
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def listening(pid):
    """Addresses, without ports, on which a process and its descendants accept connections."""
    inodes = set()
    for process in (pid, *children(pid)):
        for opened in Path(f"/proc/{process}/fd").glob("*"):
            with contextlib.suppress(OSError):  # the descriptor was closed meanwhile
                inodes.add(os.readlink(opened))
    sockets = set()
    for family in ("tcp", "tcp6"):
        for line in Path("/proc/net", family).read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == _LISTEN and f"socket:[{columns[9]}]" in inodes:
                sockets.add(columns[1].partition(":")[0])
    return sockets
