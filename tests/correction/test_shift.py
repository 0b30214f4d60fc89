"""Rollout log-probs that are one position off are refused, and honest ones are not."""

import pytest
import torch

from megatron_rc import PolicyLossConfig, RolloutCorrection, RolloutCorrectionConfig, correct_rollouts
from megatron_rc.correction.inputs import AgreedCounts, PlanInputs, collect_shards
from megatron_rc.measures.data import MIN_CELLS, MIN_PAIRS, _window_places, find_lag, measure_shift, shift_sums
from megatron_rc.parallel import ParallelGroups, SequenceLayout

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


@pytest.mark.parametrize("parts", [1, 5])
@pytest.mark.parametrize("num_tokens", [1, 64, 16384, 16385, 50001, 400000])
def test_few_pairs_are_some_of_all_and_none_of_them_twice(num_tokens, parts):
    """And all of them where they are few, or where responses are what a window holds."""
    stretch = max(64, -(-num_tokens * parts // 256))
    mask = torch.zeros(num_tokens, dtype=torch.bool)
    mask[num_tokens // 3 :] = True
    places = _window_places(mask, stretch)
    assert len(places) <= num_tokens / stretch + 1
    firsts = places[:, :-1][places[:, :-1] < num_tokens - 1]
    assert len(firsts.unique()) == len(firsts)
    assert stretch > 64 or len(firsts) == num_tokens - 1
    assert mask[firsts].sum() >= 64 * (num_tokens * 2 // 3 // stretch - 1)


def test_every_pair_of_a_batch_that_is_not_large_is_compared():
    for shape in ((256, 64), (1, 2**14)):
        train, rollout, mask = make_batch(shape=shape, holes=0)
        (part,) = collect_shards(PlanInputs(train, rollout, mask), AgreedCounts()).parts
        assert shift_sums([part])[0].sum() == shape[0] * (shape[1] - 1)


@pytest.mark.parametrize("lag", [1, -1])
@pytest.mark.parametrize(
    ("shape", "noise"), [((32, 64), 0.0), ((32, 64), 0.2), ((16, 64), 0.05), ((128, 8), 0.05), ((1, 1024), 0.05)]
)
def test_a_shift_is_refused_and_named(shape, noise, lag):
    """A thousand tokens are enough."""
    train, rollout, mask = make_batch(shape=shape, noise=noise)
    result = correct_rollouts(train, rollout.roll(lag, dims=1), mask, CONFIG)
    with pytest.raises(ValueError, match=rf"shifted by \{lag:+d} position against the training log-probs: align both"):
        result.check()
    result.metrics()
    correct_rollouts(train, rollout, mask, CONFIG).check()


def cells_of(crosswise, lag=1, cells=200, pairs=4.0, more=()):
    """Sums of cells whose straight distance is 1 a pair on average."""
    late, early = (crosswise, 3.0)[::lag]
    return list(zip([0.0] * 5, *[[pairs * value for value in (1, 0.8, late, early, 1.2)]] * cells, *more, strict=True))


@pytest.mark.parametrize("lag", [1, -1])
def test_less_than_half_of_the_straight_distance_is_a_lag(lag):
    assert find_lag(cells_of(0.499, lag)) == lag
    assert find_lag(cells_of(0.501, lag)) == 0
    assert find_lag(cells_of(0.499, lag, cells=MIN_CELLS)) == lag
    assert find_lag(cells_of(0.499, lag, cells=MIN_CELLS - 1, pairs=100.0)) == 0
    assert find_lag(cells_of(0.499, lag, pairs=(MIN_PAIRS - 1) / 200)) == 0


def test_pairs_that_look_alike_count_once():
    """A cell of a thousand pairs weighs as much as any other one."""
    sums = cells_of(1.5, more=[[1000.0, 1000.0, 0.0, 3000.0, 1000.0]])
    assert sum(sums[2]) < 0.8 * sum(sums[1])
    assert measure_shift(sums).share == pytest.approx(1.5 * 200 / 201)


@pytest.mark.parametrize("lag", [1, -1])
@pytest.mark.parametrize("noise", [0.0, 1e-6])
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
def test_shards_compare_true_neighbours_only(split):
    """The seams between chunks and rows are no pairs; the sums of shards add up to the same verdict."""
    train, rollout, mask = make_batch(shape=(24, 64), holes=0)
    for late in (rollout, rollout.roll(1, dims=1)):
        total = torch.zeros(5, 256, dtype=torch.float64)
        for rank in range(4):
            layout = SequenceLayout.padded(24, 16, cp_rank=rank, cp_size=4, split=split)
            inputs = PlanInputs(layout.cut(train), layout.cut(late), layout.cut(mask), layout)
            parts = collect_shards(inputs, AgreedCounts()).parts
            total += shift_sums(parts)
        # Each rank: 24 rows of two runs of 8 tokens (one of 16 where contiguous).
        assert total[0].sum() == 4 * 24 * (14 if split == "zigzag" else 15)
        assert find_lag(total.tolist()) == (late is not rollout)


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("split", ["zigzag", "contiguous"])
def test_neighbours_are_next_positions_of_one_sequence(cp_size, split):
    """Sequences of many lengths, none at all, two chunks each under zigzag."""
    local = [0, 6, 2, 2, 0, 4, 8, 8, 2]
    bounds = [sum(local[:index]) for index in range(len(local) + 1)]
    for layout in (
        SequenceLayout.packed(bounds, cp_rank=0, cp_size=cp_size, split=split),
        SequenceLayout.padded(3, 8, cp_rank=0, cp_size=cp_size, split=split),
        SequenceLayout.padded(0, 8, cp_rank=0, cp_size=cp_size, split=split),
        SequenceLayout.packed([0], cp_rank=0, cp_size=cp_size, split=split),
    ):
        here, of = layout.positions().view(-1), layout.sequence_index
        want = (here[1:] == here[:-1] + 1) & (of[1:] == of[:-1])
        want = torch.cat([want, torch.zeros(min(len(here), 1), dtype=torch.bool)])
        assert torch.equal(layout.followed(torch.arange(len(here))), want)


@pytest.mark.parametrize(
    ("shape", "valid"), [((64, 2048), slice(1638, None)), ((2048, 128), slice(77, None)), ((4096, 128), slice(12, 128))]
)
@pytest.mark.parametrize("pieces", [1, 64])
def test_a_shift_is_seen_wherever_the_responses_lie(shape, valid, pieces):
    train, rollout, _ = make_batch(shape=shape)
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[:, valid] = True
    late = rollout.roll(1, dims=1)
    parts = [list(tensor.chunk(pieces)) for tensor in (train, late, mask)]
    with pytest.raises(ValueError, match="shifted by"):
        correct_rollouts(*parts, CONFIG).check()


@pytest.mark.parametrize(("count", "length"), [(16, 65), (64, 64), (256, 64), (200, 8)])
def test_a_shift_is_seen_in_short_micro_batches(count, length):
    train, rollout, mask = make_batch(shape=(count, length), holes=0)
    for given, lag in ((rollout, 0), (rollout.roll(1, dims=1), 1)):
        parts = [list(tensor.split(1)) for tensor in (train, given, mask)]
        assert find_lag(correct_rollouts(*parts, CONFIG).on_host.data.shift) == lag


@pytest.mark.parametrize(("lag", "count"), [(0, 64), (1, 64), (-1, 64), (1, 16)])
def test_a_shift_is_seen_over_all_micro_batches_of_a_step(lag, count):
    train, rollout, mask = make_batch(shape=(count, 65), holes=0)
    rollout = rollout.roll(lag, dims=1)
    config = RolloutCorrectionConfig(rollout_is=None, bypass_mode=True, loss_type="reinforce")
    correction = RolloutCorrection(config, ParallelGroups(), loss=PolicyLossConfig())
    correction.plan(PlanInputs(None, rollout, mask))
    for part in zip(train.split(1), rollout.split(1), mask.split(1), strict=True):
        correction.in_loss(*part)
    correction.finish_step()
    assert find_lag(correction.step.on_host.data.shift) == lag


@pytest.mark.parametrize(
    ("shape", "trained"), [((256, 8192), 100), ((512, 2048), 20), ((64, 2048), 30), ((64, 8192), 120)]
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_shift_is_seen_where_few_tokens_are_trained(shape, trained, packed):
    values = make_batch(shape=(shape[0], 4 * trained))[:2]
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[:, shape[1] // 2 :][:, :trained] = True
    train, rollout = (torch.zeros(shape).masked_scatter_(mask, one[:, :trained]) for one in values)
    late = torch.zeros(shape).masked_scatter_(mask, values[1].roll(1, dims=1)[:, :trained])
    layout = None
    if packed:
        layout = SequenceLayout.packed(range(0, mask.numel() + 1, shape[1]))
        train, rollout, late, mask = (one.view(-1) for one in (train, rollout, late, mask))
    for given, lag in ((rollout, 0), (late, 1)):
        (part,) = collect_shards(PlanInputs(train, given, mask, layout), AgreedCounts()).parts
        assert find_lag(shift_sums([part]).tolist()) == lag


@pytest.mark.parametrize("noise", [1e-4, 0.02, 0.3, 1.0, 3.0])
def test_honest_batches_pass(noise):
    """The smallest batches that are judged, from equal policies to unrelated ones, and with outliers."""
    for seed in range(60):
        train, rollout, mask = make_batch(seed, shape=(11, 64), noise=noise)
        if seed % 3 == 0:
            rollout[::5, ::7] -= 40.0
        if seed % 3 == 1:
            rollout = sampled_log_probs(torch.Generator().manual_seed(seed + 1000), (11, 64))
        if seed % 2:
            rollout = rollout.to(torch.bfloat16).float()
        correct_rollouts(train, rollout, mask, CONFIG).check()
