"""Sums of three numbers, worked out step by step: what a small language model learns on a CPU."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from itertools import product
from typing import Any

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.tasks.text import CharacterText, Problem, Text

ALPHABET = "0123456789 +=,.:?\nAnswer"
SHOWN = ((8, 4, 5), (3, 9, 7))
_HELD_OUT = 5  # one problem in so many is kept for evaluation
_ANSWER = re.compile(r"Answer: (\d+)\.?$")


class Sums:
    """``3 + 9 + 7 = ?`` is to be answered by ``3 + 9 = 12, 12 + 7 = 19. Answer: 19``, as two examples show.

    The reward is 1 if the first line ends with the right answer, else 0. Of the 729 problems with numbers from 1 to 9 a
    fifth is held out.
    """

    max_response_length = 32

    def __init__(self, variant: str, seed: int, text: Text | None = None) -> None:
        if variant:
            raise ConfigurationError(f"--task sums takes no variant, got {variant!r}")
        self.seed = seed
        self.text = text or CharacterText(ALPHABET)
        shuffled = [numbers for numbers in product(range(1, 10), repeat=3) if numbers not in SHOWN]
        random.Random(str(seed)).shuffle(shuffled)
        cut = len(shuffled) // _HELD_OUT
        self._kept, self._trained = shuffled[:cut], shuffled[cut:]
        self._examples = tuple((_question(numbers), _solution(*numbers)) for numbers in SHOWN)

    def problems(self, start: int, count: int, held_out: bool = False) -> list[Problem]:
        """Training problems come in rounds, each in an order of its own; the label is the sum."""
        if not held_out:
            return [self._problem(self._training(number)) for number in range(start, start + count)]
        if start + count > len(self._kept):
            raise ConfigurationError(
                f"--task sums holds {len(self._kept)} problems out, {start + count} were asked for"
            )
        return [self._problem(numbers) for numbers in self._kept[start : start + count]]

    def reward(self, *, prompt: str, response: str, label: Any, record: Mapping[str, Any]) -> float:
        """Whether the answer at the end of the first line is right."""
        first, _, _ = response.strip().partition("\n")
        found = _ANSWER.search(first.strip())
        return float(found is not None and int(found[1]) == label)

    def _training(self, number: int) -> tuple[int, ...]:
        turn, index = divmod(number, len(self._trained))
        order = list(range(len(self._trained)))
        random.Random(f"{self.seed}/{turn}").shuffle(order)
        return self._trained[order[index]]

    def _problem(self, numbers: tuple[int, ...]) -> Problem:
        return Problem(_question(numbers), sum(numbers), self._examples)


def _question(numbers: tuple[int, ...]) -> str:
    return " + ".join(map(str, numbers)) + " = ?\n"


def _solution(first: int, second: int, third: int) -> str:
    half = first + second
    return f"{first} + {second} = {half}, {half} + {third} = {half + third}. Answer: {half + third}"
