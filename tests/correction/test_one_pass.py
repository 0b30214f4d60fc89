"""``RolloutCorrection(one_pass=True)``: one optimizer step a plan, and settings that need a pass are refused."""

import pytest
import torch

from megatron_rc import (
    PlanInputs,
    RolloutCorrection,
    RolloutCorrectionConfig,
    StepError,
    correct_rollouts,
    masked_loss,
    wrap_finalize,
)
from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.parallel import ParallelGroups
from tests.support.on_rank import outcome
from tests.support.ranks import Layout

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
    found = correction.in_loss(TRAIN.clone().requires_grad_(), ROLLOUT, MASK, rewards=rewards)
    weights, mask, lengths = found
    assert torch.equal(weights, want.weights)
    assert torch.equal(mask, want.mask)
    assert torch.equal(lengths, want.sequence_lengths)
    assert torch.equal(found.old_log_probs, TRAIN)
    assert not found.old_log_probs.requires_grad
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


def second_step():
    """What each stage says at the end of a second step."""
    groups = ParallelGroups.from_megatron()
    correction = one_pass(groups=groups)
    end = wrap_finalize(correction, lambda model: None)
    inputs = PlanInputs(None, ROLLOUT, MASK, advantages=torch.tensor([1.0, -1.0])) if groups.is_last_stage else None
    plan = correction.plan(inputs)
    for _ in range(2):
        scale = plan.loss_scale(num_microbatches=1)
        if inputs is not None:
            (micro_batch,) = plan.micro_batches(inputs)
            log_probs = TRAIN.clone().requires_grad_()
            masked_loss(correction, micro_batch, log_probs, None, scale)[0].backward()
        ended = outcome(correction.finish_step, torch.device("cpu"))
    del end
    return ended


def test_a_second_step_is_refused_on_every_stage(ranks):
    first, last = ranks.run(second_step, Layout(pp=2))
    assert first == last
    assert "one_pass=True" in first


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
