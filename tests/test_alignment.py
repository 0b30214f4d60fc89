"""Rollout log-probs that are one position off are refused, and honest ones are not."""

import pytest
import torch

from megatron_rc import RolloutCorrectionConfig, correct_rollouts
from megatron_rc.alignment import MIN_PAIRS, find_lag, shift_sums
from megatron_rc.inputs import PlanInputs, Sizes, collect_shards
from megatron_rc.parallel import SequenceLayout

CONFIG = RolloutCorrectionConfig(rollout_is="token")


def sampled_log_probs(generator, shape):
    """As a language model's: many tokens nearly certain, some surprising."""
    certain = torch.rand(shape, generator=generator) < 0.6
    return -torch.where(certain, 0.02, 1.5) * torch.rand(shape, generator=generator).clamp(min=1e-9).log().neg()


def make_batch(seed=0, shape=(32, 64), noise=0.05, holes=0.1):
    generator = torch.Generator().manual_seed(seed)
    train = sampled_log_probs(generator, shape)
    rollout = (train + noise * torch.randn(shape, generator=generator)).clamp(max=0)
    return train, rollout, torch.rand(shape, generator=generator) > holes


@pytest.mark.parametrize("lag", [1, -1])
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.2])
def test_a_shift_is_refused_and_named(lag, noise):
    train, rollout, mask = make_batch(noise=noise)
    result = correct_rollouts(train, rollout.roll(lag, dims=1), mask, CONFIG)
    with pytest.raises(ValueError, match=rf"shifted by \{lag:+d} position against the training log-probs: align both"):
        result.check()
    result.metrics()
    correct_rollouts(train, rollout, mask, CONFIG).check()


def test_few_pairs_prove_nothing():
    train, rollout, mask = make_batch(shape=(16, 64), holes=0)
    assert MIN_PAIRS > 16 * 63
    correct_rollouts(train, rollout.roll(1, dims=1), mask, CONFIG).check()


@pytest.mark.parametrize("split", ["zigzag", "contiguous"])
def test_shards_compare_true_neighbours_only(split):
    """The seams between chunks and rows are no pairs; the sums of shards add up to the same verdict."""
    train, rollout, mask = make_batch(shape=(24, 64), holes=0)
    for late in (rollout, rollout.roll(1, dims=1)):
        total = {}
        for rank in range(4):
            layout = SequenceLayout.padded(24, 16, cp_rank=rank, cp_size=4, split=split)
            inputs = PlanInputs(layout.cut(train), layout.cut(late), layout.cut(mask), layout)
            (part,) = collect_shards(inputs, Sizes()).parts
            for name, value in shift_sums(part, torch.float32, 10**6).items():
                total[name] = total.get(name, 0.0) + float(value)
        # Each rank: 24 rows of two runs of 8 tokens (one of 16 where contiguous).
        assert total["shift_pairs"] == 4 * 24 * (14 if split == "zigzag" else 15)
        assert find_lag(total) == (late is not rollout)


def test_packed_sequences_are_not_neighbours():
    layout = SequenceLayout.packed([0, 3, 3, 4, 9])
    assert layout.neighbours(100).tolist() == [0, 1, 4, 5, 6, 7]
    assert SequenceLayout.padded(0, 4).neighbours(10).tolist() == []
    assert SequenceLayout.padded(3, 0).neighbours(10).tolist() == []
    assert SequenceLayout.padded(2, 1000).neighbours(10).tolist() == list(range(0, 1999, 200))


@pytest.mark.parametrize("noise", [1e-4, 0.02, 0.3, 1.0, 3.0])
def test_honest_batches_pass(noise):
    """The smallest batches that are judged, from equal policies to unrelated ones, and with outliers."""
    for seed in range(60):
        train, rollout, mask = make_batch(seed, shape=(18, 64), noise=noise)
        if seed % 3 == 0:
            rollout[::5, ::7] -= 40.0
        if seed % 3 == 1:
            rollout = sampled_log_probs(torch.Generator().manual_seed(seed + 1000), (18, 64))
        correct_rollouts(train, rollout.to(torch.bfloat16 if seed % 2 else torch.float32), mask, CONFIG).check()
