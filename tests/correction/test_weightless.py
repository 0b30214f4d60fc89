"""A step whose weights are all 0 changes nothing: it is not made."""

import pytest
import torch

from megatron_rc import correct_rollouts
from tests.support.small_steps import MODES, ROWS, Training

LEVELS = {
    "token": {"rollout_is": "token"},
    "sequence": {"rollout_is": "sequence"},
    "normalised": {"rollout_is": "geometric", "rollout_is_batch_normalize": True},
}


def weightless(mode, level="token", **loss):
    """IcePop with bounds that no ratio of the first mini-batch reaches: its tokens are accepted, with weights of 0."""
    fields = LEVELS[level] | {"rollout_is_mode": "mask", "rollout_is_threshold": "0.2_5.0"}
    training = Training(mode, fields, **loss)
    training.rollout[:4] -= 5
    return training


def skips(training, plan, mini_batch):
    """Whether the optimizer's step is not to be made, when that is known."""
    training.model.zero_grad_buffer()
    if plan.skips(mini_batch):
        return True
    training.schedule(plan, mini_batch)
    return training.correction.step is not None and training.correction.step.skips()


NAME = "rollout_corr/rollout_is_weightless_mini_batches"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
def test_a_step_whose_weights_are_all_0_is_not_made(mode, level):
    training = weightless(mode, level)
    plan = training.planned()
    assert [skips(training, plan, index) for index in range(2)] == [True, False]
    if mode == "decoupled":
        assert plan.skip.tolist() == [True, False]
        assert plan.metrics()[NAME] == 1
        assert training.model.gradient.any()
        return
    assert training.correction.step.metrics()[NAME] == 0
    assert training.correction.metrics()[NAME] == 1
    skips(training, plan, 0)
    assert training.correction.step.skip.tolist() == [True]
    assert training.correction.step.metrics()[NAME] == 1
    assert float(training.correction.step.factor) == 0
    assert not training.model.gradient.any()


@pytest.mark.parametrize("loss", [{"entropy_coef": 0.1}, {"kl_coef": 0.1}], ids=str)
def test_other_terms_of_the_objective_make_the_step(loss):
    training = weightless("decoupled", **loss)
    plan = training.planned()
    assert plan.skip.tolist() == [False, False]
    assert [plan.skips(index) for index in range(2)] == [False, False]
    # The correction by itself skips what is not accepted alone.
    ids = torch.arange(ROWS) // 4
    whole = (training.old, training.rollout, training.mask, training.correction.config)
    result = correct_rollouts(*whole, mini_batch_ids=ids, num_mini_batches=2)
    assert not result.weights[:4].any()
    assert result.weights[4:].any()
    assert result.skip.tolist() == [False, False]
    assert NAME not in result.metrics()
