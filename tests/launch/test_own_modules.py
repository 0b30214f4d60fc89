"""docs/data.md: its module and its commands, as they are written, with the examples that they name."""

import os
import re
import shlex
import sys
from unittest import mock

import pytest

from megatron_rc.launch.flags.configure import configure
from megatron_rc.loss.objectives import OBJECTIVES
from megatron_rc.settings.criteria import CRITERIA
from tests.launch.flags.test_rows_to_try import SMALL
from tests.support.paths import ROOT
from tests.support.ranks import Layout
from tests.support.training_runs import rows, run_training

PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
TEXT = PAGE[PAGE.index("## A reward") :]
MODULES = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL))
COMMANDS = [
    shlex.split(text.replace("\\\n", " ")) for text in re.findall(r"^```sh\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
]
FLAGS = [words[words.index("--config") :] for words in COMMANDS]


@pytest.fixture
def folder(tmp_path):
    """A folder with the module and the examples; the tables of the library are as before afterwards."""
    for name, text in MODULES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    with mock.patch.dict(OBJECTIVES), mock.patch.dict(CRITERIA):
        yield tmp_path
    for name in MODULES:
        sys.modules.pop(name.removesuffix(".py"), None)


def in_folder(folder, do, *arguments):
    """As if started there: the current directory is where modules are looked for."""
    before = os.getcwd()
    path = list(sys.path)
    os.chdir(folder)
    try:
        return do(*arguments)
    finally:
        os.chdir(before)
        sys.path[:] = path


@pytest.mark.parametrize("words", FLAGS, ids=lambda words: words[2])
def test_every_command_is_a_run(folder, words):
    config, _ = in_folder(folder, configure, ["--cpu", f"--runs-dir={folder}", *words], 4)
    assert config.training.seq_length == 16


def test_the_examples_train(ranks, folder):
    """The task with its replies, the objective and the criterion."""
    _, _, replies, objects = FLAGS
    arguments = [*replies, *objects[2:], *SMALL, "--train-iters=2", f"--runs-dir={folder}", "--reward-workers=1"]
    assert ranks.run(in_folder, Layout(), folder, run_training, arguments) == [None]
    (first, second) = rows(folder)
    assert {"reward/first_digit", "rollout_corr/rollout_rs_seq_min_k1_mean"} < set(first)
    assert (first["reward/errors"], second["reward/errors"]) == (0, 0)


def test_the_task_and_the_reply_give_what_the_page_says(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    from my_replies import right_digits
    from my_task import Reverse

    task = Reverse(1)
    trained = {problem.prompt for problem in task.problems(0, 300, held_out=False)}
    held_out = {problem.prompt for problem in task.problems(0, 300, held_out=True)}
    assert not trained & held_out
    (problem,) = task.problems(7, 1)
    asked = {"prompt": problem.prompt, "label": problem.label, "record": {}}
    assert task.reward(response=problem.prompt[::-1], **asked) == {"reward": 1.0, "first_digit": 1.0}
    assert task.reward(response="", **asked)["reward"] == 0
    asked = {"prompt": "271", "label": "172", "record": {}, "turns": []}
    assert right_digits(response="172", **asked) is None
    assert right_digits(response="192", **asked) == {"observation": "2", "reward": 0.2}
    assert right_digits(response="", **asked) == {"observation": "0", "reward": 0.0}
