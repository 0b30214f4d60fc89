"""The table of whole runs in docs/reliability.md."""

import os
import re
import subprocess
import sys

import pytest

from tests.support.paths import ROOT
from tests.support.whole_run import PAGE, with_row

COMMANDS = ("make test-latest", "make test-long", "make test-adaptors", "make test-vllm")
TABLE = "| command | date | versions | tests |\n|---|---|---|---|\n| `make test-long` | never | | |\n"
TESTS = "import pytest\n\ndef test_a(): pass\ndef test_b(): assert False\ndef test_c(): pytest.skip()\n"


@pytest.mark.processes
@pytest.mark.parametrize("flags", [["-n", "2"], ["-n", "0", "-k", "test_a"]], ids=["whole", "chosen"])
def test_a_whole_run_writes_its_row(tmp_path, flags):
    tests = tmp_path / "test_some.py"
    page = tmp_path / "page.md"
    tests.write_text(TESTS)
    page.write_text(TABLE)
    arguments = ["-p", "xdist", "-p", "tests.support.whole_run", "--whole-run", "make test-long"]
    arguments += ["--whole-run-page", str(page), "--rootdir", str(tmp_path), "-c", "/dev/null", str(tests)]
    # Loading the other installed plugins takes most of each process's time.
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    subprocess.run([sys.executable, "-m", "pytest", *arguments, *flags], cwd=ROOT, env=environment, capture_output=True)
    row = page.read_text().splitlines()[-1]
    versions = r"\d{4}-\d\d-\d\d \| Python 3\.\d+\.\d+, torch [\d.]+, megatron-core [\d.]+"
    whole = rf"\| `make test-long` \| {versions} \| 1 passed, 1 skipped, 1 failed \|"
    assert re.fullmatch(whole, row) if "-k" not in flags else "never" in row


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_row_and_writes_it(command):
    with_row(PAGE.read_text(encoding="utf-8"), command, "")
    services = "".join(file.read_text(encoding="utf-8") for file in (ROOT / ".github" / "workflows").iterdir())
    assert (command.split()[1] in services) == (command != "make test-vllm")
    shown = subprocess.run(["make", "-n", command.split()[1]], cwd=ROOT, check=True, capture_output=True, text=True)
    assert f'--whole-run "{command}"' in shown.stdout
