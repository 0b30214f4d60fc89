"""Tasks: sources of prompts, with a rule that scores responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.python_specs import is_python_spec
from megatron_rc.launch.tasks.text import Problem, Text

__all__ = ["Problem", "Rule", "Task", "Text", "make_task"]


class Rule(Protocol):
    """Scores one response; called with keyword arguments."""

    def __call__(self, *, prompt: str, response: str, label: Any, record: Mapping[str, Any]) -> Any:
        """Return a number, or a dict of numbers whose entry ``reward`` is trained on.

        ``prompt``, ``label`` and ``record`` are the problem's; ``response`` is text without the end tokens behind it.
        A rule with a parameter ``turns`` gets the earlier turns too, one with ``token_ids`` the response's tokens.
        """


class Task(Protocol):
    """A source of problems with verifiable answers."""

    text: Text  # the tokenizer
    max_response_length: int  # maximum tokens of a response, its end token included

    def problems(self, start: int, count: int, held_out: bool = False) -> list[Problem]:
        """Problems ``start`` to ``start + count - 1``, equal on every rank and in every run.

        With ``held_out`` the problems are kept for evaluation and never trained on; ConfigurationError if there are
        fewer.
        """

    @property
    def reward(self) -> Rule | None:
        """Rule with scores from 0 to 1, and 1 for the right answer only; None: ``--reward`` must name one."""


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

    if is_python_spec(name):
        return PythonTask(name, seed, text, max_response_length)
    kind, _, variant = name.partition(":")
    if kind == "count_up":
        return CountUp(variant, seed, text)
    if kind == "reasoning_gym":
        return ReasoningGym(variant, seed, text, seq_length, max_response_length)
    raise ConfigurationError(
        f"--task {name} is unknown: use count_up, reasoning_gym:<data set> or python:pkg.module:Class"
    )
