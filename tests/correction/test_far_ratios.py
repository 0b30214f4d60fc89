"""k3 of ratios that no exp can hold: never negative, never less for a ratio that is farther away, and rejected."""

import math

import pytest
import torch

from megatron_rc import RolloutCorrectionConfig, correct_rollouts


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
    expected_mask = mask.clone()
    expected_mask[(1, 5) if criterion == "token_k3" else 1] = False
    assert torch.equal(result.mask, expected_mask)
    metrics = result.metrics()
    largest = math.expm1(min(-1.0 - far, 20)) - min(-1.0 - far, 20)
    assert metrics["rollout_corr/k3_kl"] == pytest.approx((largest + 23 * 5e-5) / 24, rel=1e-5)
    assert metrics[f"rollout_corr/rollout_rs_{criterion}_max"] > 0.5
    assert metrics[f"rollout_corr/rollout_rs_{criterion}_min"] >= 0
