"""examples/README.md names every example with a command; tests/long runs the slow ones as written."""

import re
import shlex
from unittest import mock

import pytest

from megatron_rc.launch.flags.configure import configure
from megatron_rc.loss.objectives import OBJECTIVES
from megatron_rc.settings.criteria import CRITERIA
from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples"
ROWS = re.findall(r"^\|(.*)\|(.*)\| `(.*)` \| (\d+) \|$", (EXAMPLES / "README.md").read_text(), flags=re.MULTILINE)
COMMANDS = [command for _, _, command, _ in ROWS]


def test_every_example_is_in_the_table():
    named = {name for files, *_ in ROWS for name in re.findall(r"\]\((\w+\.py)\)", files)}
    assert named == {path.name for path in EXAMPLES.glob("*.py")}
    assert {"torchrun", "python", "make"} == {command.split()[0] for command in COMMANDS}


@pytest.mark.parametrize("command", [candidate for candidate in COMMANDS if "megatron_rc.launch" in candidate])
def test_commands_of_the_launcher_are_runs(command, tmp_path):
    arguments = shlex.split(command)
    number = int(arguments[arguments.index("--nproc-per-node") + 1])
    with mock.patch.dict(OBJECTIVES), mock.patch.dict(CRITERIA):
        config, _ = configure(["--cpu", f"--runs-dir={tmp_path}", *arguments[arguments.index("--config") :]], number)
    assert config.launch.run_name in ("count_up", "guessing_game")
