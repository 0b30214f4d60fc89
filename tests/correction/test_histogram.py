"""Quantiles and distributions from bins: as near as a bin is wide, for any number of tokens."""

import math

import pytest
import torch

from megatron_rc import RolloutCorrectionConfig, correct_rollouts
from tests.support.correction_cases import clear_batch
from tests.support.correction_comparison import config_of, correct

# the width of a bin
RELATIVE = 1 / 32
ABSOLUTE = 2**-14
QUANTILES = (1, 5, 25, 50, 75, 95, 99)


def usable(batch):
    """The tokens that count and whose log-probs are log-probs under both policies."""
    both = torch.stack([batch.train, batch.rollout])
    return batch.mask & (both.isfinite() & (both <= 1e-4)).all(0)


def weights_of(expected, counted):
    """The oracle's weights of tokens, and their means of sequences."""
    weights = torch.tensor(expected.weights_unnormalized, dtype=torch.float64)
    rows = zip(weights, counted, strict=True)
    return weights[counted].tolist(), [row[valid].mean().item() for row, valid in rows if valid.any()]


@pytest.mark.parametrize(
    ("level", "bounds", "mode"),
    [("token", "0.5_2", "mask"), ("sequence", 2.0, "truncate"), ("geometric", "0.5_2", "clamp")],
)
def test_quantiles_are_those_of_the_sorted_values(bounds, mode, level):
    """Weights of 0 come first; as many tokens as it takes for a quantile to be one number."""
    generator = torch.Generator().manual_seed(5)
    rollout = -2 * torch.rand(400, 50, generator=generator, dtype=torch.float64) - 1
    spread = 1.0 if level == "token" else 0.1
    train = (rollout + spread * torch.randn(400, 50, generator=generator, dtype=torch.float64)).clamp(max=0)
    mask = torch.rand(400, 50, generator=generator) < 0.8
    config = RolloutCorrectionConfig(rollout_is=level, rollout_is_threshold=bounds, rollout_is_mode=mode)
    result = correct_rollouts(train, rollout, mask, config)
    per_sequence = torch.stack([row[valid].mean() for row, valid in zip(result.weights, mask, strict=True)])
    for name, values, percents, absolute in (
        ("log_ratio", (train - rollout)[mask], QUANTILES, 2 * ABSOLUTE),
        ("rollout_is", result.weights[mask], (25, 50, 75), 1e-9),
        ("rollout_is_seq", per_sequence, (25, 50, 75), 1e-9),
    ):
        for percent in percents:
            want = torch.quantile(values, percent / 100).item()
            got = result.metrics()[f"rollout_corr/{name}_p{percent:02d}"]
            assert got == pytest.approx(want, rel=2 * RELATIVE, abs=absolute), (name, percent, got, want)


def assert_counts_of(distribution, values, widened):
    """At each edge as many values lie below as there are, but for those that share the edge's bin in the header."""
    edges, counts = distribution
    assert len(edges) == len(counts) + 1
    assert min(counts) >= 0
    assert sum(counts) == pytest.approx(len(values))
    until = 0.0
    for edge, count in zip(edges[1:-1], counts[:-1], strict=True):
        until += count
        low, high = widened(edge)
        assert sum(value < low for value in values) - 1e-6 <= until <= sum(value < high for value in values) + 1e-6


def log_widened(log):
    width = 1.01 * max(abs(log) * RELATIVE, ABSOLUTE)
    return log - width, log + width


def weight_widened(weight):
    if weight <= 0:
        return -1e-9, 1e-9
    low, high = log_widened(math.log(weight))
    # What lies on a bound lies there to the last digit but for its rounding.
    return math.exp(low) * (1 - 1e-6), math.exp(high) * (1 + 1e-6)


# Weights of tokens, of sequences and of neither; a bound by staleness, bad tokens, and weights near 0.
SHOWN = [
    "nothing",
    "token icepop",
    "sequence",
    "geometric",
    "token by staleness",
    "prefix icepop",
    "small turn weights",
]


@pytest.mark.parametrize("name", SHOWN)
def test_distributions_count_what_the_oracle_has(name):
    batch, expected = clear_batch(name)
    config = config_of(name)
    got = correct(name, batch).distributions()
    prefix = config.metric_prefix
    logs = (batch.train.double() - batch.rollout.double())[usable(batch)].clamp(-32, 32).tolist()
    assert_counts_of(got.pop(f"{prefix}log_ratio"), logs, log_widened)
    if config.rollout_is is not None:
        weights, per_sequence = weights_of(expected, usable(batch))
        assert_counts_of(got.pop(f"{prefix}rollout_is_seq"), per_sequence, weight_widened)
        # Weights of sequences have one of tokens, and those of tokens without bounds by staleness.
        of_sequences = config.rollout_is in ("sequence", "geometric")
        if of_sequences or (config.rollout_is == "token" and config.staleness_scale is None):
            assert_counts_of(got.pop(f"{prefix}rollout_is"), weights, weight_widened)
    assert not got
