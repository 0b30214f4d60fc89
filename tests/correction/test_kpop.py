"""KPop: the larger KL of "this token" and "another one", against its formula with forty digits; what it rejects."""

import itertools
import math
from decimal import Decimal, localcontext

import pytest
import torch

from megatron_rc import RolloutCorrectionConfig, correct_rollouts
from megatron_rc.numerics import CERTAIN, larger_two_point_kl

PROBABILITIES = (1e-30, 1e-9, 1e-4, 0.02, 0.3, 0.5, 0.9, 0.99, 1 - 1e-5, 1 - 5e-8)
KPOP = RolloutCorrectionConfig.decoupled_token_kpop()


def formula(log_p, log_q):
    """max(D(p‖q), D(q‖p)) of two log-probs below log(1 - 1e-8)."""
    with localcontext() as context:
        context.prec = 40
        p, q = Decimal(log_p).exp(), Decimal(log_q).exp()
        this, other = (p / q).ln(), ((1 - p) / (1 - q)).ln()
        return float(max(p * this + (1 - p) * other, -q * this - (1 - q) * other))


def tensors(pairs):
    return torch.tensor(pairs, dtype=torch.float64).unbind(1)


def test_it_is_its_formula_however_certain_or_rare_the_token_is():
    logs = [math.log1p(p - 1) if p > 0.5 else math.log(p) for p in PROBABILITIES]
    pairs = [(a * (1 + near), b) for a, b in itertools.combinations_with_replacement(logs, 2) for near in (0.0, 1e-3)]
    want = torch.tensor([formula(*pair) for pair in pairs], dtype=torch.float64)
    assert want.min() == 0
    assert want.max() > 30
    torch.testing.assert_close(larger_two_point_kl(*tensors(pairs)), want, rtol=1e-12, atol=1e-15)


EXTREMES = (1e-4, 0.0, -1e-300, -1e-9, -CERTAIN, -1e-7, -1.0, -87.0, -1e4, -3e38, torch.finfo(torch.float64).min)


def test_it_is_finite_for_every_usable_log_prob_and_the_same_in_both_directions():
    values = larger_two_point_kl(*tensors(list(itertools.product(EXTREMES, EXTREMES)))).view(len(EXTREMES), -1)
    assert values.isfinite().all()
    assert (values >= 0).all()
    assert torch.equal(values.diag(), torch.zeros(len(EXTREMES), dtype=torch.float64))
    torch.testing.assert_close(values, values.T, rtol=1e-15, atol=0)
    # 1 - p counts as 1e-8 from there on: a token that float32 calls certain is no outlier beside a likely one.
    assert torch.equal(values[:5], values[:1].expand(5, -1))
    assert (
        larger_two_point_kl(*tensors([(math.log(0.995), 0.0)]))
        < 0.1
        < larger_two_point_kl(*tensors([(math.log(0.99), 0.0)]))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_rejects_likely_tokens_that_differ_and_keeps_rare_ones_with_a_larger_ratio(dtype):
    """What bounds on the ratio cannot do: ρ is 0.9 and 1.1 where it rejects, 20 and 1/20 where it keeps."""
    engine = torch.tensor([[1.0, 0.9, 0.001, 0.02, 0.5], [0.3, 0.5, 0.7, 0.2, 0.2]], dtype=dtype)
    ratios = torch.tensor([[0.9, 1.1, 20.0, 0.05, 1.0], [1.0, 1.5, 1.0, 1.0, 1.0]], dtype=dtype)
    rollout, train = engine.log(), (engine * ratios).log()
    result = correct_rollouts(train, rollout, torch.ones(2, 5, dtype=torch.bool), KPOP)
    result.check()
    kept = torch.tensor([[False, False, True, True, True], [True, False, True, True, True]])
    assert torch.equal(result.mask, kept)
    torch.testing.assert_close(result.weights, ratios, rtol=1e-5, atol=0)
    assert result.denominators.tolist() == [[10, 2, 7, 2]]
    assert result.sequence_lengths.tolist() == [5, 5]  # rejected tokens stay in the denominators


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rollout_rs_threshold": None}, "rollout_rs='token_kpop' needs rollout_rs_threshold"),
        ({"rollout_rs_threshold": "0.05_0.1"}, "token_kpop takes one upper bound, in nats"),
        ({"rollout_rs_threshold": 0}, "must be a finite positive number"),
        ({"rollout_rs_threshold_lower": 0.01}, "rollout_rs_threshold_lower=0.01 does nothing for 'token_kpop'"),
    ],
)
def test_bounds_that_it_cannot_have_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        RolloutCorrectionConfig(**KPOP.to_dict() | fields)
