"""The study's two tasks: the default task, with an evaluation of all its problems, and one with long responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rc.launch.tasks import Problem
from megatron_rc.launch.tasks.count_up import DIGITS
from megatron_rc.launch.tasks.count_up import CountUp as DefaultTask

LONG = 128
FOLLOWING = f"{DIGITS}0"


class CountUp(DefaultTask):
    """``count_up`` for ``--task python:``: it has a hundred problems, and trains on all of them."""

    characters = DIGITS

    def __init__(self, seed: int) -> None:
        super().__init__("", seed)

    def problems(self, start: int, count: int, held_out: bool = False) -> list[Problem]:
        """Random problems to train on; problems 00 to 99 for an evaluation."""
        if not held_out:
            return super().problems(start, count)
        return [Problem(f"{number:02d}", DIGITS[number % 10 + 1 :]) for number in range(start, start + count)]


class CountOn(CountUp):
    """Count on for 128 digits, with 0 after 9: ``24`` is answered by ``5678901234…``; to stop is a mistake.

    The reward is the share of the 128 places whose digit is one more than the digit before it.
    """

    NAME = "python:benchmarks.study.task:CountOn"

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.max_response_length = LONG

    def reward(self, *, prompt: str, response: str, label: Any, record: Mapping[str, Any]) -> float:
        """Share of the 128 places whose digit is one more than the digit before it."""
        pairs = zip(f"{prompt[-1]}{response}", response, strict=False)
        return sum(f"{before}{digit}" in FOLLOWING for before, digit in pairs) / LONG
