"""What a rollout batch is like: rewards, lengths and ages."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_rc.correction.histogram import NUM_BINS, Distribution, Histogram, bins_of, even_bins
from megatron_rc.launch.rollouts.samples import dropped
from megatron_rc.parallel import ParallelGroups
from megatron_rc.parallel.collectives import all_reduce_max, all_reduce_sum
from megatron_rc.records.rollout import RolloutBatch

# So that the bins tell lengths from 1 token to half a million apart.
_LENGTHS = 2.0**-14


class RolloutSummary(NamedTuple):
    """Of all replicas.

    Attributes:
        metrics: sums and extremes, and what follows from them.
        distributions: of the responses' rewards and lengths.
    """

    metrics: dict[str, float]
    distributions: dict[str, Distribution]


def summarize_rollouts(batch: RolloutBatch, groups: ParallelGroups, version: int | None = None) -> RolloutSummary:
    """Rewards and lengths over all replicas, and how old the tokens are at a version: one SUM and one MAX over DP."""
    rewards, lengths = batch.rewards.double(), batch.response_mask.sum(dim=1).double()
    stopped = (batch.finish_reasons == 0).double()
    ones = (~dropped(batch)).double()
    ages = torch.where(batch.response_mask, (version or 0) - batch.policy_versions, 0).double()
    columns = torch.stack([ones, ones * rewards, ones * rewards.square(), lengths, stopped, ages.sum(dim=1)])
    bins = torch.cat([bins_of(values, ones[None])[0].cumsum(0) for values in (rewards, lengths * _LENGTHS)])
    sums = all_reduce_sum(torch.cat([columns.sum(dim=1), bins]), groups.dp).tolist()
    count, reward, squared, tokens, stops, age = sums[:6]
    ends = [torch.where(ones > 0, value, -torch.inf).max() for value in (rewards, -rewards, lengths, -lengths)]
    maxima = torch.stack([*ends, ages.max()])
    highest, lowest, longest, shortest, oldest = all_reduce_max(maxima, groups.dp).tolist()
    mean = reward / count
    staleness = {"rollout/staleness_mean": age / max(tokens, 1), "rollout/staleness_max": oldest}
    metrics = {
        "reward/mean": mean,
        "reward/std": max(squared / count - mean**2, 0.0) ** 0.5,
        "reward/max": highest,
        "reward/min": -lowest,
        "rollout/tokens": tokens,
        "rollout/response_length": tokens / count,
        "rollout/stopped_fraction": stops / count,
        **(staleness if version is not None else {}),
    }
    of_rewards, of_lengths = Histogram(sums[6 : 6 + NUM_BINS]), Histogram(sums[6 + NUM_BINS :])
    distributions = {
        "reward/rewards": even_bins(-lowest, highest, count, of_rewards.below),
        # Each length in the middle of a bin, or several.
        "rollout/response_lengths": even_bins(
            -shortest - 0.5,
            longest + 0.5,
            count,
            lambda length: of_lengths.below(length * _LENGTHS),
            most=int(longest + shortest) + 1,
        ),
    }
    return RolloutSummary(metrics, distributions)
