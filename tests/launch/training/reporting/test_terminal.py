"""How far a run is, seen in terminals of every kind, in pipes and in files."""

import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from unittest import mock

import pytest

from megatron_rc.launch.training.reporting import terminal
from megatron_rc.launch.training.reporting.terminal import COLUMNS, header, line, narrow
from tests.support.paths import ROOT

SAID = """
import sys, time
from megatron_rc.launch.training.reporting import terminal
shown = terminal.Progress(6, 2)
for step in range(3, 7):
    shown.step({"reward/mean": step / 10, "rollout_corr/kl": 0.01, "grad_norm": 0.5})
    if step == 3 and not shown.bar.disable:
        time.sleep(shown.bar.mininterval + 0.01)  # else it redraws itself at no step
    if step == 4:
        shown.say("held out: 50.0% right")
shown.close()
shown.say("finished")
"""


def shown_by(stream):
    with mock.patch.object(sys, "stderr", stream):
        exec(SAID, {})


def in_a_terminal(rows, columns):
    """What a terminal of this size gets to show."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    with os.fdopen(theirs, "w") as stream:
        shown_by(stream)
    found = b""
    with contextlib.suppress(OSError):  # the end
        while piece := os.read(ours, 65536):
            found += piece
    os.close(ours)
    return found.decode()


@pytest.mark.parametrize(("rows", "columns"), [(0, 0), (2, 80), (24, 80)])
def test_a_terminal_shows_lines_and_a_bar(rows, columns):
    """(0, 0) is what a terminal says under `script`, in containers and in some CI systems."""
    shown = in_a_terminal(rows, columns)
    assert "6/6 [" in shown
    assert re.search(r"\r *step +reward +kl +ess ", shown)
    assert re.search(r"\r +6/6 +0.6 +0.01 +- ", shown)
    assert "more hidden" not in shown
    assert re.search(r"\rheld out: 50.0% right\r\n", shown)
    assert shown.endswith("finished\r\n")


def test_a_narrow_terminal_wraps_nothing_and_a_dumb_one_gets_lines(monkeypatch):
    shown = in_a_terminal(24, 20)
    assert "100%" in shown
    lines = re.split(r"[\r\n]+", shown)
    bars = [line for line in lines if "%|" in line]
    assert bars
    assert all(len(line) < 20 for line in lines if "held out" not in line)
    assert " 6/6       0.6" in lines
    monkeypatch.setenv("TERM", "dumb")
    lines = in_a_terminal(24, 80).split("\r\n")
    steps = ["step reward kl ess rej", " 3/6 0.3 0.01 - - 0.5 ", "held out: 50.0% right", " 6/6 0.6 0.01 - - 0.5 "]
    assert [re.sub(" +", " ", line)[:22] for line in lines] == [*steps, "finished", ""]


@pytest.mark.parametrize(("seconds", "steps"), [(2, [3, 6]), (0, [3, 4, 5, 6])])
def test_a_pipe_gets_lines_now_and_then_and_the_last_step(monkeypatch, seconds, steps):
    monkeypatch.setattr(terminal, "_QUIET_SECONDS", seconds)
    stream = io.StringIO()
    shown_by(stream)
    shown = stream.getvalue()
    assert [int(step) for step in re.findall(r"^ (\d)/6 +0.\d +0.01 .*\d$", shown, re.MULTILINE)] == steps
    assert shown.count(" reward ") == 1
    assert "\r" not in shown


@pytest.mark.parametrize(("ends", "outlasts"), [(os.pipe, True), (os.pipe, False), (os.openpty, True)])
def test_a_pipe_that_nobody_reads_any_more_ends_nothing(ends, outlasts):
    """``… 2>&1 | head -1``, and a terminal that was closed."""
    ours, theirs = ends()
    os.close(ours)
    begin = "from megatron_rc.launch.standard_error import outlast_reader; outlast_reader()\n"
    command = [sys.executable, "-c", begin * outlasts + SAID]
    done = subprocess.run(command, stderr=theirs, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)
    os.close(theirs)
    assert (done.returncode == 0) == outlasts


METRICS = [column.metric for column in COLUMNS]
LARGEST = {column.metric: -1.2345e-100 if column.width > 6 else 1.7976931348623157e308 for column in COLUMNS}
LARGEST |= {column.metric: 1.0 for column in COLUMNS if column.digits}


@pytest.mark.parametrize("columns", [79, 99, 100, 300])
@pytest.mark.parametrize(
    ("metrics", "seconds", "left"),
    [
        (LARGEST, 1.2345e123, 1e300),
        (dict.fromkeys(METRICS, float("nan")), 0.01, 86400 * 999 + 3600 * 23),
        (dict.fromkeys(METRICS, float("-inf")), 1e-7, 359999),
        (dict.fromkeys(METRICS, 0.999), 999.7, 0.2),
        ({}, 12.0, 61.0),
    ],
)
def test_no_number_makes_a_line_wider(metrics, seconds, left, columns):
    """A line ends where its header does, so that each number stands below its title."""
    total = 1_000_000
    titles = header(total, columns)
    words = line(total, total, metrics, seconds=seconds, left=left, columns=columns)
    assert len(words) == len(titles) <= min(columns, 100)
    if columns >= 99:
        assert titles.endswith("    left")
    for column in COLUMNS[:5]:  # all widths show these
        end = titles.index(f" {column.title}") + 1 + len(column.title)
        cell = words[end - column.width : end]
        assert words[end : end + 2].strip() == ""
        assert cell.strip()
        assert " " not in cell.strip()


NUMBERS = {(0.0662, 8): "  0.0662", (-0.00001234, 8): "-1.23e-5", (-0.00001234, 7): "-1.2e-5", (4860.4, 6): "  4860"}
NUMBERS |= {(999.7, 6): "  1000", (1234567.0, 6): "1.23e6", (1e22, 6): "  1e22", (0.0, 6): "     0"}
LEFT = {59.6: "1:00", 3599: "59:59", 3600: "1:00:00", 360000: "4d 4h", 1e12: "9999999d"}


def test_a_number_has_the_digits_that_fit_and_what_is_left_is_in_hours_and_days():
    assert {given: narrow(*given) for given in NUMBERS} == NUMBERS
    ends = {left: line(1, 2, {}, seconds=1.0, left=left, columns=100) for left in LEFT}
    assert [left for left, words in ends.items() if not words.endswith(f" {LEFT[left]}")] == []
