"""What is done to rewards before they become advantages: scaling by the run so far, and clipping."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.launch.run_config.advantages import AdvantageSection
from megatron_rc.parallel.collectives import all_reduce_sum
from megatron_rc.parallel.groups import Group

STATE = "reward_statistics"


@dataclass(frozen=True)
class RewardStatistics:
    """Of all rewards of a run so far.

    Attributes:
        count: how many there were.
        mean: of them.
        squares: sum of their squared distances from the mean.
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def std(self) -> float:
        """Their deviation, of a sample; 1 where all were alike, so that nothing is divided by 0."""
        return (self.squares / (self.count - 1)) ** 0.5 if self.count > 1 and self.squares > 0 else 1.0

    def joined(self, rewards: Tensor, kept: Tensor, dp: Group | None) -> RewardStatistics:
        """With those of one more batch, of all replicas. Collectives: two SUMs over ``dp``, of two doubles and of one.

        Chan et al. 1979, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances".
        """
        exact = torch.where(kept, rewards.double(), 0)
        sums = torch.stack([kept.sum(dtype=torch.float64), exact.sum()])
        number, total = all_reduce_sum(sums, dp).tolist()
        if not number:
            return self
        mean = total / number
        squares = float(all_reduce_sum(torch.where(kept, exact - mean, 0).square().sum(), dp))
        count, away = self.count + number, mean - self.mean
        squares += self.squares + away**2 * self.count * number / count
        return RewardStatistics(count, self.mean + away * number / count, squares)


class RewardScaler:
    """Scales and clips rewards as the flags say; the statistics grow with every rollout batch, and are saved.

    Args:
        wanted: the flags.
        dp: the ranks with other responses.
    """

    def __init__(self, wanted: AdvantageSection, dp: Group | None) -> None:
        self.wanted, self.dp, self.statistics = wanted, dp, RewardStatistics()

    def __call__(self, rewards: Tensor, kept: Tensor) -> Tensor:
        """[n], what the estimator sees of the rewards of a rollout batch, whose statistics count from now on.

        Args:
            rewards: [n], of this replica's responses.
            kept: [n] bool; the others do not count.
        """
        if self.wanted.reward_scaling != "none":
            self.statistics = self.statistics.joined(rewards, kept, self.dp)
        return self.scaled(rewards)

    def scaled(self, rewards: Tensor) -> Tensor:
        """[n], by the statistics so far: rewards that count in none of them, as those of greedy responses."""
        if self.wanted.reward_scaling != "none":
            mean = self.statistics.mean if self.wanted.reward_scaling == "mean-std" else 0.0
            # Back in their dtype: float64 sums of equal float32 rewards are exact, and so is their mean.
            rewards = ((rewards.double() - mean) / self.statistics.std).to(rewards.dtype)
        limit = self.wanted.reward_clip
        return rewards if limit is None else rewards.clamp(-limit, limit)

    def metrics(self) -> dict[str, float]:
        """The statistics, where they are used."""
        if self.wanted.reward_scaling == "none":
            return {}
        return {"reward/running_mean": self.statistics.mean, "reward/running_std": self.statistics.std}

    def state(self) -> dict[str, list[float]]:
        """What a checkpoint keeps."""
        one = self.statistics
        return {STATE: [one.count, one.mean, one.squares]} if one.count else {}

    def load(self, loaded: dict[str, list[float]]) -> None:
        """Go on from a checkpoint; one without statistics leaves them as they are."""
        if STATE in loaded:
            self.statistics = RewardStatistics(*map(float, loaded[STATE]))
