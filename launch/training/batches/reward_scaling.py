"""Scaling and clipping of rewards before the advantages are estimated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.launch.run_config.learning import AdvantageSection
from megatron_rc.parallel.collectives import all_reduce_sum
from megatron_rc.parallel.groups import Group

STATE = "reward_statistics"


@dataclass(frozen=True)
class RewardStatistics:
    """Statistics of all rewards of a run so far."""

    count: float = 0.0  # number of rewards
    mean: float = 0.0  # mean of the rewards
    squares: float = 0.0  # sum of the squared distances from the mean

    @property
    def std(self) -> float:
        """Sample standard deviation; 1 if all rewards are equal, so that nothing is divided by 0."""
        return (self.squares / (self.count - 1)) ** 0.5 if self.count > 1 and self.squares > 0 else 1.0

    def joined(self, rewards: Tensor, kept: Tensor, dp: Group | None) -> RewardStatistics:
        """Statistics with one more batch of all replicas added. Collectives: two SUMs over ``dp``.

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
    """Scales and clips rewards as the flags say; checkpoints keep the statistics."""

    def __init__(self, wanted: AdvantageSection, dp: Group | None) -> None:
        self.wanted, self.dp, self.statistics = wanted, dp, RewardStatistics()

    def __call__(self, rewards: Tensor, kept: Tensor) -> Tensor:
        """Add the ``kept`` rewards to the statistics; return all rewards [n] scaled and clipped."""
        if self.wanted.reward_scaling != "none":
            self.statistics = self.statistics.joined(rewards, kept, self.dp)
        return self.scaled(rewards)

    def scaled(self, rewards: Tensor) -> Tensor:
        """[n], rewards scaled and clipped by the statistics so far, without adding them."""
        if self.wanted.reward_scaling != "none":
            mean = self.statistics.mean if self.wanted.reward_scaling == "mean-std" else 0.0
            # Equal float32 rewards have an exact float64 mean, so they become exactly 0.
            rewards = ((rewards.double() - mean) / self.statistics.std).to(rewards.dtype)
        limit = self.wanted.reward_clip
        return rewards if limit is None else rewards.clamp(-limit, limit)

    @property
    def scale(self) -> float:
        """The factor of a part of a reward, which is not centred."""
        return 1.0 if self.wanted.reward_scaling == "none" else 1 / self.statistics.std

    def metrics(self) -> dict[str, float]:
        """Metrics of the statistics; empty if rewards are not scaled."""
        if self.wanted.reward_scaling == "none":
            return {}
        return {"reward/running_mean": self.statistics.mean, "reward/running_std": self.statistics.std}

    def state(self) -> dict[str, list[float]]:
        """State for a checkpoint."""
        one = self.statistics
        return {STATE: [one.count, one.mean, one.squares]} if one.count else {}

    def load(self, loaded: dict[str, list[float]]) -> None:
        """Restore the statistics from a checkpoint that has them."""
        if STATE in loaded:
            self.statistics = RewardStatistics(*map(float, loaded[STATE]))
