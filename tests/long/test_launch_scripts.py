"""Dry runs of the launch scripts in ``examples/launch``, as a user starts them: each fits on 80 GB a GPU."""

import subprocess

import pytest

from tests.examples.test_launch_scripts import FOLDER, ORIGINALS, publish
from tests.support.runs import as_in_a_shell


@pytest.mark.parametrize("name", ORIGINALS)
def test_a_script_fits(name, tmp_path):
    original = ORIGINALS[name]
    publish(tmp_path, original.shape)
    files = {"MODEL": str(tmp_path / "model"), "TRAIN": str(tmp_path / "train.jsonl")}
    environment = as_in_a_shell() | files | original.environment
    # Every machine of a run needs the same flags; a dry run is one process.
    command = [str(FOLDER / f"{name}.sh"), "--dry-run", "--device-memory-gib", "72"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # The package that converts the weights on a GPU is the only thing that a run says beside its result.
    assert all(line.startswith("mbridge converts the weights") for line in done.stderr.splitlines()), done.stderr
    tp, cp, dp = original.layout
    assert f"{tp * cp * dp} ranks = TP {tp} × CP {cp} × PP 1 × DP {dp}\n" in done.stdout
