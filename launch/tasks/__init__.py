"""Tasks: sources of prompts, with a rule that scores responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.python_specs import is_python_spec
from megatron_rc.launch.tasks.text import Problem, Text

__all__ = ["Problem", "Rule", "Task", "Text", "make_task"]


class Rule(Protocol):
    """Scores one response; called with keyword arguments."""

    def __call__(self, *, prompt: str, response: str, label: Any, record: Mapping[str, Any]) -> Any:
        """Return a number, or a dict of numbers whose entry ``reward`` is trained on.

        Args:
            prompt: the problem's prompt; for a conversation, its last message.
            response: text without the end-of-text token.
            label: the problem's label.
            record: the problem's record.
        """
        ...


class Task(Protocol):
    """A source of problems with verifiable answers.

    Attributes:
        text: the tokenizer.
        max_response_length: maximum tokens of a response, the end-of-text token included.
    """

    text: Text
    max_response_length: int

    def problems(self, start: int, count: int, held_out: bool = False) -> list[Problem]:
        """Problems ``start`` to ``start + count - 1``, equal on every rank and in every run.

        Args:
            start: number of the first problem.
            count: number of problems.
            held_out: take problems that are kept for evaluation and never trained on.

        Raises:
            ConfigurationError: fewer problems are held out.
        """
        ...

    @property
    def reward(self) -> Rule | None:
        """Rule with scores from 0 to 1, and 1 for the right answer only; None: ``--reward`` must name one."""
        ...


def make_task(
    name: str,
    seed: int,
    text: Text | None = None,
    seq_length: int | None = None,
    max_response_length: int | None = None,
) -> Task:
    """Make the task that ``--task`` names; a part after a colon is an argument of it.

    ``text`` is the tokenizer, None: one token for each character that the task needs. ``seq_length`` bounds a prompt
    and its response together, ``max_response_length`` the response; None: as many tokens as the task needs.
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
