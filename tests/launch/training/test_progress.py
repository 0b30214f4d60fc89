"""How far a run is, seen in terminals of every kind, in pipes and in files."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from tests.support.paths import ROOT

SAID = """
import sys, time
from megatron_rc.launch.training import progress
progress._QUIET_SECONDS = float(sys.argv[1])
shown = progress.Progress(6, 2)
for step in range(3, 7):
    shown.step(f"reward 0.{step}  kl 0.01")
    time.sleep(0.11)
    if step == 4:
        shown.say("held out: 50.0% right")
shown.close()
shown.say("finished")
"""
COMMAND = [sys.executable, "-c", SAID]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


def in_a_terminal(rows, columns, term="xterm"):
    """What a terminal of this size gets to show."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    process = subprocess.Popen(
        [*COMMAND, "2"], stdin=theirs, stdout=theirs, stderr=theirs, env=ENVIRONMENT | {"TERM": term}
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    assert process.wait(timeout=30) == 0
    return shown.decode()


@pytest.mark.parametrize(("rows", "columns"), [(0, 0), (2, 80), (24, 80)])
def test_a_terminal_shows_a_bar(rows, columns):
    """(0, 0) is what a terminal says under `script`, in containers and in some CI systems."""
    shown = in_a_terminal(rows, columns)
    assert "6/6 [" in shown
    assert "reward 0.6" in shown
    assert "more hidden" not in shown
    assert re.search(r"\rheld out: 50.0% right\r\n", shown)
    assert shown.endswith("finished\r\n")


@pytest.mark.parametrize("columns", [20])
def test_a_narrow_terminal_wraps_nothing(columns):
    shown = in_a_terminal(24, columns)
    assert "100%" in shown
    bars = [line for line in re.split(r"[\r\n]+", shown) if "%|" in line]
    assert bars
    assert all(len(bar) < columns for bar in bars)


def test_a_dumb_terminal_gets_lines():
    lines = in_a_terminal(24, 80, term="dumb").split("\r\n")
    assert lines == [
        "step 3/6  reward 0.3  kl 0.01",
        "held out: 50.0% right",
        "step 6/6  reward 0.6  kl 0.01",
        "finished",
        "",
    ]


@pytest.mark.parametrize(("seconds", "steps"), [("2", [3, 6]), ("0", [3, 4, 5, 6])])
def test_a_pipe_gets_lines_now_and_then_and_the_last_step(seconds, steps):
    done = subprocess.run([*COMMAND, seconds], capture_output=True, text=True, check=True, env=ENVIRONMENT)
    assert done.stdout == ""
    assert [
        int(step) for step in re.findall(r"^step (\d)/6  reward 0.\d  kl 0.01$", done.stderr, re.MULTILINE)
    ] == steps
    assert "\r" not in done.stderr


@pytest.mark.parametrize("outlasts", [True, False])
def test_a_pipe_that_nobody_reads_any_more_ends_nothing(outlasts):
    """``… 2>&1 | head -1``."""
    ours, theirs = os.pipe()
    os.close(ours)
    begin = "from megatron_rc.launch.standard_error import outlast_reader; outlast_reader()\n"
    command = [sys.executable, "-c", begin * outlasts + SAID, "0"]
    done = subprocess.run(command, stderr=theirs, env=ENVIRONMENT, check=False)
    os.close(theirs)
    assert (done.returncode == 0) == outlasts
