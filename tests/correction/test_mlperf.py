"""The GRPO reference of MLPerf Training v6.1: its loss and gradient in loops of its formulas, and on shards."""

import math

import pytest
import torch

from megatron_rc import RolloutCorrectionConfig, aggregate_loss, correct_rollouts, policy_loss

PRESET = RolloutCorrectionConfig.seq_mask_tis()
LOW = 0.999
HIGH = 1.002
# Of the reference's settings.
LOSS_FN = {
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_type": "seq-mask-tis",
    "truncated_importance_sampling_ratio": HIGH,
    "truncated_importance_sampling_ratio_min": LOW,
}


def draw():
    """(train, rollout, mask, advantages): sequences on both sides of the bounds, one without a token."""
    generator = torch.Generator().manual_seed(7)
    rollout = -2 * torch.rand(8, 24, generator=generator, dtype=torch.float64) - 1.0
    shift = torch.tensor([0.0, 0.0005, 0.0015, 0.006, -0.0005, -0.004, 0.0, 0.0], dtype=torch.float64).unsqueeze(1)
    noise = 0.2 * torch.randn(8, 24, generator=generator, dtype=torch.float64)
    mask = torch.rand(8, 24, generator=generator) < 0.8
    mask[7] = False
    mean = torch.where(mask, noise, 0).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return rollout + noise - mean + shift, rollout, mask, torch.randn(8, generator=generator, dtype=torch.float64)


def reference(train, rollout, mask, advantages):
    """(loss, gradient by the log-probs): Σ -A w r / N with r = 1 and N the tokens before rejection."""
    number = sum(map(sum, mask.tolist()))
    loss = 0.0
    gradient = torch.zeros_like(train)
    for i, valid in enumerate(mask.tolist()):
        tokens = [t for t, is_sampled in enumerate(valid) if is_sampled]
        logs = {t: float(train[i, t]) - float(rollout[i, t]) for t in tokens}
        if not tokens or not LOW <= math.exp(math.fsum(logs.values()) / len(tokens)) <= HIGH:
            continue
        for t in tokens:
            gradient[i, t] = -float(advantages[i]) * math.exp(logs[t]) / number
            loss += float(gradient[i, t])
    return loss, gradient


def test_it_is_nemo_rls_setting_of_the_reference():
    assert RolloutCorrectionConfig.from_dict(LOSS_FN, dialect="nemo-rl") == PRESET


def test_loss_and_gradient_are_those_of_the_reference():
    train, rollout, mask, advantages = draw()
    result = correct_rollouts(train, rollout, mask, PRESET)
    result.check()
    accepted = result.mask.any(1).tolist()
    assert accepted == [True, True, True, False, True, False, True, False]
    current = train.clone().requires_grad_()  # the first step of a rollout batch: π_θ is π_old
    losses = policy_loss(
        current, train, advantages, mask, clip_low=0.2, clip_high=0.28, weights=result.weights
    ).per_token
    loss = aggregate_loss(losses, result.mask, "token-mean", denominator_mask=mask)
    (gradient,) = torch.autograd.grad(loss, current)
    want, of_reference = reference(train, rollout, mask, advantages)
    assert loss.item() == pytest.approx(want, rel=1e-12)
    torch.testing.assert_close(gradient, of_reference, rtol=1e-12, atol=1e-15)
    # With the tokens that are left as the divisor every step would be larger.
    loss_of_accepted = aggregate_loss(losses, result.mask, "token-mean")
    assert loss_of_accepted.item() == pytest.approx(want * mask.sum().item() / result.mask.sum().item(), rel=1e-12)
    assert result.denominators[0, :3].tolist() == [mask.sum(), 7, result.mask.sum()]
    assert result.sequence_lengths.tolist() == mask.sum(1).tolist()
