"""What is learnt: prompts, and a rule that scores a response."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.python_specs import is_python_spec
from megatron_rc.launch.tasks.text import Problem, Text

__all__ = ["Problem", "Rule", "Task", "Text", "make_task"]


class Rule(Protocol):
    """Scores one response; called by keywords."""

    def __call__(self, *, prompt: str, response: str, label: Any, record: Mapping[str, Any]) -> Any:
        """A number, or a dict of numbers of which the entry ``reward`` is trained on.

        Args:
            prompt: of the problem; of a conversation its last message.
            response: without its end.
            label: of the problem.
            record: of the problem.
        """
        ...


class Task(Protocol):
    """A source of problems with verifiable answers.

    Attributes:
        text: how they become tokens.
        max_response_length: tokens that a good response needs at most, the end-of-text token included.
    """

    text: Text
    max_response_length: int

    def problems(self, start: int, count: int, held_out: bool = False) -> list[Problem]:
        """Problems number ``start`` to ``start + count - 1``: the same ones on every rank and in every run.

        Args:
            start: number of the first.
            count: how many.
            held_out: from those that are kept for evaluation, and are never among the others.

        Raises:
            ConfigurationError: there are not as many held out.
        """
        ...

    @property
    def reward(self) -> Rule | None:
        """Scores responses from 0 to 1, and 1 is for the right answer alone; None: ``--reward`` must say what does."""
        ...


def make_task(
    name: str,
    seed: int,
    text: Text | None = None,
    seq_length: int | None = None,
    max_response_length: int | None = None,
) -> Task:
    """The task of this name; a part after a colon is handed to it.

    Args:
        name: of the task.
        seed: of its problems.
        text: the tokenizer; default: one token for each character that the task needs.
        seq_length: tokens of a prompt and a response together; a task with problems of many lengths keeps to it.
        max_response_length: tokens of a response; default: what the task needs.

    Raises:
        ConfigurationError: no such task, or the library it comes from is not installed.
    """
    from megatron_rc.launch.tasks.count_up import CountUp
    from megatron_rc.launch.tasks.python_task import PythonTask
    from megatron_rc.launch.tasks.reasoning_gym_task import ReasoningGym

    tasks: dict[str, Callable[[str, int, Text | None], Task]] = {
        "count_up": CountUp,
        "reasoning_gym": partial(ReasoningGym, seq_length=seq_length, max_response_length=max_response_length),
    }
    if is_python_spec(name):
        return PythonTask(name, seed, text, max_response_length)
    kind, _, variant = name.partition(":")
    if kind not in tasks:
        raise ConfigurationError(
            f"--task {name} is unknown: use count_up, reasoning_gym:<data set> or python:pkg.module:Class"
        )
    return tasks[kind](variant, seed, text)
