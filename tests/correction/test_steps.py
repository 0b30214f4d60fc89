"""Counts of one optimizer step. Calls between two steps change no gradient, or are refused."""

import contextlib
import dataclasses
import gc

import pytest
import torch

from megatron_rc import (
    MicroBatch,
    PlanInputs,
    StepError,
    masked_loss,
    wrap_finalize,
)
from megatron_rc.parallel import SequenceLayout
from megatron_rc.parallel.collectives import on_host
from tests.support.small_steps import CONFIG, MODES, PER_MICRO_BATCH, ROWS, WIDTH, Training, listed, planned, run


@pytest.fixture(params=MODES)
def training(request):
    return Training(request.param)


def test_each_step_has_the_gradient_of_the_formula_in_any_order(training):
    plan = training.planned()
    for mini_batch in (0, 1, 0, 1):
        gradient, _ = training.step(plan, mini_batch)
        torch.testing.assert_close(gradient, training.expected(mini_batch), rtol=1e-12, atol=1e-15)
    # The two mini-batches have different gradients: the comparison above could fail.
    assert not torch.allclose(training.expected(0).sum(), training.expected(1).sum())


@pytest.mark.parametrize("gradients", [contextlib.nullcontext, torch.no_grad], ids=["", "no_grad"])
def test_an_evaluation_between_two_steps_counts_nothing(training, gradients):
    undisturbed = Training(training.mode)
    expected_steps = [undisturbed.step(undisturbed.planned(), mini_batch) for mini_batch in range(2)]

    plan = training.planned()
    for mini_batch in range(2):
        with gradients():
            training.schedule(training.planned(), 1 - mini_batch, forward_only=True)
        gradient, metrics = training.step(plan, mini_batch)

        expected_gradient, expected_metrics = expected_steps[mini_batch]
        assert torch.equal(gradient, expected_gradient)
        assert metrics == expected_metrics


def test_a_schedule_that_failed_is_not_run_again_before_the_step_is_reset(training):
    plan = training.planned()
    scale = training.scale(plan, 0)
    with pytest.raises(OSError, match="out of memory"):
        training.schedule(plan, 0, scale, fails_at=1)

    # The first micro-batch of the failed schedule stays counted; each new try adds two.
    for num_counted in (3, 5):
        training.model.zero_grad_buffer()
        message = rf"micro-batches {num_counted} instead of 2, tokens .* call reset_step\(\)"
        with pytest.raises(StepError, match=message):
            training.schedule(plan, 0, scale)

    training.correction.reset_step()
    gradient, metrics = training.step(plan, 0)
    undisturbed = Training(training.mode)
    expected_gradient, expected_metrics = undisturbed.step(undisturbed.planned(), 0)
    assert torch.equal(gradient, expected_gradient)
    assert metrics == expected_metrics


# Indices of the micro-batches that are run as the first mini-batch, which consists of the micro-batches 0 and 1.
WRONG_SCHEDULES = {
    "one missing and one twice": (0, 0),
    "both twice": (0, 1, 0, 1),
    "one of the other mini-batch": (0, 3),
    "those of the other mini-batch": (2, 3),
    "one missing": (1,),
    "one twice": (0, 1, 1),
}


@pytest.mark.parametrize("ids", ["default ids", "sequence_ids", "no mini_batch_ids"])
@pytest.mark.parametrize("wrong", WRONG_SCHEDULES)
def test_equal_micro_batches_are_told_apart(training, wrong, ids):
    """All rows have equally many tokens, and weights of 1."""
    training.make_alike()
    sequence_ids = torch.tensor([7, 5, 3, 8, 2, 6, 0, 1]) if ids == "sequence_ids" else None
    plan, micro_batches = planned(training, sequence_ids=sequence_ids)
    if ids == "no mini_batch_ids":
        micro_batches = [dataclasses.replace(micro_batch, mini_batch_ids=None) for micro_batch in micro_batches]

    indices = WRONG_SCHEDULES[wrong]
    scale = plan.loss_scale(0, num_microbatches=len(indices))
    with pytest.raises(StepError, match="not those of its mini-batch in the plan"):
        run(training, scale, [(index, micro_batches[index]) for index in indices])

    # The right micro-batches are accepted in any order.
    training.correction.reset_step()
    run(training, plan.loss_scale(0, num_microbatches=2), [(1, micro_batches[1]), (0, micro_batches[0])])
    torch.testing.assert_close(training.model.gradient, training.expected(0), rtol=1e-12, atol=1e-15)


def test_equal_micro_batches_are_told_apart_after_a_schedule_that_failed(training):
    """The failed schedule has counted micro-batch 0. The schedule that is run again leaves micro-batch 1 out."""
    training.make_alike()
    plan, micro_batches = planned(training)
    scale = plan.loss_scale(0, num_microbatches=2)
    log_probs = training.model(range(PER_MICRO_BATCH))
    loss, _, _ = masked_loss(training.correction, micro_batches[0], log_probs, entropy=None, scale=scale)
    loss.backward()
    with pytest.raises(StepError, match=r"\(sum of \(sequence id \+ 1\) over tokens 36 instead of 60\)"):
        run(training, scale, [(0, micro_batches[0])])


@pytest.mark.parametrize("mini_batch", [0, 1])
def test_a_step_that_nothing_ends_is_found_by_the_next_one(training, mini_batch):
    """Megatron's config has no wrapped function, or one that nobody calls."""
    training.make_alike()
    plan = training.planned()
    scales = [training.scale(plan, index) for index in range(2)]
    training.schedule(plan, 0, scales[0], finalize=False)

    with pytest.raises(StepError, match=r"finalize_model_grads_func"):
        training.correction.loss_metrics()
    with pytest.raises(StepError, match=r"finalize_model_grads_func"):
        training.scale(plan, mini_batch)
    if training.mode == "bypass":
        with pytest.raises(StepError, match=r"step before finish_step\(\)"):
            assert training.correction.step

    # With a scale that was made before: found at the end of the same mini-batch, or in the loss of another one.
    message = "micro-batches 4 instead of 2" if mini_batch == 0 else "mini_batch=1 in the open step"
    with pytest.raises(StepError, match=message):
        training.schedule(plan, mini_batch, scales[mini_batch])


def test_what_fills_a_step_may_be_of_any_mini_batch(training):
    # The rows of micro-batch 3 have no token: it may fill a step of the first mini-batch.
    training.mask[6:] = False
    plan, micro_batches = planned(training)
    scale = plan.loss_scale(0, num_microbatches=3)
    run(training, scale, [(index, micro_batches[index]) for index in (0, 1, 3)])
    torch.testing.assert_close(training.model.gradient, training.expected(0), rtol=1e-12, atol=1e-15)


def test_a_wrapped_function_is_not_wrapped_again(training):
    with pytest.raises(ValueError, match="ends the steps of this correction already"):
        wrap_finalize(training.correction, training.finalize)
    # Another correction may wrap it.
    wrap_finalize(Training(training.mode).correction, training.finalize)


def test_a_step_keeps_no_token():
    """The numbers of a step are added up when a loss is made, so that they do not grow with the tokens."""
    training = Training("bypass", CONFIG | {"rollout_is": "sequence"})
    correction = training.correction
    num_rows = 4
    length = 2**14
    rollout = torch.full((num_rows, length), -1.0)
    layout = SequenceLayout.padded(num_rows, length)
    plan = correction.plan(PlanInputs(None, [rollout] * 3, [rollout < 0] * 3))
    scale = plan.loss_scale(num_microbatches=3)

    def num_tensors_of_tokens():
        gc.collect()
        # By type(): some objects of other packages warn when they are asked for their class.
        tensors = [candidate for candidate in gc.get_objects() if type(candidate) is torch.Tensor]
        return sum(tensor.numel() == num_rows * length for tensor in tensors)

    def run_micro_batch():
        log_probs = torch.full_like(rollout, -1.1, requires_grad=True)
        micro_batch = MicroBatch(
            train_log_probs=None,
            rollout_log_probs=rollout,
            response_mask=rollout < 0,
            layout=layout,
            advantages=torch.ones(num_rows),
        )
        loss, _, _ = masked_loss(correction, micro_batch, log_probs, entropy=None, scale=scale)
        loss.backward()

    num_before = num_tensors_of_tokens()
    for _ in range(3):
        run_micro_batch()
    assert num_tensors_of_tokens() == num_before
    assert correction.finish_step() == 1


@pytest.mark.parametrize("name", ["rollout_log_probs", "log_probs"])
def test_buffers_may_be_filled_anew_within_a_step(name):
    """The micro-batches share the memory of one of their tensors: the end of the step reads none of them."""
    unshared = Training("bypass")
    unshared.step(unshared.planned(), 0)

    training = Training("bypass")
    plan = training.planned()
    scale = training.scale(plan, 0)
    buffer = None
    for start in range(0, 4, PER_MICRO_BATCH):
        rows = range(start, start + PER_MICRO_BATCH)
        log_probs = training.model(rows)
        micro_batch = training.micro_batch(plan, rows)
        if name == "rollout_log_probs":
            values = micro_batch.rollout_log_probs
            buffer = values.clone() if buffer is None else buffer.copy_(values)
            micro_batch = dataclasses.replace(micro_batch, rollout_log_probs=buffer)
        loss, _, _ = masked_loss(training.correction, micro_batch, log_probs, entropy=None, scale=scale)
        loss.backward()
        if name == "log_probs":
            log_probs.detach().zero_()
    training.finalize([training.model])

    training.correction.step.check()
    # masked_loss multiplies by the number of micro-batches, 2. Megatron would divide by it again.
    torch.testing.assert_close(training.model.gradient, 2 * training.expected(0), rtol=1e-12, atol=1e-15)
    unshared.correction.step.check()
    assert on_host(training.correction.step.header) == on_host(unshared.correction.step.header)


def test_a_step_of_nothing_is_refused_where_the_loss_corrects():
    training = Training("bypass")
    plan = training.planned()
    with torch.no_grad():
        training.schedule(plan, 0, forward_only=True)
    with pytest.raises(StepError, match="without a micro-batch"):
        training.finalize([training.model])
    gradient, _ = training.step(plan, 0)
    torch.testing.assert_close(gradient, training.expected(0), rtol=1e-12, atol=1e-15)


PER_TOKEN_LOSS = {"mini_batch": 0, "num_microbatches": 1, "calculate_per_token_loss": True}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_microbatches": 2}, "the plan has 2 mini-batches: say which"),
        ({"mini_batch": 2, "num_microbatches": 2}, r"mini_batch=2 is not in \[0, 2\)"),
        ({"mini_batch": 0, "num_microbatches": 0}, "num_microbatches=0 must be at least 1"),
        (PER_TOKEN_LOSS, "local_tokens=0, total_tokens=0"),
        (PER_TOKEN_LOSS | {"local_tokens": 4, "total_tokens": 2**31}, "total_tokens=2147483648"),
    ],
)
def test_scales_that_cannot_be_are_refused(training, arguments, message):
    with pytest.raises(ValueError, match=message):
        training.planned().loss_scale(**arguments)


@pytest.mark.parametrize("bad_log_probs", ["error", "reject_token"])
@pytest.mark.parametrize("wrong_pieces", [[(0, 2), (2, 4), (0, 2)], [(0, 2)]], ids=["one twice", "one missing"])
def test_a_step_counts_the_tokens_of_its_mini_batch(wrong_pieces, bad_log_probs):
    """An evaluation by in_loss() with gradients on, or a repeated or incomplete schedule without a LossScale."""
    training = Training("bypass", CONFIG | {"bad_log_probs": bad_log_probs})
    if bad_log_probs != "error":
        first_token = int(training.mask[1].nonzero()[0])
        training.rollout[1, first_token] = torch.nan
    correction = training.correction

    def count(pieces):
        """Correct the rows from ``start`` to ``end`` of each piece in the first mini-batch."""
        for start, end in pieces:
            rows = slice(start, end)
            correction.in_loss(training.old[rows], training.rollout[rows], training.mask[rows], mini_batch=0)

    training.planned()
    count([(0, 2), (2, 4)])
    factor = correction.finish_step()

    count(wrong_pieces)
    with pytest.raises(StepError, match=r"tokens \d+ instead of \d+.*reset_step"):
        correction.finish_step()

    correction.reset_step()
    count([(0, 2), (2, 4)])
    assert torch.equal(correction.finish_step(), factor)


def test_the_mini_batch_is_named_where_there_are_several():
    training = Training("bypass")
    training.planned()
    in_loss = training.correction.in_loss
    log_probs = training.rollout[:2]
    response_mask = training.mask[:2]
    with pytest.raises(ValueError, match="the plan has 2 mini-batches: say which"):
        in_loss(log_probs, log_probs, response_mask)
    with pytest.raises(ValueError, match=r"mini_batch=2 is not in \[0, 2\)"):
        in_loss(log_probs, log_probs, response_mask, mini_batch=2)

    with torch.no_grad():
        weights, mask, lengths = in_loss(log_probs, log_probs, response_mask, mini_batch=1)
    assert (weights.shape, mask.dtype, lengths.shape) == (mask.shape, torch.bool, (2,))
    # Without gradients nothing was counted, and another step may begin.
    in_loss(log_probs, log_probs, response_mask, mini_batch=0)


def test_ids_that_only_the_loss_is_given_are_not_compared():
    """The plan does not know them. Error messages name them."""
    training = Training("bypass")
    plan = training.planned()
    rollout = training.rollout.clone()
    rollout[1, training.mask[1]] = torch.nan
    for start in (0, 2):
        rows = slice(start, start + 2)
        sequence_ids = torch.tensor([50, 60]) + start
        training.correction.in_loss(
            training.old[rows], rollout[rows], training.mask[rows], mini_batch=0, sequence_ids=sequence_ids
        )
    training.correction.finish_step()
    with pytest.raises(ValueError, match="sample 60"):
        training.correction.step.check()
    assert plan.num_mini_batches == 2


@pytest.mark.parametrize(
    ("fields", "wrong", "message"),
    [
        ({}, lambda micro_batch: {"mask": micro_batch.mask.float()}, "mask is torch.float32: expected bool"),
        ({}, lambda micro_batch: {"mask": micro_batch.mask[:1]}, r"mask has shape \(1, 6\): expected \(2, 6\)"),
        (
            {},
            lambda micro_batch: {"sequence_lengths": micro_batch.sequence_lengths.repeat(2)},
            "sequence_lengths has 4 values: expected one for each of 2 sequences",
        ),
        ({}, lambda micro_batch: {"weights": None}, "rollout_is='token' applies weights, and the micro-batch has none"),
        (
            {"rollout_is_apply": False},
            lambda micro_batch: {"weights": torch.ones(2, WIDTH)},
            "rollout_is_apply=False: no weights are applied.* leave MicroBatch",
        ),
    ],
)
def test_what_the_plan_gave_must_fit_the_micro_batch(fields, wrong, message):
    training = Training("decoupled", CONFIG | fields)
    plan = training.planned()
    micro_batch = training.micro_batch(plan, range(2))
    scale = training.scale(plan, 0)
    masked_loss(training.correction, micro_batch, training.model(range(2)), entropy=None, scale=scale)

    training.correction.reset_step()
    misfit = dataclasses.replace(micro_batch, **wrong(micro_batch))
    with pytest.raises(ValueError, match=message):
        masked_loss(training.correction, misfit, training.model(range(2)), entropy=None, scale=scale)


def test_the_plan_makes_the_micro_batches():
    for mode in MODES:
        training = Training(mode)
        plan_of_tensors = training.planned()
        inputs = listed(training)
        _, micro_batches = planned(training)
        assert len(micro_batches) == 4

        for index, micro_batch in enumerate(micro_batches):
            cut_by_hand = training.micro_batch(plan_of_tensors, range(2 * index, 2 * index + 2))
            assert micro_batch.plan_ids.tolist() == [2 * index, 2 * index + 1]
            expected = dataclasses.replace(
                cut_by_hand, mini_batch_ids=inputs.mini_batch_ids[index], plan_ids=micro_batch.plan_ids
            )
            for name, expected_value in vars(expected).items():
                value = getattr(micro_batch, name)
                assert type(value) is type(expected_value), name
                if isinstance(expected_value, torch.Tensor):
                    torch.testing.assert_close(value, expected_value, rtol=1e-12, atol=0)

        with pytest.raises(ValueError, match="advantages are missing"):
            plan_of_tensors.micro_batches(dataclasses.replace(inputs, advantages=None))
        for wrong_advantages in (torch.zeros(3), torch.zeros(2, dtype=torch.int64)):
            with pytest.raises(ValueError, match="advantages"):
                plan_of_tensors.micro_batches(dataclasses.replace(inputs, advantages=[wrong_advantages] * 4))


def test_tensors_of_the_inference_mode_are_taken():
    training = Training("bypass")
    with torch.inference_mode():
        training.rollout = training.rollout.clone()
        training.mask = training.mask.clone()
    gradient, _ = training.step(training.planned(), 0)
    torch.testing.assert_close(gradient, training.expected(0), rtol=1e-12, atol=1e-15)


def test_a_plan_of_other_counts_between_two_steps_changes_nothing():
    """A step's header is as long as the plan of its scale says, on the stages that see no loss too."""
    training = Training("bypass")
    plan = training.planned()
    versions = torch.zeros(ROWS, dtype=torch.int64)
    inputs = PlanInputs(None, training.rollout, training.mask, policy_versions=versions)
    training.correction.plan(inputs, current_version=2, max_staleness=2)
    gradient, _ = training.step(plan, 0)
    torch.testing.assert_close(gradient, training.expected(0), rtol=1e-12, atol=1e-15)
