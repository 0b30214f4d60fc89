"""What blocks add up to: whatever their runs, and beyond what float32 can count."""

import pytest
import torch

from megatron_rc import RolloutCorrectionConfig, correct_rollouts
from megatron_rc.correction.inputs import AgreedCounts, PlanInputs
from megatron_rc.correction.shards import collect_shards
from megatron_rc.correction.token_pass.accumulator import Accumulator
from megatron_rc.correction.token_pass.terms import BlockValues, term_names
from tests.support.correction_comparison import use_blocks

CONFIG = RolloutCorrectionConfig(
    rollout_is="token", rollout_rs="token_k1,seq_max_k2,seq_mean_k3", rollout_rs_threshold="0.5_2,0.55,0.06"
)


def draw(rows, length):
    """(train, rollout, mask) in float64."""
    generator = torch.Generator().manual_seed(length)
    rollout = -3 * torch.rand(rows, length, generator=generator, dtype=torch.float64) - 1e-3
    train = (rollout + 0.3 * torch.randn(rows, length, generator=generator, dtype=torch.float64)).clamp(max=0)
    return train, rollout, torch.rand(rows, length, generator=generator) < 0.7


@pytest.mark.parametrize("length", [1285, 2048, 2062], ids=["five runs of 257", "two runs of 1024", "one run"])
def test_rows_of_several_runs_add_up(length, monkeypatch):
    """Whole rows in blocks of one, three and all, against pieces of 97 tokens."""
    batch = draw(6, length)
    found = []
    for num_tokens in (97, length, 3 * length, 10**6):
        use_blocks(monkeypatch, num_tokens)
        found.append(correct_rollouts(*batch, CONFIG))
    assert 0 < found[0].metrics()["rollout_corr/rollout_rs_seq_max_k2_masked_fraction"] < 1
    for result in found[1:]:
        assert torch.equal(result.mask, found[0].mask)
        assert result.metrics() == pytest.approx(found[0].metrics(), rel=1e-9)


@pytest.mark.parametrize(
    "shapes", [[(3, 1024), (2, 2048)], [(2, 2048), (4, 0), (2, 2062), (1, 64)], [(3, 0), (0, 64)]], ids=str
)
def test_micro_batches_of_different_widths_add_up(shapes):
    """Rows of one run, of two, of none, and of one that is longer than runs are else."""
    parts = [draw(*shape) for shape in shapes]
    together = correct_rollouts(*(list(tensors) for tensors in zip(*parts, strict=True)), CONFIG)
    alone = [correct_rollouts(*part, CONFIG) for part in parts]
    for mask, weights, result in zip(together.mask, together.weights, alone, strict=True):
        assert torch.equal(mask, result.mask)
        torch.testing.assert_close(weights, result.weights, rtol=1e-12, atol=0)
    torch.testing.assert_close(together.denominators, sum(result.denominators for result in alone))


@pytest.mark.parametrize("kept", [True, False], ids=["long runs, added up at the end", "short runs, at once"])
def test_sums_are_counted_beyond_float32(kept):
    """2²⁴ + 1 is the first whole number that float32 has not; every kind of sum has it, from runs and from blocks."""
    nothing = torch.zeros(2, 4)
    names = term_names(CONFIG, token_advantages=False)
    total = Accumulator(collect_shards(PlanInputs(nothing, nothing, nothing.bool()), AgreedCounts()), names)
    many = torch.tensor([2.0**24, 1.0, 2.0**24, 0.0])
    codes = torch.zeros(4, 1024 if kept else 64, dtype=torch.int64)
    total.add(BlockValues(tuple((many,) * len(names) for names in names), codes), slice(0, 2))
    sums = total.sums()
    exact, sequence, *_ = names
    assert sums.sequences.tolist() == [[2**24 + 1, 2**24]] * len(exact + sequence)
    assert sums.sequence_max.tolist() == [[2**24, 2**24]]
    assert set(sums.batch.tolist()) == {2**25 + 1}
    assert set(sums.batch_max.tolist()) == {2**24}
    assert float(sums.bins.sum()) == 2**25 + 1, "as many as are valid"
