"""The default task, with all its hundred problems in an evaluation too."""

from __future__ import annotations

from megatron_rc.launch.tasks import Problem
from megatron_rc.launch.tasks.count_up import DIGITS
from megatron_rc.launch.tasks.count_up import CountUp as DefaultTask


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
