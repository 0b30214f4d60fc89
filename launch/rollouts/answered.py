"""Responses to some prompts with their rewards, as an engine's answers become a rollout batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rc.launch.engines import Sample
from megatron_rc.launch.rewards.outcome import Outcome
from megatron_rc.launch.rewards.rewarder import Rewards
from megatron_rc.launch.tasks import Problem


@dataclass
class Answered:
    """As many responses to each problem; lists in the order of the problems, one entry a response unless said.

    Attributes:
        problems: one entry each.
        encoded: what the model was shown.
        samples: the responses; one that was dropped has no token.
        values: the rewards, 0 where the response was dropped.
        outcomes: what the rule gave; None where the response was dropped.
        bad: answers that were not to be trained on.
    """

    problems: list[Problem]
    encoded: list[list[int]]
    samples: list[Sample]
    values: list[float]
    outcomes: list[Outcome | None]
    bad: int

    @property
    def size(self) -> int:
        """Responses to each problem."""
        return len(self.samples) // len(self.problems)

    @property
    def rewards(self) -> Rewards:
        """Those of the responses that were not dropped."""
        kept = [(value, one) for value, one in zip(self.values, self.outcomes, strict=True) if one is not None]
        return Rewards([value for value, _ in kept], [one for _, one in kept])

    @property
    def dropped(self) -> int:
        """How many responses were."""
        return self.outcomes.count(None)

    def flat(self) -> list[int]:
        """The problems whose responses all have the same reward, or none: nothing tells these responses apart."""
        return [index for index in range(len(self.problems)) if len(set(self._rewards_of(index))) <= 1]

    def replace(self, places: Sequence[int], others: Answered) -> None:
        """Put other problems with their responses in these places."""
        for number, place in enumerate(places):
            new, old = slice(number * self.size, (number + 1) * self.size), self._slice(place)
            self.problems[place] = others.problems[number]
            self.encoded[old], self.samples[old] = others.encoded[new], others.samples[new]
            self.values[old], self.outcomes[old] = others.values[new], others.outcomes[new]
        self.bad += others.bad

    def _slice(self, index: int) -> slice:
        return slice(index * self.size, (index + 1) * self.size)

    def _rewards_of(self, index: int) -> list[float]:
        own = self._slice(index)
        pairs = zip(self.values[own], self.outcomes[own], strict=True)
        return [value for value, outcome in pairs if outcome is not None]
