"""k3 of ratios that no exp can hold: never negative, never less for a ratio that is farther away, and rejected."""

import math

import pytest
import torch

from megatron_rc import RolloutCorrectionConfig, correct_rollouts, kl_penalty
from megatron_rc.numerics import EXP_LIMIT, k3

POWERS = torch.linspace(-30, 30, 6001, dtype=torch.float64)
K3 = {"k3": k3, "kl_penalty k3": lambda log_ratio: kl_penalty(torch.zeros_like(log_ratio), log_ratio, "k3")}


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", K3)
def test_k3_is_never_negative_and_never_falls(name, dtype, sign):
    log_ratio = torch.cat([torch.zeros(1, dtype=torch.float64), 10**POWERS]).to(dtype) * sign
    values = K3[name](log_ratio)
    assert values.isfinite().all()
    assert (values >= 0).all()
    rounding = torch.finfo(dtype).eps * log_ratio[1:].abs().clamp(max=1)
    assert (values.diff() >= -rounding).all()
    assert (values[log_ratio.abs() > 1e-3] > 0).all()


def test_k3_is_its_formula_up_to_the_limit_and_constant_beyond():
    log_ratio = torch.tensor([-1e9, -30.0, -1.0, 0.0, 1.0, 20.0, 20.5, 1e9], dtype=torch.float64)
    wanted = [math.expm1(min(x, EXP_LIMIT)) - min(x, EXP_LIMIT) for x in log_ratio.tolist()]
    torch.testing.assert_close(k3(log_ratio), torch.tensor(wanted, dtype=torch.float64), rtol=1e-15, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("criterion", "far"), [("seq_mean_k3", -1e9), ("seq_max_k3", -21.0), ("token_k3", -1e4)])
def test_a_token_that_the_engine_found_impossible_is_rejected(criterion, far, dtype):
    """Its log ρ is as far above 0 as there is room, and a difference of large terms must not call that near."""
    train = torch.full((3, 8), -1.0, dtype=dtype)
    rollout = train - 0.01
    rollout[1, 5] = far
    mask = torch.ones(3, 8, dtype=torch.bool)
    config = RolloutCorrectionConfig(rollout_is="token", rollout_rs=criterion, rollout_rs_threshold=0.5)
    result = correct_rollouts(train, rollout, mask, config)
    result.check()
    wanted = mask.clone()
    wanted[(1, 5) if criterion == "token_k3" else 1] = False
    assert torch.equal(result.mask, wanted)
    metrics = result.metrics()
    largest = math.expm1(min(-1.0 - far, 20)) - min(-1.0 - far, 20)
    assert metrics["rollout_corr/k3_kl"] == pytest.approx((largest + 23 * 5e-5) / 24, rel=1e-5)
    assert metrics[f"rollout_corr/rollout_rs_{criterion}_max"] > 0.5
    assert metrics[f"rollout_corr/rollout_rs_{criterion}_min"] >= 0
