"""The list of all tests is the same in every process: else pytest-xdist ends with "Different tests were collected"."""

import os
import subprocess
import sys
import time

from tests.support.paths import ROOT


def collected(seed):
    """Names of all tests, in their order, as a fresh Python whose sets iterate by ``seed`` has them."""
    words = ["--collect-only", "--quiet", "-m", "long or not long", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": str(seed)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_every_process_collects_the_same_tests():
    """Seconds apart, as workers start: no time, address, folder or order of a set is part of a name."""
    first = collected(1)
    time.sleep(2)
    second = collected(2)
    assert len(first) > 1000
    assert first == second
