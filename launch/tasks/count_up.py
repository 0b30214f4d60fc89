"""Count up to nine, digit by digit, and stop: ``24`` is answered by ``56789``."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.tasks.text import CharacterText, Problem, Text

DIGITS = "0123456789"


class CountUp:
    """Task whose answer is the digits after the prompt's last digit, up to 9, and then the end-of-text token.

    The reward is the share of the answer's tokens before the first mistake. A right first digit is rewarded alone, so
    that learning starts at the first step; only the right answer earns 1.
    """

    def __init__(self, variant: str, seed: int, text: Text | None = None) -> None:
        if variant:
            raise ConfigurationError(f"--task count_up takes no variant, got {variant!r}")
        self.seed = seed
        self.text = text or CharacterText(DIGITS)
        self.max_response_length = len(DIGITS)

    def problems(self, start: int, count: int, held_out: bool = False) -> list[Problem]:
        """Prompts of two random digits; the label is the right answer."""
        if held_out:
            raise ConfigurationError("--task count_up holds no problems out: it trains on all of its 100 problems")
        drawn = [random.Random(f"{self.seed}/{number}").choices(DIGITS, k=2) for number in range(start, start + count)]
        return [Problem("".join(digits), DIGITS[int(digits[-1]) + 1 :]) for digits in drawn]

    def reward(self, *, prompt: str, response: str, label: Any, record: Mapping[str, Any]) -> float:
        """Share of the answer's tokens (digits and the end) before the first mistake."""
        answer: str = label
        right = sum(response.startswith(answer[:length]) for length in range(1, len(answer) + 1))
        return (right + (response == answer)) / (len(answer) + 1)
