"""Any data set of the reasoning-gym library: its problems, and its own scoring."""

from __future__ import annotations

import string

from megatron_rc.launch.errors import ConfigurationError, require
from megatron_rc.launch.tasks import Problem
from megatron_rc.launch.tasks.characters import character_tokenizer

SIZE = 1_000_000


class ReasoningGym:
    """``reasoning_gym:<data set>``, spelled out in printable ASCII characters."""

    max_response_length = 32

    def __init__(self, variant: str, seed: int) -> None:
        require("reasoning_gym", f"--task reasoning_gym:{variant}", "launch")
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        if variant not in DATASETS:
            raise ConfigurationError(
                f"--task reasoning_gym:{variant}: no such data set; there are {len(DATASETS)}, for example "
                "basic_arithmetic"
            )
        self.dataset = reasoning_gym.create_dataset(variant, seed=seed, size=SIZE)
        self.tokenizer = character_tokenizer(string.printable)

    def problems(self, start: int, count: int) -> list[Problem]:
        """Entries of the data set, which is a function of the seed and the number."""
        entries = (self.dataset[number % SIZE] for number in range(start, start + count))
        return [Problem(entry["question"] + "\n", entry) for entry in entries]

    def reward(self, problem: Problem, response: str) -> float:
        """The data set's own score."""
        return float(self.dataset.score_answer(response.strip(), problem.data))
