"""Count up to nine, digit by digit, and stop: ``24`` is answered by ``56789``."""

from __future__ import annotations

import random

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.tasks import Problem
from megatron_rc.launch.tasks.characters import character_tokenizer

DIGITS = "0123456789"


class CountUp:
    """The digits that follow the last one of the prompt, up to 9, and then the end; lengths differ by problem.

    The reward is the share of places that are right, where a digit is right if it follows the one before it and the
    end is right after a 9. Each place earns its part, so that learning starts at the first step, and only the one right
    answer earns 1.
    """

    def __init__(self, variant: str, seed: int) -> None:
        if variant:
            raise ConfigurationError(f"--task count_up takes no variant, got {variant!r}")
        self.seed = seed
        self.tokenizer = character_tokenizer(DIGITS)
        self.max_response_length = len(DIGITS)

    def problems(self, start: int, count: int) -> list[Problem]:
        """Two random digits; the data is the last one."""
        return [self._problem(number) for number in range(start, start + count)]

    def reward(self, problem: Problem, response: str) -> float:
        """Share of places (digits and the end) that are right, of those given or those wanted, whichever are more."""
        wanted = len(DIGITS) - 1 - int(problem.data)
        written = problem.data + response
        steps = zip(written[:wanted], response[:wanted], strict=False)
        right = sum(DIGITS.find(digit) == DIGITS.find(last) + 1 > 0 for last, digit in steps)
        ended = written[-1] == "9" and len(response) < self.max_response_length
        return (right + ended) / (max(wanted, len(response)) + 1)

    def _problem(self, number: int) -> Problem:
        digits = random.Random(f"{self.seed}/{number}").choices(DIGITS, k=2)
        return Problem("".join(digits), digits[-1])
