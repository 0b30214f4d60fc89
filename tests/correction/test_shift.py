"""Rollout log-probs that are one position off are refused, and honest ones are not."""

import pytest
import torch

from megatron_rc import (
    AgreedCounts,
    PlanInputs,
    RolloutCorrectionConfig,
    collect_shards,
    correct_rollouts,
    sequence_sums,
)
from megatron_rc.measures.shift import MIN_DIFFERENT, MIN_PAIRS, find_lag
from megatron_rc.parallel import SequenceLayout
from megatron_rc.parallel.collectives import merged, on_host

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


def lag_of(train, rollout, mask, layout=None):
    """The lag that the test finds in a batch, or in micro-batches."""
    return find_lag(correct_rollouts(train, rollout, mask, CONFIG, layout).on_host.tokens)


@pytest.mark.parametrize("lag", [1, -1])
@pytest.mark.parametrize(("shape", "noise"), [((32, 64), 0.0), ((32, 64), 0.2), ((128, 8), 0.05), ((1, 1024), 0.05)])
def test_a_shift_is_refused_and_named(shape, noise, lag):
    """A thousand tokens are enough."""
    train, rollout, mask = make_batch(shape=shape, noise=noise)
    result = correct_rollouts(train, rollout.roll(lag, dims=1), mask, CONFIG)
    with pytest.raises(ValueError, match=rf"shifted by \{lag:+d} position against the training log-probs: align both"):
        result.check()
    result.metrics()
    correct_rollouts(train, rollout, mask, CONFIG).check()


@pytest.mark.parametrize("lag", [1, -1])
@pytest.mark.parametrize("num_pairs", [MIN_PAIRS - 1, MIN_PAIRS])
def test_few_pairs_prove_nothing(lag, num_pairs):
    train, rollout, _ = make_batch(shape=(1, num_pairs + 1), holes=0)
    reported_lag = lag_of(train, rollout.roll(lag, dims=1), torch.ones_like(train, dtype=torch.bool))
    assert reported_lag == (lag if num_pairs == MIN_PAIRS else 0)


@pytest.mark.parametrize("num_different", [MIN_DIFFERENT - 10, 2 * MIN_DIFFERENT])
def test_few_different_log_ratios_prove_nothing(num_different):
    """A shifted response again and again: as many different numbers as it has tokens."""
    train, rollout, mask = make_batch(shape=(1, num_different), holes=0)
    values = (train, rollout.roll(1, dims=1), mask)
    assert lag_of(*(value.repeat(20, 1) for value in values)) == (num_different > MIN_DIFFERENT)


@pytest.mark.parametrize(("lag", "noise", "is_refused"), [(1, 0.5, True), (-1, 1.5, False)])
def test_less_than_half_of_the_straight_distance_is_a_lag(lag, noise, is_refused):
    """Behind more noise than tokens differ a shift cannot be seen."""
    train, rollout, mask = make_batch(noise=noise)
    assert lag_of(train, rollout.roll(lag, dims=1), mask) == lag * is_refused


@pytest.mark.parametrize(("lag", "noise"), [(1, 0.0), (-1, 1e-6)])
def test_the_same_few_answers_are_no_shift(lag, noise):
    """Ten answers of nine tokens, which resemble shifted ones, 64 times each; the trainer rounds each copy anew."""
    train, rollout, mask = (values.repeat(64, 1) for values in make_batch(shape=(10, 10), holes=0))
    train = train * (1 + noise * torch.randn(train.shape, generator=torch.Generator().manual_seed(1)))
    late = rollout.roll(lag, dims=1)
    correct_rollouts(train, late, mask, CONFIG).check()
    # In 64 micro-batches, as on 64 ranks.
    parts = [list(tensor.chunk(64)) for tensor in (train, late, mask)]
    correct_rollouts(*parts, CONFIG).check()


@pytest.mark.parametrize("split", ["zigzag", "contiguous"])
@pytest.mark.parametrize("lag", [0, 1, -1])
def test_the_sums_of_shards_give_the_same_verdict(split, lag):
    """Where two chunks meet on a rank, a pair is compared that is none."""
    train, rollout, mask = make_batch(shape=(24, 64), holes=0)
    late = rollout.roll(lag, dims=1)
    layouts = [SequenceLayout.padded(24, 16, cp_rank=rank, cp_size=4, split=split) for rank in range(4)]
    measures = []
    for layout in layouts:
        inputs = PlanInputs(*(layout.cut(values) for values in (train, late, mask)), layout)
        measures.append(sequence_sums(collect_shards(inputs, AgreedCounts()), CONFIG).tokens)
    assert find_lag(on_host(merged(measures))) == lag


@pytest.mark.parametrize(("shape", "trained", "packed"), [((512, 2048), 20, False), ((64, 2048), 30, True)])
def test_a_shift_is_seen_where_few_tokens_are_trained(shape, trained, packed):
    values = make_batch(shape=(shape[0], 4 * trained))[:2]
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[:, shape[1] // 2 :][:, :trained] = True
    train, rollout = (torch.zeros(shape).masked_scatter_(mask, log_probs[:, :trained]) for log_probs in values)
    late = torch.zeros(shape).masked_scatter_(mask, values[1].roll(1, dims=1)[:, :trained])
    layout = None
    if packed:
        layout = SequenceLayout.packed(range(0, mask.numel() + 1, shape[1]))
        train, rollout, late, mask = (log_probs.view(-1) for log_probs in (train, rollout, late, mask))
    for rollout_log_probs, lag in ((rollout, 0), (late, 1)):
        assert lag_of(train, rollout_log_probs, mask, layout) == lag


@pytest.mark.parametrize("noise", [1e-4, 0.02, 0.3, 3.0])
def test_honest_batches_pass(noise):
    """The smallest batches that are judged, from equal policies to unrelated ones, and with outliers."""
    for seed in range(12):
        train, rollout, mask = make_batch(seed, shape=(11, 64), noise=noise)
        if seed % 3 == 0:
            rollout[::5, ::7] -= 40.0
        if seed % 3 == 1:
            rollout = sampled_log_probs(torch.Generator().manual_seed(seed + 1000), (11, 64))
        if seed % 2:
            rollout = rollout.to(torch.bfloat16).float()
        correct_rollouts(train, rollout, mask, CONFIG).check()
