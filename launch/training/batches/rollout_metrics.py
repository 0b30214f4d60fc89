"""Metrics of a rollout batch: rewards, lengths and ages of its responses."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from megatron_rc.launch.rollouts.samples import dropped
from megatron_rc.measures.histogram import NUM_BINS, Distribution, Histogram, bins_of, even_bins
from megatron_rc.parallel import ParallelGroups
from megatron_rc.parallel.collectives import all_reduce_max, all_reduce_sum
from megatron_rc.records.rollout import RolloutBatch


class RolloutSummary(NamedTuple):
    """Summary of a rollout batch over all replicas."""

    metrics: dict[str, float]  # means, extremes and sums
    distributions: dict[str, Distribution]  # histograms of the responses' rewards and lengths


def summarize_rollouts(batch: RolloutBatch, groups: ParallelGroups, version: int | None = None) -> RolloutSummary:
    """Summarize rewards and lengths, and the tokens' age at ``version``. Collectives: one MAX and one SUM over DP."""
    rewards, lengths = batch.rewards.double(), batch.response_mask.sum(dim=1).double()
    stopped = (batch.finish_reasons == 0).double()
    ones = (~dropped(batch)).double()
    ages = torch.where(batch.response_mask, (version or 0) - batch.policy_versions, 0).double()
    ends = [torch.where(ones > 0, value, -torch.inf).max() for value in (rewards, -rewards, lengths, -lengths)]
    highest, lowest, longest, shortest, oldest = all_reduce_max(torch.stack([*ends, ages.max()]), groups.dp).tolist()
    scales = _scale(max(highest, lowest)), _scale(longest)
    turns = (batch.turn_ids.amax(dim=1) + 1).double()
    columns = torch.stack([ones, ones * rewards, ones * rewards.square(), lengths, stopped, turns, ages.sum(dim=1)])
    bins = [bins_of(values * scale, ones[None])[0] for values, scale in zip((rewards, lengths), scales, strict=True)]
    sums = all_reduce_sum(torch.cat([columns.sum(dim=1), *bins]), groups.dp).tolist()
    count, reward, squared, tokens, stops, turn, age = sums[:7]
    metrics = {
        "reward/mean": reward / count,
        "reward/std": max(squared / count - (reward / count) ** 2, 0.0) ** 0.5,
        "reward/max": highest,
        "reward/min": -lowest,
        "rollout/tokens": tokens,
        "rollout/response_length": tokens / count,
        "rollout/stopped_fraction": stops / count,
        "rollout/turns": turn / count,
    }
    if version is not None:
        metrics |= {"rollout/staleness_mean": age / max(tokens, 1), "rollout/staleness_max": oldest}
    of_rewards, of_lengths = Histogram(sums[7 : 7 + NUM_BINS]), Histogram(sums[7 + NUM_BINS :])
    # One bin per length, or fewer if there are many lengths.
    ends_of_lengths, most = (-shortest - 0.5, longest + 0.5), int(longest + shortest) + 1
    distributions = {
        "reward/rewards": even_bins(-lowest, highest, count, lambda value: of_rewards.below(value * scales[0])),
        "rollout/response_lengths": even_bins(
            *ends_of_lengths, count, lambda length: of_lengths.below(length * scales[1]), most=most
        ),
    }
    return RolloutSummary(metrics, distributions)


def _scale(largest: float) -> float:
    """Power of two that scales ``largest`` into [16, 32), near the end of the bins."""
    return 2.0 ** (5 - math.frexp(largest)[1])
