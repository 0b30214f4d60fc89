"""The commands of examples/README.md, as they are written."""

import os
import subprocess
import sys
from pathlib import Path

from tests.examples.test_table import COMMANDS
from tests.support.paths import ROOT


def test_the_commands_run_in_their_order(tmp_path):
    """All but SmolLM2's, which makes an environment of its own."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    shown = {}
    for command in COMMANDS:
        if not command.startswith("make"):
            end = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
            assert end.returncode == 0, f"{command}\n{end.stderr}"
            shown[command] = end.stdout
    lines = [text.splitlines() for command, text in shown.items() if "own_loop" in command]
    assert len(lines) == 3
    assert all([line.split()[:4] for line in one] == [line.split()[:4] for line in lines[0]] for one in lines)
    first, last = (float(line.split()[3]) for line in (lines[0][0], lines[0][-1]))
    assert last > 2 * first
    assert (tmp_path / "weights.png").is_file()
    assert len(list((tmp_path / "runs").iterdir())) == 3
