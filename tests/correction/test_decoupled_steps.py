"""A step in decoupled mode trains on the tokens and weights of its mini-batch in the plan, or on nothing."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from megatron_rc import PlanInputs, StepError
from megatron_rc.parallel import ParallelGroups
from tests.support.on_rank import outcome
from tests.support.ranks import Layout
from tests.support.small_steps import CONFIG, Training, listed, planned, run


def numbered(micro_batches):
    return list(enumerate(micro_batches))


def reordered(training, plan):
    """Every input one row further, and the plan's results at the rows that they had."""
    shifted = Training("decoupled")
    for name in ("old", "rollout", "mask", "advantages"):
        setattr(shifted, name, getattr(training, name).roll(1, dims=0))
    return plan.micro_batches(listed(shifted))[:2]


def changed(micro_batch, **values):
    return dataclasses.replace(micro_batch, **values)


WRONG = {
    "one twice, one missing": lambda made: [made[0], made[0]],
    "the response mask": lambda made: [made[0], changed(made[1], mask=made[1].response_mask)],
    "no mask": lambda made: [made[0], changed(made[1], mask=torch.ones_like(made[1].mask))],
    "weights of other rows": lambda made: [made[0], changed(made[1], weights=made[1].weights.roll(1, dims=0))],
    "doubled weights": lambda made: [made[0], changed(made[1], weights=2 * made[1].weights)],
    "weights that are NaN": lambda made: [made[0], changed(made[1], weights=torch.nan * made[1].weights)],
}


def wrong_micro_batches(wrong, training, plan, made):
    return reordered(training, plan) if wrong == "inputs in another order" else WRONG[wrong](made)


CONFIGS = {
    "token": CONFIG,
    "normalised": CONFIG | {"rollout_is_batch_normalize": True},
    "no weights": {"rollout_is": None, "rollout_rs": "token_k1", "rollout_rs_threshold": "0.8_1.3"},
}


@pytest.mark.parametrize(
    ("wrong", "fields"),
    [
        *((wrong, "token") for wrong in [*WRONG, "inputs in another order"]),
        ("doubled weights", "normalised"),
        ("no mask", "no weights"),
    ],
)
def test_a_step_of_other_tokens_or_weights_is_refused(wrong, fields):
    training = Training("decoupled", CONFIGS[fields])
    undisturbed = Training("decoupled", CONFIGS[fields])
    plan, made = planned(training)
    expected_gradient, _ = undisturbed.step(undisturbed.planned(), 0)
    micro_batches = wrong_micro_batches(wrong, training, plan, made)
    scale = plan.loss_scale(0, num_microbatches=len(micro_batches))
    for _ in range(2):
        with pytest.raises(StepError, match="not those of its mini-batch in the plan"):
            run(training, scale, numbered(micro_batches))
    training.correction.reset_step()
    run(training, plan.loss_scale(0, num_microbatches=2), numbered(made[:2]))
    torch.testing.assert_close(training.model.gradient, expected_gradient, rtol=1e-12, atol=1e-15)
    if fields == "token":
        torch.testing.assert_close(training.model.gradient, training.expected(0), rtol=1e-12, atol=1e-15)


def test_a_scale_of_another_corrections_plan_is_refused():
    """Even where that one has the same configuration: it counts the steps of its own."""
    training = Training("decoupled")
    another_training = Training("decoupled")
    plan, made = planned(training)
    with pytest.raises(ValueError, match="from the plan of another correction"):
        run(training, another_training.scale(another_training.planned(), 0), numbered(made[:2]))
    training.correction.reset_step()
    run(training, plan.loss_scale(0, num_microbatches=2), numbered(made[:2]))
    torch.testing.assert_close(training.model.gradient, training.expected(0), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("rows", [range(4), range(2)], ids=str)
def test_masked_rows_and_empty_mini_batches_train_as_before(rows):
    """All of the first mini-batch, or one of its micro-batches."""
    training = Training("decoupled")
    training.mask[list(rows)] = False
    plan = training.planned()
    for mini_batch in (0, 1, 0):
        gradient, _ = training.step(plan, mini_batch)
        is_empty = not training.mask[4 * mini_batch : 4 * mini_batch + 4].any()
        assert plan.skips(mini_batch) == is_empty
        expected_gradient = torch.zeros_like(gradient) if is_empty else training.expected(mini_batch)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-15)


def test_a_scale_is_taken_from_a_checked_plan_alone():
    """Data that check() would refuse would be trained on."""
    training = Training("decoupled")
    inputs = PlanInputs(training.old, training.rollout, training.mask)
    plan = training.correction.plan(inputs)
    with pytest.raises(StepError, match=r"plan\.loss_scale\(\) before plan\.check\(\)"):
        plan.loss_scale(num_microbatches=4)
    plan.check()
    assert float(plan.loss_scale(num_microbatches=4).denominator) == float(plan.denominators[0, 2])
    rollout = training.rollout.clone()
    rollout[training.mask] = torch.nan
    bad = training.correction.plan(dataclasses.replace(inputs, rollout_log_probs=rollout))
    with pytest.raises(ValueError, match="is NaN"):
        bad.check()
    with pytest.raises(StepError, match=r"plan\.loss_scale\(\) before plan\.check\(\)"):
        bad.loss_scale(num_microbatches=4)


def one_rank_errs(wrong):
    """(the message of each of two wrong steps, the gradient after reset_step() less the one it should be)."""
    training = Training("decoupled", groups=ParallelGroups.from_megatron())
    plan, made = planned(training)
    errs = dist.get_rank() == 1
    micro_batches = wrong_micro_batches(wrong, training, plan, made) if errs else made[:2]

    scale = plan.loss_scale(0, num_microbatches=len(micro_batches))

    def step():
        run(training, scale, numbered(micro_batches))

    messages = [outcome(step) for _ in range(2)]
    training.correction.reset_step()
    run(training, plan.loss_scale(0, num_microbatches=2), numbered(made[:2]))
    return messages, training.model.gradient - training.expected(0)


@pytest.mark.parametrize("wrong", ["one twice, one missing", "doubled weights"])
def test_what_one_rank_does_wrongly_is_the_same_error_on_all(ranks, wrong):
    """Both hold the same rows, so that the gradient of each is the one of a single process."""
    (first, error), (second, second_error) = ranks.run(one_rank_errs, Layout(dp=2), wrong)
    assert first == second
    assert all("call reset_step() on every rank" in message for message in first)
    assert torch.cat([error, second_error]).abs().max() < 1e-12
