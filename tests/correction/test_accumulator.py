"""What blocks add up to: whatever their runs, and beyond what float32 can count."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megatron_rc import RolloutCorrectionConfig, correct_rollouts
from megatron_rc.batch.local import _over_all
from megatron_rc.correction.tokens import Runs
from megatron_rc.parallel.collectives import largest, smallest
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


@dataclass(frozen=True)
class Found:
    total: Tensor
    most: Tensor = largest()
    least: Tensor = smallest()


@pytest.mark.parametrize("run", [1024, 64])
def test_sums_are_counted_beyond_float32(run):
    """2²⁴ + 1 is the first whole number that float32 has not: runs are added up in float64."""
    values = torch.zeros(2**14 + 1, run)
    values[:-1] = 1024 / run
    values[-1, 0] = 1
    each = Runs().sum(values)
    assert each.dtype == torch.float32
    found = _over_all([Found(each, each, each)] * 2)
    assert (float(found.total), float(found.most), float(found.least)) == (2**25 + 2, 1024, 1)
