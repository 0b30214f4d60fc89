"""Rewards and lengths of a rollout batch: the same for every layout, by two collectives."""

import itertools
from dataclasses import replace

import pytest
import torch

from megatron_rc.launch.training.batches.rollout_metrics import summarize_rollouts
from megatron_rc.parallel import ParallelGroups
from megatron_rc.parallel.groups import group_rank, group_size
from tests.support.on_rank import recorded
from tests.support.ranks import Layout
from tests.support.recorded_training import SEQUENCES, recorded_batch


def summarized(rewards):
    """The summary of this rank's share, and the collectives that were made for it."""
    groups = ParallelGroups.from_megatron()
    index = group_rank(groups.dp)
    size = group_size(groups.dp)
    rows = slice(index * SEQUENCES // size, (index + 1) * SEQUENCES // size)
    batch = replace(recorded_batch(0, index, size), rewards=torch.tensor(rewards)[rows])
    with recorded() as calls:
        return summarize_rollouts(batch, groups, 3), [kind for kind, *_ in calls]


REWARDS = [0.0, 1.0, 0.25, -0.5, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 3.5, 0.0, 0.1, 0.0, 1.0, -2.0]


def test_rewards_and_lengths_are_those_of_one_process(ranks):
    (whole, _), *_ = ranks.run(summarized, Layout(), REWARDS)
    lengths = recorded_batch(0).response_mask.sum(dim=1).tolist()
    edges, counts = whole.distributions["rollout/response_lengths"]
    assert edges == [length - 0.5 for length in range(min(lengths), max(lengths) + 2)]
    assert counts == [lengths.count(length) for length in range(min(lengths), max(lengths) + 1)]
    edges, counts = whole.distributions["reward/rewards"]
    assert (edges[0], edges[-1], sum(counts)) == (-2.0, 3.5, 16)
    # The bins that rewards are counted in are a 32nd of the reward wide.
    for index, edge in enumerate(edges[1:-1]):
        until = sum(counts[: index + 1])
        low, high = (sum(reward < edge + side * abs(edge) / 30 for reward in REWARDS) for side in (-1, 1))
        assert low - 1e-6 <= until <= high + 1e-6
    for summary, reduced in ranks.run(summarized, Layout(cp=2, dp=2), REWARDS):
        assert summary == whole
        assert sorted(reduced) == ["MAX", "SUM"]
    # Rewards that are all alike have a distribution.
    (summary, _), *_ = ranks.run(summarized, Layout(), [1.0] * SEQUENCES)
    edges, counts = summary.distributions["reward/rewards"]
    assert (edges[0], edges[-1], sum(counts)) == (0.5, 1.5, 16)


@pytest.mark.parametrize("largest", [1e-6, 30.0, 100.0, 1e9])
def test_rewards_of_any_size_are_counted_where_they_are(largest):
    rewards = torch.linspace(0.0, largest, SEQUENCES)
    summary = summarize_rollouts(replace(recorded_batch(0), rewards=rewards), ParallelGroups(), 3)
    edges, counts = summary.distributions["reward/rewards"]
    for edge, until in zip(edges[1:], itertools.accumulate(counts), strict=True):
        # To the width of the bin that it is counted in.
        low, high = (sum(reward < edge * (1 + side / 30) for reward in rewards.tolist()) for side in (-1, 1))
        assert low - 1e-6 <= until <= high + 1e-6
