"""Metrics of a rollout batch: rewards, lengths and ages of its responses."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from megatron_rc.launch.rollouts.samples import cut_off, dropped
from megatron_rc.measures.histogram import NUM_BINS, Distribution, Histogram, bins_of, even_bins
from megatron_rc.parallel import ParallelGroups
from megatron_rc.parallel.collectives import all_reduce_max, all_reduce_sum
from megatron_rc.parallel.groups import group_rank, group_size
from megatron_rc.records.rollout import RolloutBatch


class SampledResponse(NamedTuple):
    """A response of a rollout batch."""

    group_id: float
    num_tokens: float  # number of sampled tokens
    age: float  # sum over these tokens of the steps between the weights that sampled and those that train
    is_dropped: float  # 1: it was dropped, and has no token
    is_cut_off: float  # 1: it ended at the length limit


class RolloutSummary(NamedTuple):
    """Summary of a rollout batch over all replicas."""

    metrics: dict[str, float]  # means, extremes and sums
    distributions: dict[str, Distribution]  # histograms of the responses' rewards and lengths
    responses: list[SampledResponse]  # all responses, replica after replica


def summarize_rollouts(batch: RolloutBatch, groups: ParallelGroups, version: int | None = None) -> RolloutSummary:
    """Summarize rewards and lengths, and the tokens' age at ``version``. Collectives: one MAX and one SUM over DP."""
    rewards = batch.rewards.double()
    lengths = batch.response_mask.sum(dim=1).double()
    stopped = (batch.finish_reasons == 0).double()
    is_kept = (~dropped(batch)).double()
    ages = torch.where(batch.response_mask, (version or 0) - batch.policy_versions, 0).double()
    extremes = [torch.where(is_kept > 0, value, -torch.inf).max() for value in (rewards, -rewards, lengths, -lengths)]
    largest = all_reduce_max(torch.stack([*extremes, ages.max()]), groups.dp).tolist()
    highest, minus_lowest, longest, minus_shortest, oldest = largest
    scale_of_rewards = _scale(max(highest, minus_lowest))
    scale_of_lengths = _scale(longest)
    turns = (batch.turn_ids.amax(dim=1) + 1).double()
    columns = torch.stack(
        [is_kept, is_kept * rewards, is_kept * rewards.square(), lengths, stopped, turns, ages.sum(dim=1)]
    )
    bins_of_rewards = bins_of(rewards * scale_of_rewards, is_kept[None])[0]
    bins_of_lengths = bins_of(lengths * scale_of_lengths, is_kept[None])[0]
    # Each replica fills its own rows of a table of zeros, so that the sum is the table of all replicas.
    table = lengths.new_zeros(group_size(groups.dp), len(lengths), len(SampledResponse._fields))
    # In the order of the fields of SampledResponse.
    fields = [batch.group_ids.double(), lengths, ages.sum(dim=1), 1 - is_kept, cut_off(batch).double()]
    table[group_rank(groups.dp)] = torch.stack(fields, dim=1)
    local_sums = torch.cat([columns.sum(dim=1), bins_of_rewards, bins_of_lengths, table.flatten()])
    sums = all_reduce_sum(local_sums, groups.dp).tolist()
    count, reward, squared, tokens, stops, turn, age = sums[:7]
    metrics = {
        "reward/mean": reward / count,
        "reward/std": max(squared / count - (reward / count) ** 2, 0.0) ** 0.5,
        "reward/max": highest,
        "reward/min": -minus_lowest,
        "rollout/tokens": tokens,
        "rollout/response_length": tokens / count,
        "rollout/stopped_fraction": stops / count,
        "rollout/turns": turn / count,
    }
    if version is not None:
        metrics |= {"rollout/staleness_mean": age / max(tokens, 1), "rollout/staleness_max": oldest}
    of_rewards = Histogram(sums[7 : 7 + NUM_BINS])
    of_lengths = Histogram(sums[7 + NUM_BINS : 7 + 2 * NUM_BINS])
    num_fields = len(SampledResponse._fields)
    flat_table = sums[7 + 2 * NUM_BINS :]
    responses = [
        SampledResponse(*flat_table[begin : begin + num_fields]) for begin in range(0, len(flat_table), num_fields)
    ]
    shortest = -minus_shortest
    distributions = {
        "reward/rewards": even_bins(
            -minus_lowest, highest, count, lambda reward: of_rewards.below(reward * scale_of_rewards)
        ),
        # One bin per length, or fewer if there are many lengths.
        "rollout/response_lengths": even_bins(
            shortest - 0.5,
            longest + 0.5,
            count,
            lambda length: of_lengths.below(length * scale_of_lengths),
            most=int(longest - shortest) + 1,
        ),
    }
    return RolloutSummary(metrics, distributions, responses)


def _scale(largest: float) -> float:
    """Power of two that scales ``largest`` into [16, 32), near the end of the bins."""
    return 2.0 ** (5 - math.frexp(largest)[1])
