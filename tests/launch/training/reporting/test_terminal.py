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

from megatron_rc.launch.training.reporting.series import Series
from megatron_rc.launch.training.reporting.terminal import COLUMNS, header, line, table
from tests.support.paths import ROOT

SAID = """
import sys, time
from megatron_rc.launch.training.reporting import terminal
shown = terminal.Progress(6, 2)
for step in range(3, 7):
    shown.step({"reward/mean": step / 10, "rollout_corr/kl": 0.01, "grad_norm": 0.5}, is_logged=step % 2 == 0)
    if step == 3:
        time.sleep(0.2)  # else the bar redraws itself at no step
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
    shown = b""
    with contextlib.suppress(OSError):  # the end
        while piece := os.read(ours, 65536):
            shown += piece
    os.close(ours)
    return shown.decode()


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


def test_a_narrow_terminal_shows_fewer_columns_and_a_dumb_one_has_no_bar(monkeypatch):
    shown = in_a_terminal(24, 20)
    lines = re.split(r"[\r\n]+", shown)
    assert all(len(arguments) <= 20 for arguments in lines if "held out" not in arguments)
    assert " 6/6        0.6" in lines
    monkeypatch.setenv("TERM", "dumb")
    lines = in_a_terminal(24, 80).split("\r\n")
    steps = ["step reward kl", "4/6 0.4 0.01", "held out: 50.0% right", "6/6 0.6 0.01"]
    assert [" ".join(arguments.split()[:3]) for arguments in lines[:2]] == steps[:2]
    assert lines[2] == steps[2]
    assert " ".join(lines[3].split()[:3]) == steps[3]
    assert lines[4:] == ["finished", ""]


def test_a_pipe_gets_a_line_for_each_logged_step():
    stream = io.StringIO()
    shown_by(stream)
    shown = stream.getvalue()
    assert re.findall(r"^ (\d)/6 +0.\d +0.01 .*\d$", shown, re.MULTILINE) == ["4", "6"]
    assert shown.count(" reward ") == 1
    assert "\r" not in shown


@pytest.mark.parametrize("ends", [os.pipe, os.openpty])
def test_a_reader_that_goes_away_ends_nothing(ends):
    """``… 2>&1 | head -1``, and a terminal that was closed."""
    ours, theirs = ends()
    os.close(ours)
    # What Python itself would write at its end is not of this test.
    program = f"{SAID}\nimport os\nos._exit(0)"
    done = subprocess.run(
        [sys.executable, "-c", program], stderr=theirs, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False
    )
    os.close(theirs)
    assert done.returncode == 0


def test_each_number_stands_below_its_title():
    metrics = {column.metric: -1.234567e-5 for column in COLUMNS} | {"perf/tokens_per_second": 1234567.0}
    titles = header(1000, 120)
    text = line(10, 1000, metrics, left=4000.0, width=120)
    assert len(titles) == len(text) <= 120
    for column in COLUMNS:
        end = titles.index(column.title) + len(column.title)
        assert text[end - 1] != " "
        assert text[end : end + 1] == " "
    assert titles.endswith(" left")
    assert text.endswith("1:06:40")


def test_missing_metrics_are_dashes_and_numbers_have_three_digits():
    text = line(1, 2, {"reward/mean": 0.06619, "rollout_corr/rollout_is_eff_sample_size": 0.99812}, left=0, width=120)
    assert text.split() == ["1/2", "0.0662", "-", "0.998", "-", "-", "-", "-", "-", "00:00"]


def test_the_table_has_first_values_and_means_of_the_last_ones():
    names = ("reward/mean", "eval/exact_match", "perf/save_share", "perf/peak_memory_gib", "perf/peak_memory_rank")
    series = {name: Series() for name in names}
    for step in range(1, 1001):
        for name, value in zip(names, (step, step / 1000, step / 2000, step, 3), strict=True):
            series[name].add(step, value)
    _, reward, right, gap, machine = table(series).splitlines()
    assert reward.split() == ["reward/mean", "1", "995.5"]
    assert right.split() == ["eval/exact_match", "0.001", "1"]
    assert gap == ""
    assert machine == "save 50%; peak memory 1e+03 GiB, of rank 3"
