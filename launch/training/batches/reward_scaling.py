"""Scaling and clipping of rewards before the advantages are estimated."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rc.launch.run_config.learning import AdvantageSection
from megatron_rc.parallel.collectives import all_reduce_sum
from megatron_rc.parallel.groups import Group

STATE = "reward_statistics"


class RewardScaler:
    """Scales and clips rewards as the flags say, by statistics of all rewards of a run so far; checkpoints keep them.

    Attributes:
        count: number of rewards.
        mean: mean of the rewards.
        squares: sum of the squared distances from the mean.
    """

    def __init__(self, wanted: AdvantageSection, dp: Group | None) -> None:
        self.wanted = wanted
        self.dp = dp
        self.count = 0.0
        self.mean = 0.0
        self.squares = 0.0

    def __call__(self, rewards: Tensor, kept: Tensor) -> Tensor:
        """Add the ``kept`` rewards to the statistics; return all rewards [n] scaled and clipped."""
        if self.wanted.reward_scaling != "none":
            self._add(rewards, kept)
        return self.scaled(rewards)

    def scaled(self, rewards: Tensor) -> Tensor:
        """Return rewards, [n], scaled and clipped by the statistics so far, without adding them."""
        if self.wanted.reward_scaling != "none":
            mean = self.mean if self.wanted.reward_scaling == "mean-std" else 0.0
            # Equal float32 rewards have an exact float64 mean, so they become exactly 0.
            rewards = ((rewards.double() - mean) / self.std).to(rewards.dtype)
        limit = self.wanted.reward_clip
        return rewards if limit is None else rewards.clamp(-limit, limit)

    @property
    def std(self) -> float:
        """Sample standard deviation; 1 if all rewards are equal, so that nothing is divided by 0."""
        return (self.squares / (self.count - 1)) ** 0.5 if self.count > 1 and self.squares > 0 else 1.0

    @property
    def scale(self) -> float:
        """The factor of a part of a reward, which is not centred."""
        return 1.0 if self.wanted.reward_scaling == "none" else 1 / self.std

    def metrics(self) -> dict[str, float]:
        """Metrics of the statistics; empty if rewards are not scaled."""
        if self.wanted.reward_scaling == "none":
            return {}
        return {"reward/running_mean": self.mean, "reward/running_std": self.std}

    def state(self) -> dict[str, list[float]]:
        """State for a checkpoint."""
        return {STATE: [self.count, self.mean, self.squares]} if self.count else {}

    def load(self, loaded: dict[str, list[float]]) -> None:
        """Restore the statistics from a checkpoint that has them."""
        if STATE in loaded:
            self.count, self.mean, self.squares = map(float, loaded[STATE])

    def _add(self, rewards: Tensor, kept: Tensor) -> None:
        """Add one more batch of all replicas. Collectives: two SUMs over ``dp``.

        Chan et al. 1979, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances".
        """
        exact = torch.where(kept, rewards.double(), 0)
        sums = torch.stack([kept.sum(dtype=torch.float64), exact.sum()])
        number, total = all_reduce_sum(sums, self.dp).tolist()
        if not number:
            return
        mean = total / number
        squares = float(all_reduce_sum(torch.where(kept, exact - mean, 0).square().sum(), self.dp))
        count = self.count + number
        shift = mean - self.mean
        self.squares += squares + shift**2 * self.count * number / count
        self.mean += shift * number / count
        self.count = count
