"""Responses of an engine and their rewards, before they become a rollout batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rc.launch.engines import Sample
from megatron_rc.launch.rewards.outcome import Outcome
from megatron_rc.launch.rewards.rewarder import Rewards
from megatron_rc.launch.tasks import Problem


@dataclass
class Answered:
    """Problems with an equal number of rewarded responses each; lists follow the order of the problems."""

    problems: list[Problem]  # the problems
    encoded: list[list[int]]  # [responses] token ids of the prompt
    samples: list[Sample]  # [responses]; a dropped response has no token
    values: list[float]  # [responses] rewards; 0 for a dropped response
    outcomes: list[Outcome | None]  # [responses] results of the reward rule; None for a dropped response
    bad: int  # number of bad answers that the engine gave, retries included

    @property
    def size(self) -> int:
        """Number of responses to each problem."""
        return len(self.samples) // len(self.problems)

    @property
    def rewards(self) -> Rewards:
        """Rewards of the responses that were not dropped."""
        kept = [(value, one) for value, one in zip(self.values, self.outcomes, strict=True) if one is not None]
        return Rewards([value for value, _ in kept], [one for _, one in kept])

    @property
    def dropped(self) -> int:
        """Number of dropped responses."""
        return self.outcomes.count(None)

    def flat(self) -> list[int]:
        """Indices of the problems whose responses have equal rewards, or none: they give no advantage."""
        return [index for index in range(len(self.problems)) if len(set(self._rewards_of(index))) <= 1]

    def replace(self, places: Sequence[int], others: Answered) -> None:
        """Replace the problems at ``places``, and their responses, by those of ``others``."""
        for number, place in enumerate(places):
            new, old = others._slice(number), self._slice(place)
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
