"""The KL penalty with an importance weight: each token's value and gradient, its limits, and shards."""

import math
import re

import pytest
import torch

from megatron_rc import PlanInputs, PolicyLossConfig, RolloutCorrection, RolloutCorrectionConfig, kl_penalty
from megatron_rc.loss.kl import KL_ESTIMATORS, WEIGHTED_KL_ESTIMATORS
from megatron_rc.parallel import ParallelGroups, SequenceLayout
from megatron_rc.parallel.groups import group_rank, group_size
from tests.support import one_step
from tests.support.enumerated import divergences, enumerated, reached
from tests.support.ranks import Layout

EXACT = {"rtol": 1e-12, "atol": 1e-12}
LENGTH = 4


def gradient_of(penalty, log_probs):
    (gradient,) = torch.autograd.grad(penalty.sum(), log_probs)
    return gradient


@pytest.mark.parametrize("estimator", WEIGHTED_KL_ESTIMATORS)
def test_value_and_gradient_of_each_token(estimator):
    dice = torch.Generator().manual_seed(0)
    log_probs, ref, rollout = -5 * torch.rand(3, 200, generator=dice, dtype=torch.float64)
    log_probs.requires_grad_()
    penalty = kl_penalty(log_probs, ref, estimator, rollout_log_probs=rollout)
    ratio = (log_probs.detach() - rollout).exp()
    torch.testing.assert_close(penalty, ratio * kl_penalty(log_probs, ref, estimator), **EXACT)
    torch.testing.assert_close(gradient_of(penalty, log_probs), ratio * (log_probs.detach() - ref), **EXACT)


def test_the_ratio_is_clamped_as_every_ratio_and_pulls_towards_a_far_reference():
    log_probs = torch.tensor([-1.0, -1.0, -60.0], dtype=torch.float64, requires_grad=True)
    rollout = torch.tensor([-100.0, -1.0, -60.0], dtype=torch.float64)
    ref = torch.tensor([-2.0, -2.0, -1.0], dtype=torch.float64)
    penalty = kl_penalty(log_probs, ref, "k3", rollout_log_probs=rollout)
    assert penalty.tolist() == pytest.approx([math.exp(20) * math.exp(-1), math.exp(-1), math.exp(20) - 21])
    assert gradient_of(penalty, log_probs).tolist() == pytest.approx([math.exp(20), 1.0, -59.0])


def mean_gradient_of_a_rank(mode):
    """The gradient, by the logits of the toy policy, of this rank's part of a step whose loss is the KL alone."""
    toy = enumerated(LENGTH, distance=0.7)
    reference = enumerated(LENGTH, distance=2.0, seed=1)
    groups = ParallelGroups.from_megatron()
    rows = slice(group_rank(groups.dp), None, group_size(groups.dp))
    num_rows = len(toy.tokens[rows])
    size = group_size(groups.cp)
    layout = SequenceLayout.padded(num_rows, LENGTH // size, cp_rank=group_rank(groups.cp), cp_size=size)
    train, rollout, ref, mask = (
        layout.cut(value[rows]) for value in (toy.train, toy.rollout, reference.train.detach(), toy.mask)
    )

    in_bypass = mode == "bypass"
    settings = {"bypass_mode": True, "loss_type": "reinforce"} if in_bypass else {}
    config = RolloutCorrectionConfig(rollout_is=None, **settings)
    loss = PolicyLossConfig(algorithm="reinforce", kl_coef=1.0, kl_importance_weight=True)
    correction = RolloutCorrection(config, groups, loss=loss)
    old = None if in_bypass else train.detach() - 0.3
    advantages = torch.zeros(num_rows, dtype=torch.float64)
    inputs = PlanInputs(old, rollout, mask, layout, advantages=advantages)
    leaf = train.detach().clone().requires_grad_()
    one_step.made(correction, inputs, leaf, ref_log_probs=ref)
    # Megatron averages the gradients over dp_cp; the mean is over tokens, LENGTH of a response.
    gradient = LENGTH * leaf.grad / group_size(groups.dp_cp)
    return toy.gradient((train * gradient).sum())


@pytest.mark.parametrize(("layout", "mode"), [(Layout(), "decoupled"), (Layout(cp=2, dp=2), "bypass")], ids=str)
def test_on_every_layout_the_gradient_is_that_of_the_kl(ranks, layout, mode):
    """Whatever log π_old is: the ratio is π_θ/π_rollout in every mode."""
    toy = enumerated(LENGTH, distance=0.7)
    after_prefixes = divergences(toy, enumerated(LENGTH, distance=2.0, seed=1))["forward"]
    exact_gradient = toy.gradient((reached(toy.engine) * after_prefixes).sum())
    gradient = sum(ranks.run(mean_gradient_of_a_rank, layout, mode))
    torch.testing.assert_close(gradient, exact_gradient, rtol=0, atol=1e-12)


def test_estimators_whose_mean_is_not_the_kl_take_no_weight():
    tokens = torch.zeros(1, 2)
    for estimator in set(KL_ESTIMATORS) - set(WEIGHTED_KL_ESTIMATORS):
        with pytest.raises(ValueError, match=f"estimator='{re.escape(estimator)}' .*k1, k3"):
            kl_penalty(tokens, tokens, estimator, rollout_log_probs=tokens)
