"""The table of whole runs in docs/reliability.md."""

import datetime
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.whole_run import PAGE, row_of, with_row

ROOT = Path(__file__).parent.parent
COMMANDS = ("make test-latest", "make test-long", "make test-adaptors", "make test-vllm")
TABLE = "| command | date | versions | tests |\n|---|---|---|---|\n| `make test-long` | never | | |\n"
TESTS = "import pytest\n\ndef test_a(): pass\ndef test_b(): assert False\ndef test_c(): pytest.skip()\n"


@pytest.mark.processes
@pytest.mark.parametrize("flags", [["-n", "2"], ["-n", "0", "-k", "test_a"]], ids=["whole", "chosen"])
def test_a_whole_run_writes_its_row(tmp_path, flags):
    (tmp_path / "test_some.py").write_text(TESTS)
    page = tmp_path / "page.md"
    page.write_text(TABLE)
    words = ["-p", "xdist", "-p", "tests.support.whole_run"]
    words += ["--whole-run", "make test-long", "--whole-run-page", str(page)]
    words += ["--rootdir", str(tmp_path), "-c", "/dev/null", str(tmp_path / "test_some.py")]
    command = [sys.executable, "-m", "pytest", *words, *flags]
    # Loading the other installed plugins takes most of each process's time.
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True)
    row = page.read_text().splitlines()[-1]
    assert ("never" in row) == ("-k" in flags)
    if "-k" not in flags:
        assert re.search(r"\d{4}-\d\d-\d\d \| Python 3\.\d+\.\d+, torch [\d.]+, megatron-core [\d.]+ \|", row)
        assert row.endswith("| 1 passed, 1 skipped, 1 failed |")


def test_a_row_takes_the_older_ones_place():
    row = row_of("make test-long", datetime.date(2026, 1, 2), {"passed": 1200, "skipped": 0, "failed": 0, "error": 3})
    assert row.endswith("| 1,200 passed, 0 failed, 3 error |")
    assert with_row(TABLE, "make test-long", row).splitlines()[2:] == [row]
    with pytest.raises(pytest.UsageError, match="make test-short"):
        with_row(TABLE, "make test-short", row)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_row_and_writes_it(command):
    with_row(PAGE.read_text(encoding="utf-8"), command, "")
    services = "".join(file.read_text(encoding="utf-8") for file in (ROOT / ".github" / "workflows").iterdir())
    assert (command.split()[1] in services) == (command != "make test-vllm")
    shown = subprocess.run(["make", "-n", command.split()[1]], cwd=ROOT, check=True, capture_output=True, text=True)
    assert f'--whole-run "{command}"' in shown.stdout
