"""Weights, masks, denominators and metrics of one process against the float64 oracle."""

import dataclasses
import functools
import math

import pytest
import torch

from megatron_rc import RolloutCorrectionConfig, correct_rollouts
from megatron_rc.batch import chain
from tests.support import correction_oracle as oracle
from tests.support.correction_cases import CASES, WIDTH, clear_batch, make_batch, sizes
from tests.support.correction_comparison import assert_same, config_of, correct, use_blocks

# One configuration of each way in which weights and masks are made; the table itself runs once, below.
WAYS = (
    "token accepted scope",
    "sequence by staleness",
    "min prefix",
    "turns by id",
    "groups",
    "bad tokens",
)


@pytest.mark.parametrize("name", CASES)
def test_one_process_matches_the_oracle(name):
    batch, expected = clear_batch(name)
    inputs = (batch.train, batch.rollout, batch.mask)
    before = [tensor.clone() for tensor in inputs]
    result = correct(name, batch)
    result.check()
    assert_same(result, expected)
    for now, was in zip(inputs, before, strict=True):
        torch.testing.assert_close(now, was, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["token icepop", "turns"])
def test_weights_that_are_only_measured_are_measured_alike(name):
    batch, _ = clear_batch(name)
    inputs = batch.train, batch.rollout, batch.mask
    configs = [dataclasses.replace(config_of(name), rollout_is_apply=apply) for apply in (True, False)]
    applied, measured = (correct_rollouts(*inputs, config, **batch.sides, **sizes(batch)) for config in configs)
    assert applied.weights is not None
    assert measured.weights is None
    assert torch.equal(measured.measured_weights, applied.weights)
    assert torch.equal(applied.measured_weights, applied.weights)
    assert torch.equal(measured.mask, applied.mask)
    assert measured.metrics() == applied.metrics()


@pytest.mark.parametrize("name", WAYS)
def test_float32_is_as_near_as_float32_can_be(name):
    batch, expected = clear_batch(name)
    batch = dataclasses.replace(batch, train=batch.train.float(), rollout=batch.rollout.float())
    result = correct(name, batch)
    assert result.weights is None or result.weights.dtype == torch.float32
    assert_same(result, expected, rel=2e-6)


def test_extreme_ratios_stay_finite():
    train = torch.tensor([[-1e4, -1.0, -1.0], [-1.0, -1e4, -1e4]])
    rollout = torch.tensor([[-1.0, -1e4, -1.0], [-1e4, -1.0, -2e4]])
    for name in CASES:
        fields = {key: value for key, value in CASES[name].fields.items() if not key.startswith("rollout_rs")}
        config = RolloutCorrectionConfig(**fields)
        versions = torch.tensor([3, 7])
        mask = torch.ones(2, 3, dtype=torch.bool)
        result = correct_rollouts(train, rollout, mask, config, policy_versions=versions, current_version=7)
        assert result.weights is None or result.weights.isfinite().all(), name
        assert all(math.isfinite(value) for value in result.metrics().values()), name


@pytest.mark.parametrize("split", [1, 2])
def test_sums_over_long_sequences_are_exact(split, monkeypatch):
    """32k tokens, in one block and in blocks of a part of the row."""
    use_blocks(monkeypatch, 2**15 // split)
    generator = torch.Generator().manual_seed(0)
    rollout = -3 * torch.rand(2, 2**15, generator=generator)
    train = (rollout + 1e-4 * torch.randn(2, 2**15, generator=generator)).clamp(max=0)
    config = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_threshold=1e6, metric_prefix="")
    result = correct_rollouts(train, rollout, torch.ones(2, 2**15, dtype=torch.bool), config)
    want = [math.fsum(a) - math.fsum(b) for a, b in zip(train.tolist(), rollout.tolist(), strict=True)]
    metrics = result.metrics()
    assert metrics["kl"] == pytest.approx(-sum(want) / 2**16, rel=1e-9)
    assert metrics["rollout_is_raw_max"] == pytest.approx(math.exp(max(want)), rel=1e-9)
    # In float32 they are not: the naive sum is what this guards against.
    naive = [float((a - b).sum()) for a, b in zip(train, rollout, strict=True)]
    assert abs(naive[0] - want[0]) > 1e-9 * abs(want[0])


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("shape", [(3, 16), (0, 16)])
def test_a_batch_without_tokens_is_skipped_without_nan(name, shape):
    case = CASES[name]
    batch = make_batch(case, 0)
    sides = {key: value[: shape[0], ...] for key, value in batch.sides.items()}
    sides = {key: value[:, : shape[1]] if value.dim() == 2 else value for key, value in sides.items()}
    nothing = torch.full(shape, math.nan)
    mask = torch.zeros(shape, dtype=torch.bool)
    result = correct_rollouts(nothing, nothing, mask, config_of(name), **sides, **sizes(batch))
    result.check()
    assert result.skip.tolist() == [True] * 3
    assert result.mask.shape == shape
    metrics = result.metrics()
    assert {value for key, value in metrics.items() if "batch_norm" not in key} == {0.0}
    assert result.distributions() == {}


@pytest.mark.parametrize("shapes", [[(2, 2048), (4, 0), (2, 2062), (1, 64)], [(3, 0), (0, 64)]], ids=str)
def test_micro_batches_of_different_widths_add_up(shapes):
    """Rows of several lengths, and of no token."""
    generator = torch.Generator().manual_seed(0)
    parts = []
    for shape in shapes:
        train, rollout = (-torch.rand(shape, generator=generator, dtype=torch.float64) - 1e-3 for _ in range(2))
        parts.append((train, rollout, torch.rand(shape, generator=generator) < 0.7))
    config = config_of("token")
    together = correct_rollouts(*(list(tensors) for tensors in zip(*parts, strict=True)), config)
    alone = [correct_rollouts(*part, config) for part in parts]
    for mask, weights, result in zip(together.mask, together.weights, alone, strict=True):
        assert torch.equal(mask, result.mask)
        torch.testing.assert_close(weights, result.weights, rtol=1e-12, atol=0)
    torch.testing.assert_close(together.denominators, sum(result.denominators for result in alone))


@pytest.mark.parametrize("name", WAYS)
def test_the_size_of_a_block_changes_nothing(name, monkeypatch):
    use_blocks(monkeypatch, 5)
    batch, expected = clear_batch(name)
    assert_same(correct(name, batch), expected)


@pytest.mark.parametrize(
    ("name", "num_tokens"),
    [
        # The last block has another shape and runs as it is.
        ("maxima and veto", 5 * WIDTH),
        ("token by staleness", 5 * WIDTH),
    ],
)
def test_a_compiled_pass_gives_the_same(name, num_tokens, monkeypatch):
    """One graph, traced and run without a C++ compiler."""
    calls = trace_blocks(monkeypatch)
    use_blocks(monkeypatch, num_tokens)
    batch, expected = clear_batch(name)
    assert_same(correct(name, batch, compile=True), expected)
    assert calls


def trace_blocks(monkeypatch):
    """Compiled blocks without the time that generating code takes; nothing may be left out of the graph."""
    torch._dynamo.reset()
    calls = []
    right = torch.compile

    def traced(function, *, dynamic, options):
        calls.append(function)
        with torch._inductor.config.patch(options or {}):  # names that the compiler does not know are an error
            return right(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)

    monkeypatch.setattr(torch, "compile", traced)
    monkeypatch.setattr(chain, "compiled_block", functools.cache(chain.compiled_block.__wrapped__))
    return calls


@pytest.mark.parametrize("bounds", ["1.5_3", "0.3_0.9"])
def test_invalid_tokens_count_nowhere_when_the_bounds_exclude_one(bounds):
    """They have the ratio 1 inside: the same sums as where there are none."""
    generator = torch.Generator().manual_seed(0)
    train, rollout = (-torch.rand(4, 24, generator=generator) - 0.1 for _ in range(2))
    fields = {"rollout_is": "token", "rollout_is_mode": "clamp", "rollout_is_threshold": bounds, "metric_prefix": ""}
    config = RolloutCorrectionConfig(**fields, rollout_rs="token_k1", rollout_rs_threshold=bounds)
    mask = (torch.arange(24) < 16).expand(4, 24)
    got = correct_rollouts(train, rollout, mask, config).metrics()
    want = correct_rollouts(*(values[:, :16].contiguous() for values in (train, rollout, mask)), config).metrics()
    assert got == pytest.approx(want, rel=1e-6, abs=1e-6)


def test_a_response_of_bad_tokens_alone_is_a_lost_one():
    fields = {"rollout_rs": "group_any", "bad_log_probs": "reject_token", "rejection_denominator": "original"}
    rollout = torch.tensor([[math.nan, math.nan], [-1.0, -1.0], [-1.0, -1.0], [math.nan, -1.0]])
    train = torch.full((4, 2), -1.0)
    mask = torch.ones(4, 2, dtype=torch.bool)
    ids = torch.tensor([0, 0, 1, 1])
    config = RolloutCorrectionConfig(rollout_is=None, **fields)
    result = correct_rollouts(train, rollout, mask, config, group_ids=ids, num_groups=2)
    settings = {"bad": "reject_token", "denominator": "original", "criteria": (("group_any", -math.inf, math.inf),)}
    want = oracle.correct(train.tolist(), rollout.tolist(), mask.tolist(), settings, group_ids=ids.tolist())
    assert result.mask.tolist() == want.mask == [[False] * 2, [False] * 2, [True] * 2, [False, True]]
