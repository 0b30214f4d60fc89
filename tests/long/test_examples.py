"""The commands of examples/README.md, as they are written, and what the page says that they print."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.test_table import COMMANDS, EXAMPLES
from tests.support.paths import ROOT


def numbers(line):
    return [float(text) for text in re.findall(r" (-?\d[\d.]*)", line)]


def test_the_commands_run_in_their_order(tmp_path):
    """All but SmolLM2's, which makes an environment of its own."""
    (tmp_path / "examples").symlink_to(EXAMPLES)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    shown = {}
    for command in COMMANDS:
        if not command.startswith("make"):
            end = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
            assert end.returncode == 0, f"{command}\n{end.stderr}"
            shown[command] = end.stdout
    loops = [text.splitlines() for command, text in shown.items() if "own_loop" in command]
    (printed_on_page,) = re.findall(
        r"^```text\n(.*?)^```", (EXAMPLES / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL
    )
    assert len(loops) == 3
    for lines in loops:
        assert len(lines) == 12
        for line, expected_line in zip((lines[0], lines[-1]), printed_on_page.splitlines(), strict=True):
            assert numbers(line) == pytest.approx(numbers(expected_line), rel=1e-2)
    assert (tmp_path / "weights.png").is_file()
    # All runs of one name keep the metrics of the runs before.
    num_runs = sum("--config count_up" in command for command in COMMANDS)
    assert len(list((tmp_path / "runs" / "count_up").glob("metrics*.jsonl"))) == num_runs
    assert num_runs >= 4
