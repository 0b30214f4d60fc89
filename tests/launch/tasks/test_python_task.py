"""A user's class as a task: what it must have, and one sentence where it has not."""

import sys

import pytest

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.tasks import make_task
from megatron_rc.launch.tasks.text import CharacterText

GOOD = """
from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.tasks import Problem

def raise_sentence():
    raise ConfigurationError('no problems held out')

class Task:
    characters = "0123456789"
    max_response_length = 2

    def __init__(self, seed):
        self.seed = seed

    def problems(self, start, count, held_out=False):
        return [Problem(str(number), label=number) for number in range(start, start + count)]
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Makes the task of a class with a changed line."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(line, other, **more):
        assert line in GOOD
        (tmp_path / "own.py").write_text(GOOD.replace(line, other))
        monkeypatch.delitem(sys.modules, "own", raising=False)
        return make_task("python:own:Task", 1, **more)

    return make


def test_flags_come_before_what_the_class_says_or_lacks(own):
    for line in ("class Task:", '    characters = "0123456789"\n', "    max_response_length = 2\n"):
        task = own(line, line if "class" in line else "", text=CharacterText("ab"), max_response_length=4)
        assert (task.text.size, task.max_response_length, task.reward) == (5, 4, None)


@pytest.mark.parametrize(
    ("line", "other", "message"),
    [
        ("class Task:", "def Task(seed): pass\nclass Other:", "type function"),
        ("    def problems(", "    def problem(", r"no method problems\(start, count, held_out=False\)"),
        ('    characters = "0123456789"\n', "", "no attribute characters, .*--tokenizer-model"),
        ("    max_response_length = 2\n", "", "max_response_length None: .*--max-response-length"),
        ("    characters", "    reward = 3\n    characters", "reward .* not a method"),
        ("self.seed = seed", "raise SystemExit(0)", r"\n--task python:own:Task: Task raises SystemExit: 0$"),
        ("(self, seed)", "(self)", r"^TypeError.*\n--task python:own:Task: Task raises TypeError: .*seed"),
    ],
)
def test_a_class_that_is_no_task_is_refused(own, line, other, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        own(line, other)
    assert str(caught.value).splitlines()[-1].startswith("--task python:own:Task")


GIVES = "return [Problem(str(number), label=number) for number in range(start, start + count)]"


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("[Problem('1')]", r"problems\(0, 2, held_out=False\) must give a list of 2 \S+Problem, it gave 1 of them$"),
        ("iter([])", "it gave a list_iterator$"),
        ("['1', '2']", "it gave a list with a str$"),
        ("[Problem('1'), Problem('2 + a')]", "problem 1 .* has ' ', .*--tokenizer-model"),
        ("[Problem('1', record=[3]), Problem('2')]", r"problem 0 .* record \[3\]: "),
        ("[Problem('1'), Problem(2)]", r"problem 1 .* prompt 2 "),
        ("[Problem('1'), Problem('2', examples=3)]", r"\n--task \S+: problem 1 \S+ raises TypeError: "),
        ("[Problem('1', tools=({},)), Problem('2')]", r"problem 0 .* tools, .*--apply-chat-template"),
        ("[Problem('1'), Problem('')]", r"problem 1 \(held_out=False\) .* empty prompt"),
        ("raise_sentence()", r"^no problems held out$"),
        ("self.nothing", r"(?s)^Traceback.*\n--task \S+: problems raises AttributeError: 'Task' object has no"),
    ],
)
def test_problems_are_checked(own, result, message):
    task = own(GIVES, f"return {result}")
    with pytest.raises(ConfigurationError, match=message):
        task.problems(0, 2)
