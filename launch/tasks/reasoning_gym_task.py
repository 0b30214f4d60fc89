"""Any data set of the reasoning-gym library: its problems, and its own scoring."""

from __future__ import annotations

import string
import zlib
from typing import Any

from megatron_rc.launch.errors import ConfigurationError, require
from megatron_rc.launch.tasks.text import CharacterText, Problem, Text

SIZE = 1_000_000
_HELD_OUT = 5  # every which question is kept for evaluation
_STRIDE, _ATTEMPTS = 9973, 200


class ReasoningGym:
    """``reasoning_gym:<data set>``, spelled out in printable ASCII characters."""

    max_response_length = 32

    def __init__(self, variant: str, seed: int, text: Text | None = None) -> None:
        require("reasoning_gym", f"--task reasoning_gym:{variant}", "launch")
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        if variant not in DATASETS:
            raise ConfigurationError(
                f"--task reasoning_gym:{variant}: no such data set; there are {len(DATASETS)}, for example "
                "basic_arithmetic"
            )
        self.dataset = reasoning_gym.create_dataset(variant, seed=seed, size=SIZE)
        self.text = text or CharacterText(string.printable)

    def problems(self, start: int, count: int, held_out: bool = False) -> list[Problem]:
        """Entries of the data set, which is a function of the seed and the number."""
        entries = [self._entry(number, held_out) for number in range(start, start + count)]
        return [Problem(entry["question"] + "\n", entry) for entry in entries]

    def reward(self, problem: Problem, response: str) -> float:
        """The data set's own score."""
        return float(self.dataset.score_answer(response.strip(), problem.data))

    def _entry(self, number: int, held_out: bool) -> Any:
        """The first entry on the right side, of those that stand for this number; the question's text decides."""
        for attempt in range(_ATTEMPTS):
            entry = self.dataset[(number + attempt * _STRIDE) % SIZE]
            if (zlib.crc32(entry["question"].encode()) % _HELD_OUT == 0) == held_out:
                return entry
        raise ConfigurationError(
            f"the data set has too few problems {'to hold some out' if held_out else 'to train on'}"
        )
