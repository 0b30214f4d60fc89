"""What is learnt: prompts, and a rule that scores a response."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from megatron_rc.launch.errors import ConfigurationError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Problem:
    """A prompt, and whatever the task needs to score a response to it."""

    prompt: str
    data: Any


class Task(Protocol):
    """A source of problems with verifiable answers.

    Attributes:
        tokenizer: its end-of-text token is called ``<eos>`` and its padding token ``<pad>``.
        max_response_length: tokens that a good response needs at most, ``<eos>`` included.
    """

    tokenizer: Tokenizer
    max_response_length: int

    def problems(self, start: int, count: int) -> list[Problem]:
        """Problems number ``start`` to ``start + count - 1``: the same ones on every rank and in every run."""
        ...

    def reward(self, problem: Problem, response: str) -> float:
        """Score of a response (its text without ``<eos>``), from 0 to 1."""
        ...


def make_task(name: str, seed: int) -> Task:
    """The task of this name; a part after a colon is handed to it.

    Raises:
        ConfigurationError: no such task, or the library it comes from is not installed.
    """
    from megatron_rc.launch.tasks.count_up import CountUp
    from megatron_rc.launch.tasks.reasoning_gym_task import ReasoningGym

    tasks: dict[str, Callable[[str, int], Task]] = {"count_up": CountUp, "reasoning_gym": ReasoningGym}
    kind, _, variant = name.partition(":")
    if kind not in tasks:
        raise ConfigurationError(f"--task {name} is unknown: use count_up or reasoning_gym:<data set>")
    return tasks[kind](variant, seed)
