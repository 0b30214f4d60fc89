"""A task of several turns: ``--task python:examples.guessing_game:Game --max-turns 3``.

The model guesses a number from 1 to 7. After a wrong guess the game says whether the number is higher or lower. Three
guesses are enough for whoever halves the numbers that are left. The command is in docs/rollouts.md.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rc.launch.tasks import Problem

HIGHEST = 7


class Game:
    """Problems, replies to guesses, and the reward. All methods are pure: they run in separate processes."""

    characters = "1234567?<>"
    max_response_length = 2  # tokens of a turn: one digit and the end

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def problems(self, start: int, count: int, held_out: bool = False) -> list[Problem]:
        """Numbers to guess; the prompt is always the same."""
        drawn = [random.Random(f"{self.seed}/{held_out}/{number}") for number in range(start, start + count)]
        return [Problem("?", label=dice.randint(1, HIGHEST)) for dice in drawn]

    def reply(
        self, *, prompt: str, response: str, label: int, record: Mapping[str, Any], turns: Sequence[tuple[str, str]]
    ) -> dict[str, Any] | None:
        """The observation after a guess, ``<`` if the number is lower and ``>`` if it is higher; None ends the game.

        A guess is a digit; the first one earns a tenth. A turn without its end gets no reply, and so earns nothing.
        """
        if not response.isdigit():
            return None
        observation = None if response == str(label) else "<" if label < int(response) else ">"
        return {"observation": observation, "reward": 0.0 if turns else 0.1}

    def reward(
        self, *, prompt: str, response: str, label: int, record: Mapping[str, Any], turns: Sequence[tuple[str, str]]
    ) -> dict[str, float]:
        """Nine tenths for the right number; ``response`` is the last guess, ``turns`` has the guesses before it."""
        right = float(response == str(label))
        return {"reward": 0.9 * right, "right": right, "guesses": len(turns) + 1.0}
