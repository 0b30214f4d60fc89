"""Tasks from data sets of the reasoning-gym library, with the library's scoring."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any

from megatron_rc.launch.errors import ConfigurationError, require
from megatron_rc.launch.tasks.text import CharacterText, Problem, Text

SIZE = 1_000_000
RESPONSE_LENGTH = 32
_HELD_OUT = 5  # one question in five is kept for evaluation
_STRIDE = 9973
_ATTEMPTS = 200


class ReasoningGym:
    """The task ``reasoning_gym:<data set>``; questions that leave no room for a response are skipped."""

    def __init__(
        self,
        variant: str,
        seed: int,
        text: Text | None = None,
        seq_length: int | None = None,
        max_response_length: int | None = None,
    ) -> None:
        require("reasoning_gym", f"--task reasoning_gym:{variant}", "reasoning-gym")
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        if variant not in DATASETS:
            raise ConfigurationError(
                f"--task reasoning_gym:{variant}: no such data set; there are {len(DATASETS)}, for example "
                "basic_arithmetic"
            )
        self.dataset = reasoning_gym.create_dataset(variant, seed=seed, size=SIZE)
        self.text = text or CharacterText()
        self.max_response_length = max_response_length or RESPONSE_LENGTH
        self._longest_prompt = math.inf if seq_length is None else seq_length - self.max_response_length

    def problems(self, start: int, count: int, held_out: bool = False) -> list[Problem]:
        """Entries of the data set; each depends only on the seed and its number."""
        return [self._problem(number, held_out) for number in range(start, start + count)]

    def reward(self, *, prompt: str, response: str, label: Any, record: Mapping[str, Any]) -> float:
        """Score of the response by the library."""
        return float(self.dataset.score_answer(response.strip(), dict(record)))

    def _problem(self, number: int, held_out: bool) -> Problem:
        """The first fitting entry among 200 candidates for this number.

        A hash of the question decides whether it is held out, so that no question is on both sides.
        """
        shortest = math.inf
        for attempt in range(_ATTEMPTS):
            entry: Any = self.dataset[(number + attempt * _STRIDE) % SIZE]
            if (zlib.crc32(entry["question"].encode()) % _HELD_OUT == 0) == held_out:
                problem = Problem(entry["question"] + "\n", entry["answer"], record=entry)
                length = len(self.text.encode(problem)) if self._longest_prompt < math.inf else 0
                if length <= self._longest_prompt:
                    return problem
                shortest = min(shortest, length)
        if shortest == math.inf:
            raise ConfigurationError(
                f"the data set has too few problems {'to hold some out' if held_out else 'to train on'}"
            )
        raise ConfigurationError(
            f"--seq-length leaves {self._longest_prompt} tokens for a prompt, and the shortest of {_ATTEMPTS} problems "
            f"has {shortest}: raise it, or lower --max-response-length {self.max_response_length}"
        )
