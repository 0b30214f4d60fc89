"""Weights of sequences, turns and prefixes far below e⁻²⁰, as long responses have: sample sizes, means, normalisation.

Log weights are chosen; exact values come from sums in which the largest log is subtracted first.
"""

import math

import pytest
import torch

from megatron_rc import RolloutCorrectionConfig, correct_rollouts
from tests.support.small_steps import MINI_BATCHES, MODES, ROWS, Training

PREFIX = "rollout_corr/rollout_is_"
LENGTH = 300
FAR = [-25.0, -30.0, -45.0, -60.0]


def rows(log_weights, length=LENGTH, dtype=torch.float64):
    """Responses of one length whose log ρ is the same at each token: (log π_train, log π_rollout, mask)."""
    rollout = torch.full((len(log_weights), length), -3.0, dtype=dtype)
    log_ratio = torch.tensor(log_weights, dtype=torch.float64) / length
    return rollout + log_ratio.unsqueeze(1).to(dtype), rollout, torch.ones_like(rollout, dtype=torch.bool)


def exact_sample_size(logs):
    largest = max(logs)
    weights = [math.exp(x - largest) for x in logs]
    return math.fsum(weights) ** 2 / (len(weights) * math.fsum(w * w for w in weights))


def exact_normalised(logs):
    """Weights divided by their mean."""
    largest = max(logs)
    weights = [math.exp(x - largest) for x in logs]
    mean = math.fsum(weights) / len(weights)
    return [w / mean for w in weights]


@pytest.mark.parametrize(("level", "logs"), [("sequence", FAR), ("turn", [-26.0, -251.0, -240.0])])
def test_sample_size_and_normalisation_are_exact(level, logs):
    config = RolloutCorrectionConfig(rollout_is=level, rollout_is_threshold=1e8, rollout_is_batch_normalize=True)
    result = correct_rollouts(*rows(logs), config)
    metrics = result.metrics()
    assert metrics[f"{PREFIX}raw_eff_sample_size"] == pytest.approx(exact_sample_size(logs), rel=1e-9)
    assert metrics[f"{PREFIX}eff_sample_size"] == pytest.approx(exact_sample_size(logs), rel=1e-9)
    assert result.sequence_eff_sample_size == pytest.approx(exact_sample_size(logs), rel=1e-9)
    assert metrics[f"{PREFIX}batch_norm_skipped"] == 0
    assert metrics[f"{PREFIX}applied_mean"] == pytest.approx(1, rel=1e-9)
    assert result.weights[:, 0].tolist() == pytest.approx(exact_normalised(logs), rel=1e-9)


def test_weights_that_are_all_at_the_floor_are_not_divided():
    config = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_batch_normalize=True)
    result = correct_rollouts(*rows([-301.0, -500.0]), config)
    assert result.weights[:, 0].tolist() == [pytest.approx(math.exp(-300))] * 2
    assert result.metrics()[f"{PREFIX}batch_norm_skipped"] == 1
    assert result.metrics()[f"{PREFIX}batch_norm_factor"] == 1


def far_training(mode, log_ratio, **fields):
    """A model whose log-probs are about -400, and rollouts that make log ρ about ``log_ratio`` at each token."""
    training = Training(mode, {"rollout_is": "sequence", **fields})
    with torch.no_grad():
        training.model.logits -= 400
        training.old = training.model(range(ROWS))
    spread = torch.linspace(0.9, 1.1, ROWS, dtype=torch.float64).unsqueeze(1)
    training.rollout = training.old - log_ratio * spread
    return training


def exact_gradient(training, mini_batch, sequences):
    """The gradient of -w A log π_θ over the tokens of a mini-batch, w normalised over ``sequences``."""
    log_weights = torch.where(training.mask, training.old - training.rollout, 0).sum(1).tolist()
    largest = max(log_weights[row] for row in sequences)
    mean = math.fsum(math.exp(log_weights[row] - largest) for row in sequences) / len(sequences)
    weights = torch.tensor([math.exp(x - largest) / mean for x in log_weights], dtype=torch.float64)
    rows = list(MINI_BATCHES[mini_batch])
    logits = training.model.logits.detach().clone().requires_grad_()
    loss = -(weights * training.advantages).unsqueeze(1) * torch.nn.functional.logsigmoid(logits)
    (loss[rows][training.mask[rows]].sum() / training.mask[rows].sum()).backward()
    return logits.grad


@pytest.mark.parametrize(("mode", "log_ratio"), [("decoupled", -8.0), ("bypass", -3.0)])
def test_the_gradient_of_normalised_small_weights_is_exact(mode, log_ratio):
    training = far_training(mode, log_ratio, rollout_is_batch_normalize=True)
    gradient, _ = training.step(training.planned(), 0)
    # Decoupled, the mean is over the rollout batch; in the loss over the mini-batch.
    sequences = range(ROWS) if mode == "decoupled" else MINI_BATCHES[0]
    torch.testing.assert_close(gradient, exact_gradient(training, 0, sequences), rtol=1e-9, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_weights_without_digits_in_a_float32_gradient_are_not_divided_in_the_loss(mode):
    """Two tokens and more of log ρ = -40 each: w̄ is e⁻⁷² at most, which only decoupled mode can divide by in time."""
    training = far_training(mode, -40.0, rollout_is_batch_normalize=True)
    plan = training.planned()
    gradient, _ = training.step(plan, 0)
    metrics = plan.metrics() if mode == "decoupled" else training.correction.step.metrics()
    assert gradient.isfinite().all()
    assert metrics[f"{PREFIX}batch_norm_skipped"] == float(mode == "bypass")
