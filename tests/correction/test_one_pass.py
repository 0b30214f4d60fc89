"""``RolloutCorrection(one_pass=True)``: one optimizer step a plan, and settings that need a pass are refused."""

import pytest
import torch

from megatron_rc import (
    PlanInputs,
    RolloutCorrection,
    RolloutCorrectionConfig,
    StepError,
    correct_rollouts,
)
from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.parallel import ParallelGroups

TRAIN = torch.tensor([[-1.0, -2.0, -0.5], [-0.3, -1.5, -2.5]], dtype=torch.float64)
ROLLOUT = TRAIN + torch.tensor([[0.4, -0.6, 0.1], [-1.2, 0.2, 0.3]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [True, True, False]])
CONFIG = RolloutCorrectionConfig(
    rollout_is="token", rollout_is_threshold=1.5, rollout_rs="token_k1", rollout_rs_threshold="0.5_2"
)


def one_pass(config=CONFIG, groups=None, **more):
    loss = more.pop("loss", PolicyLossConfig())
    return RolloutCorrection(config, groups or ParallelGroups(), loss=loss, one_pass=True, **more)


def test_the_correction_is_that_of_scores_that_were_known_before():
    rewards = torch.tensor([1.0, -1.0])
    want = correct_rollouts(TRAIN, ROLLOUT, MASK, CONFIG, rewards=rewards)
    correction = one_pass()
    assert correction.corrects_in_loss
    assert correction.scales_gradients
    correction.plan(PlanInputs(None, ROLLOUT, MASK))
    corrected = correction.in_loss(TRAIN.clone().requires_grad_(), ROLLOUT, MASK, rewards=rewards)
    weights, mask, lengths = corrected
    assert torch.equal(weights, want.weights)
    assert torch.equal(mask, want.mask)
    assert torch.equal(lengths, want.sequence_lengths)
    assert torch.equal(corrected.old_log_probs, TRAIN)
    assert not corrected.old_log_probs.requires_grad
    assert float(correction.finish_step()) == 5 / float(want.accepted_tokens)
    correction.step.check()
    assert correction.step.metrics() == pytest.approx(want.metrics(), rel=1e-12)
    assert correction.step.skips() is False


def test_a_plan_allows_one_step():
    with pytest.raises(ValueError, match=r"train_log_probs.*one_pass=True"):
        one_pass().plan(PlanInputs(TRAIN, ROLLOUT, MASK))
    correction = one_pass()
    with pytest.raises(ValueError, match=r"num_mini_batches=2.*one_pass=True"):
        correction.plan(PlanInputs(None, ROLLOUT, MASK, mini_batch_ids=torch.tensor([0, 1])), num_mini_batches=2)
    correction.plan(PlanInputs(None, ROLLOUT, MASK))
    correction.in_loss(TRAIN, ROLLOUT, MASK)
    correction.finish_step()
    with pytest.raises(StepError, match="one_pass=True"):
        correction.in_loss(TRAIN, ROLLOUT, MASK)
    correction.plan(PlanInputs(None, ROLLOUT, MASK))
    correction.in_loss(TRAIN, ROLLOUT, MASK)


@pytest.mark.parametrize(
    ("fields", "loss", "auxiliary", "message"),
    [
        ({"bypass_mode": True}, {}, False, "one_pass=True.*bypass_mode=True"),
        ({"proximal_interpolation": True}, {}, False, "one_pass=True.*proximal_interpolation=True"),
        ({"rollout_rs": "group_any,token_k1", "rollout_rs_threshold": "0.5_2"}, {}, False, "rollout_rs=group_any"),
        ({"rollout_is_batch_normalize": True}, {"kl_coef": 0.1}, False, "rollout_is_batch_normalize=True.*one_pass"),
    ],
)
def test_settings_that_need_a_pass_are_refused(fields, loss, auxiliary, message):
    config = RolloutCorrectionConfig(**({"rollout_is": "token"} | fields))
    with pytest.raises(ValueError, match=message):
        one_pass(config, loss=PolicyLossConfig(**loss), has_auxiliary_losses=auxiliary)
