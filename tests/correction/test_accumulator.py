"""Blocks of any size add up to the same, and beyond what float32 can count."""

import pytest
import torch

from megatron_rc import RolloutCorrectionConfig, correct_rollouts
from megatron_rc.correction.decisions import BlockSequences
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


@pytest.mark.parametrize("length", [1285, 2048, 2062], ids=str)
def test_rows_in_blocks_add_up(length, monkeypatch):
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
    """Rows of several lengths, and of no token."""
    parts = [draw(*shape) for shape in shapes]
    together = correct_rollouts(*(list(tensors) for tensors in zip(*parts, strict=True)), CONFIG)
    alone = [correct_rollouts(*part, CONFIG) for part in parts]
    for mask, weights, result in zip(together.mask, together.weights, alone, strict=True):
        assert torch.equal(mask, result.mask)
        torch.testing.assert_close(weights, result.weights, rtol=1e-12, atol=0)
    torch.testing.assert_close(together.denominators, sum(result.denominators for result in alone))


@pytest.mark.parametrize("length", [2**16, 2**20], ids=str)
@pytest.mark.parametrize("through", ["eager", "compiled"])
def test_long_rows_add_up_to_six_digits(length, through):
    """One after the other they would be off by more: torch adds pairwise, a compiled loop in vectors."""
    generator = torch.Generator().manual_seed(length)
    values = torch.rand(2, length, generator=generator)
    add = BlockSequences().sum
    found = (torch.compile(add, dynamic=False) if through == "compiled" else add)(values)
    torch.testing.assert_close(found.double(), values.double().sum(1), rtol=1e-6, atol=0)


def test_counts_go_beyond_float32():
    """2²⁴ + 1 is the first whole number that float32 has not: sequences are added up in float64."""
    mask = torch.ones(17, 2**20, dtype=torch.bool)
    mask[-1, 1:] = False
    zeros = torch.zeros(17, 2**20)
    assert (
        correct_rollouts(zeros, zeros, mask, RolloutCorrectionConfig()).metrics()["rollout_corr/num_tokens"]
        == 2**24 + 1
    )
