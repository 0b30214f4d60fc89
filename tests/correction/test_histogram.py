"""Quantiles from bins: as near as they say, mergeable, and for any number of tokens."""

import pytest
import torch

from megatron_rc import RolloutCorrectionConfig, correct_rollouts
from megatron_rc.correction.token_pass.histogram import (
    NUM_BINS,
    NUM_CODES,
    QUANTILES,
    CodeCounter,
    bins_from_codes,
    codes_of,
    quantiles,
)

RELATIVE, ABSOLUTE = 1 / 32, 2**-14


def bins_of(values, num_zeros=0):
    counter = CodeCounter(values.device)
    counter.add(codes_of(values, torch.empty(values.shape, dtype=torch.int32)).long())
    assert counter.counts.shape[1:] == (NUM_CODES,)
    return bins_from_codes(counter.counts, torch.tensor(num_zeros))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-6, 1e-4, 1e-2, 1.0, 6.0])
@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_quantiles_keep_their_error_bound(scale, shift, dtype):
    generator = torch.Generator().manual_seed(int(1e6 * scale) + shift)
    values = scale * (torch.randn(20001, generator=generator) + shift).to(dtype)
    bins = bins_of(torch.cat([values, torch.zeros(77, dtype=dtype)]), num_zeros=77)
    assert bins.shape == (NUM_BINS,)
    assert float(bins.sum()) == 20001
    ordered = values.double().sort().values
    for percent in QUANTILES:
        got = quantiles(bins.tolist())[f"log_ratio_p{percent:02d}"]
        # Between the neighbours of the exact quantile, widened by the width of a bin.
        below, above = ordered[200 * percent - 1], ordered[200 * percent + 1]
        width = max(RELATIVE * max(abs(float(below)), abs(float(above))), ABSOLUTE)
        assert float(below) - width <= got <= float(above) + width


def test_histograms_add_up():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(bins_of(values[:300]) + bins_of(values[300:]), bins_of(values))


def test_values_off_the_scale_fall_into_the_outermost_bins():
    bins = bins_of(torch.tensor([-1e4, -33.0, 0.0, -0.0, 1e-30, 40.0, 1e30]))
    assert (bins[0], bins[NUM_BINS // 2], bins[-1]) == (2, 3, 2)
    assert set(quantiles([0.0] * NUM_BINS).values()) == {0.0}


def test_more_tokens_than_a_sort_takes():
    """torch.quantile refuses 2²⁴ + 1 values."""
    size = 2**24 + 1
    train = torch.linspace(-2, -1, size).view(1, size)
    rollout = torch.full((1, size), -1.5)
    config = RolloutCorrectionConfig(rollout_is=None, metric_prefix="")
    result = correct_rollouts(train, rollout, torch.ones(1, size, dtype=torch.bool), config)
    metrics = result.metrics()
    assert metrics["num_tokens"] == size
    for percent in QUANTILES:
        assert metrics[f"log_ratio_p{percent:02d}"] == pytest.approx(percent / 100 - 0.5, rel=RELATIVE, abs=ABSOLUTE)
