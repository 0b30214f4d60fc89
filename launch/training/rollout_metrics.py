"""Metrics of a rollout batch: rewards, lengths and ages."""

from __future__ import annotations

import torch

from megatron_rc.launch.rollouts.samples import dropped
from megatron_rc.parallel import ParallelGroups
from megatron_rc.parallel.collectives import all_reduce_max, all_reduce_sum
from megatron_rc.records.rollout import RolloutBatch


def summarize_rollouts(batch: RolloutBatch, groups: ParallelGroups, version: int | None = None) -> dict[str, float]:
    """Rewards and lengths over all replicas, and how old the tokens are at a version: one SUM and one MAX over DP."""
    rewards, lengths = batch.rewards.double(), batch.response_mask.sum(dim=1).double()
    stopped = (batch.finish_reasons == 0).double()
    ones = (~dropped(batch)).double()
    ages = torch.where(batch.response_mask, (version or 0) - batch.policy_versions, 0).double()
    columns = torch.stack([ones, ones * rewards, ones * rewards.square(), lengths, stopped, ages.sum(dim=1)])
    count, reward, squared, tokens, stops, age = all_reduce_sum(columns.sum(dim=1), groups.dp).tolist()
    ends = [torch.where(ones > 0, value, -torch.inf).max() for value in (rewards, -rewards)]
    maxima = torch.stack([*ends, ages.max()])
    highest, lowest, oldest = all_reduce_max(maxima, groups.dp).tolist()
    mean = reward / count
    staleness = {"rollout/staleness_mean": age / max(tokens, 1), "rollout/staleness_max": oldest}
    return {
        "reward/mean": mean,
        "reward/std": max(squared / count - mean**2, 0.0) ** 0.5,
        "reward/max": highest,
        "reward/min": -lowest,
        "rollout/tokens": tokens,
        "rollout/response_length": tokens / count,
        "rollout/stopped_fraction": stops / count,
        **(staleness if version is not None else {}),
    }
