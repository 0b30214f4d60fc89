"""KPop: the larger KL of "this token" and "another one", against its formula with forty digits."""

import itertools
import math
from decimal import Decimal, localcontext

import torch

from megatron_rc.numerics import CERTAIN, larger_two_point_kl

PROBABILITIES = (1e-30, 1e-9, 1e-4, 0.02, 0.3, 0.5, 0.9, 0.99, 1 - 1e-5, 1 - 5e-8)


def formula(log_p, log_q):
    """max(D(p‖q), D(q‖p)) of two log-probs below log(1 - 1e-8)."""
    with localcontext() as context:
        context.prec = 40
        p = Decimal(log_p).exp()
        q = Decimal(log_q).exp()
        this = (p / q).ln()
        log_ratio_of_others = ((1 - p) / (1 - q)).ln()
        return float(max(p * this + (1 - p) * log_ratio_of_others, -q * this - (1 - q) * log_ratio_of_others))


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
