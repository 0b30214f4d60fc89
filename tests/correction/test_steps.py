"""What one optimizer step counts, and that calls between two steps change no gradient or are refused."""

import contextlib
import dataclasses
import gc

import pytest
import torch

from benchmarks.step import timed_correction
from megatron_rc import (
    MicroBatch,
    PlanInputs,
    PolicyLossConfig,
    RolloutCorrection,
    RolloutCorrectionConfig,
    StepError,
    correct_rollouts,
    masked_loss,
    wrap_finalize,
)
from megatron_rc.parallel import ParallelGroups, SequenceLayout
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
    assert not torch.allclose(training.expected(0).sum(), training.expected(1).sum())


@pytest.mark.parametrize("gradients", [contextlib.nullcontext, torch.no_grad], ids=["", "no_grad"])
@pytest.mark.parametrize("own_plan", [False, True])
def test_an_evaluation_between_two_steps_counts_nothing(training, gradients, own_plan):
    other = Training(training.mode)
    known = [other.step(other.planned(), index) for index in range(2)]
    plan = training.planned()
    for mini_batch in range(2):
        with gradients():
            evaluated = training.planned() if own_plan else plan
            training.schedule(evaluated, 1 - mini_batch, forward_only=True)
        gradient, metrics = training.step(plan, mini_batch)
        assert torch.equal(gradient, known[mini_batch][0])
        assert metrics == known[mini_batch][1]


@pytest.mark.parametrize("before", [True, False], ids=["before the step", "before its end"])
def test_a_second_plan_changes_nothing(training, before):
    plan = training.planned()
    other = Training(training.mode)
    other.mask &= torch.arange(WIDTH) % 2 == 0
    inputs = PlanInputs(None if training.mode == "bypass" else other.old, other.rollout, other.mask)
    if before:
        training.correction.plan(inputs)
        training.step(plan, 1)
    else:
        training.schedule(plan, 1, finalize=False)
        training.planned()
        training.finalize([training.model])
    torch.testing.assert_close(training.model.gradient, training.expected(1), rtol=1e-12, atol=1e-15)


def test_a_schedule_that_failed_is_not_run_again_before_the_step_is_reset(training):
    plan = training.planned()
    scale = training.scale(plan, 0)
    with pytest.raises(OSError, match="out of memory"):
        training.schedule(plan, 0, scale, fails_at=1)
    for counted in (3, 5):
        training.model.zero_grad_buffer()
        with pytest.raises(StepError, match=rf"micro-batches {counted} instead of 2, tokens .* call reset_step\(\)"):
            training.schedule(plan, 0, scale)
    training.correction.reset_step()
    gradient, metrics = training.step(plan, 0)
    other = Training(training.mode)
    known, known_metrics = other.step(other.planned(), 0)
    assert torch.equal(gradient, known)
    assert metrics == known_metrics


def test_another_step_does_not_go_on_with_the_sums_of_one_that_failed(training):
    plan = training.planned()
    with pytest.raises(OSError, match="out of memory"):
        training.schedule(plan, 0, fails_at=1)
    with pytest.raises(StepError, match=r"mini_batch=1 in the open step of mini-batch 0 .* reset_step\(\)"):
        training.schedule(plan, 1)


# The places of micro-batches that are run for the first mini-batch, whose own are 0 and 1.
WRONG = {
    "one missing and one twice": (0, 0),
    "both twice": (0, 1, 0, 1),
    "one of the other mini-batch": (0, 3),
    "those of the other mini-batch": (2, 3),
    "one missing": (1,),
    "one twice": (0, 1, 1),
}


@pytest.mark.parametrize("ids", ["default ids", "sequence_ids", "no mini_batch_ids"])
@pytest.mark.parametrize("wrong", WRONG)
def test_equal_micro_batches_are_told_apart(training, wrong, ids):
    """All rows have equally many tokens, and weights of 1."""
    training.make_alike()
    plan, made = planned(
        training, sequence_ids=torch.tensor([7, 5, 3, 8, 2, 6, 0, 1]) if ids == "sequence_ids" else None
    )
    if ids == "no mini_batch_ids":
        made = [dataclasses.replace(each, mini_batch_ids=None) for each in made]
    wrong_places = WRONG[wrong]
    scale = plan.loss_scale(0, num_microbatches=len(wrong_places))
    with pytest.raises(StepError, match="not those of its mini-batch in the plan"):
        run(training, scale, [(place, made[place]) for place in wrong_places])
    training.correction.reset_step()
    # In any order.
    run(training, plan.loss_scale(0, num_microbatches=2), [(1, made[1]), (0, made[0])])
    torch.testing.assert_close(training.model.gradient, training.expected(0), rtol=1e-12, atol=1e-15)


def test_equal_micro_batches_are_told_apart_after_a_schedule_that_failed(training):
    """One micro-batch of it is left; the schedule that is run again leaves that one out."""
    training.make_alike()
    plan, made = planned(training)
    scale = plan.loss_scale(0, num_microbatches=2)
    log_probs = training.model(range(PER_MICRO_BATCH))
    masked_loss(training.correction, made[0], log_probs, None, scale)[0].backward()
    with pytest.raises(StepError, match=r"\(sum of \(sequence id \+ 1\) over tokens 36 instead of 60\)"):
        run(training, scale, [(0, made[0])])


@pytest.mark.parametrize("mini_batch", [0, 1])
def test_a_step_that_nothing_ends_is_found_by_the_next_one(training, mini_batch):
    """No wrapped function is in Megatron's config, or none that anybody calls."""
    training.make_alike()
    plan = training.planned()
    scales = [training.scale(plan, index) for index in range(2)]
    training.schedule(plan, 0, scales[0], finalize=False)
    for read in (lambda: training.correction.loss_metrics(), lambda: training.scale(plan, mini_batch)):
        with pytest.raises(StepError, match=r"finalize_model_grads_func"):
            read()
    if training.mode == "bypass":
        with pytest.raises(StepError, match=r"step before finish_step\(\)"):
            assert training.correction.step
    # With a scale that was made before: found in the loss of another mini-batch, or at the end.
    with pytest.raises(StepError, match=["micro-batches 4 instead of 2", "mini_batch=1 in the open step"][mini_batch]):
        training.schedule(plan, mini_batch, scales[mini_batch])


def test_an_early_stage_learns_from_the_losses_metrics_alone_that_no_step_was_ended(monkeypatch):
    monkeypatch.setattr(ParallelGroups, "is_last_stage", False)
    config = RolloutCorrectionConfig(**CONFIG, **MODES["bypass"])
    correction = RolloutCorrection(config, ParallelGroups(), loss=PolicyLossConfig())
    plan = correction.plan(None)
    for _ in range(2):
        plan.loss_scale(num_microbatches=1)
        assert correction.step is None
        with pytest.raises(StepError, match=r"loss_metrics\(\) before finish_step"):
            correction.loss_metrics()


def test_what_fills_a_step_may_be_of_any_mini_batch(training):
    training.mask[6:] = False
    plan, made = planned(training)
    run(training, plan.loss_scale(0, num_microbatches=3), [(index, made[index]) for index in (0, 1, 3)])
    torch.testing.assert_close(training.model.gradient, training.expected(0), rtol=1e-12, atol=1e-15)


def test_losses_of_half_a_step_are_not_a_step(training):
    """The gradients would be divided by another number of micro-batches than the losses were multiplied by."""
    plan = training.planned()
    half = plan.loss_scale(0, num_microbatches=4)
    with pytest.raises(StepError, match=r"\(micro-batches 2 instead of 4\).* plan\.loss_scale\(\)"):
        training.schedule(plan, 0, half)


def test_two_schedules_add_up_where_nothing_is_scaled():
    training = Training("decoupled")
    plan = training.planned()
    training.model.zero_grad_buffer()
    for index in range(2):
        training.schedule(plan, index)
    wanted = training.expected(0) + training.expected(1)
    torch.testing.assert_close(training.model.gradient, wanted, rtol=1e-12, atol=1e-15)


def test_a_wrapped_function_is_not_wrapped_again(training):
    with pytest.raises(ValueError, match="ends the steps of this correction already"):
        wrap_finalize(training.correction, training.finalize)
    wrap_finalize(Training(training.mode).correction, training.finalize)


def test_a_loss_that_cannot_be_made_leaves_no_trace(training):
    """The rank that makes it raises, and so do not the others."""
    plan, made = planned(training)
    scale = plan.loss_scale(0, num_microbatches=2)
    wrong = dataclasses.replace(made[0], rollout_log_probs=made[0].rollout_log_probs[:1])
    with pytest.raises(ValueError, match="rollout_log_probs has shape"):
        masked_loss(training.correction, wrong, training.model(range(2)), None, scale)
    run(training, scale, [(0, made[0]), (1, made[1])])
    torch.testing.assert_close(training.model.gradient, training.expected(0), rtol=1e-12, atol=1e-15)


def test_a_step_keeps_no_token():
    """Its numbers are added up when a loss is made, so that they do not grow with the tokens."""
    training = Training("bypass", CONFIG | {"rollout_is": "sequence"})
    correction = training.correction
    rows, length = 4, 2**14
    rollout = torch.full((rows, length), -1.0)
    layout = SequenceLayout.padded(rows, length)
    plan = correction.plan(PlanInputs(None, [rollout] * 3, [rollout < 0] * 3))
    scale = plan.loss_scale(num_microbatches=3)

    def num_tensors_of_tokens():
        gc.collect()
        # By type(): some objects of other packages warn when they are asked for their class.
        tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
        return sum(tensor.numel() == rows * length for tensor in tensors)

    def run_micro_batch():
        log_probs = torch.full_like(rollout, -1.1, requires_grad=True)
        micro_batch = MicroBatch(None, rollout, rollout < 0, layout, torch.ones(rows))
        masked_loss(correction, micro_batch, log_probs, None, scale)[0].backward()

    before = num_tensors_of_tokens()
    for _ in range(3):
        run_micro_batch()
    assert num_tensors_of_tokens() == before
    assert correction.finish_step() == 1


@pytest.mark.parametrize("name", ["rollout_log_probs", "response_mask", "log_probs"])
def test_buffers_may_be_filled_anew_within_a_step(name):
    """The micro-batches share the memory of one of their tensors: the end of the step reads none of them."""
    usual, training = Training("bypass"), Training("bypass")
    usual.step(usual.planned(), 0)
    plan, buffer = training.planned(), None
    scale = training.scale(plan, 0)
    for start in range(0, 4, PER_MICRO_BATCH):
        rows = range(start, start + PER_MICRO_BATCH)
        log_probs, micro_batch = training.model(rows), training.micro_batch(plan, rows)
        if name != "log_probs":
            fresh = getattr(micro_batch, name)
            buffer = fresh.clone() if buffer is None else buffer.copy_(fresh)
            micro_batch = dataclasses.replace(micro_batch, **{name: buffer})
        masked_loss(training.correction, micro_batch, log_probs, None, scale)[0].backward()
        if name == "log_probs":
            log_probs.detach().zero_()
    training.finalize([training.model])
    training.correction.step.check()
    torch.testing.assert_close(training.model.gradient, 2 * training.expected(0), rtol=1e-12, atol=1e-15)
    for one in (training, usual):
        one.correction.step.check()
    assert on_host(training.correction.step.header) == on_host(usual.correction.step.header)


def test_micro_batches_of_a_step_may_give_values_by_sequence_or_by_token():
    usual, mixed = Training("bypass"), Training("bypass")
    as_usual = mixed.micro_batch

    def by_token(plan, rows):
        """The first micro-batch has an advantage for each token, and ids."""
        one = as_usual(plan, rows)
        advantages = one.layout.expand(one.advantages)
        return one if rows[0] else dataclasses.replace(one, advantages=advantages, sequence_ids=torch.arange(2))

    mixed.micro_batch = by_token
    (gradient, _), (wanted, _) = (one.step(one.planned(), 0) for one in (mixed, usual))
    assert torch.equal(gradient, wanted)
    metrics, expected = (one.correction.step.metrics() for one in (mixed, usual))
    assert metrics == pytest.approx(expected, rel=1e-12)


def test_tensors_of_the_inference_mode_are_taken():
    training = Training("bypass")
    with torch.inference_mode():
        training.rollout, training.mask = training.rollout.clone(), training.mask.clone()
    gradient, _ = training.step(training.planned(), 0)
    torch.testing.assert_close(gradient, training.expected(0), rtol=1e-12, atol=1e-15)


def test_a_step_of_nothing_is_refused_where_the_loss_corrects():
    training = Training("bypass")
    plan = training.planned()
    with torch.no_grad():
        training.schedule(plan, 0, forward_only=True)
    with pytest.raises(StepError, match="without a micro-batch"):
        training.finalize([training.model])
    gradient, _ = training.step(plan, 0)
    torch.testing.assert_close(gradient, training.expected(0), rtol=1e-12, atol=1e-15)


def test_weights_that_the_config_applies_must_be_given():
    training = Training("decoupled")
    plan = training.planned()
    whole, scale = training.micro_batch(plan, range(2)), training.scale(plan, 0)
    without = dataclasses.replace(whole, weights=None)
    with pytest.raises(ValueError, match=r"rollout_is='token' applies weights, and the micro-batch has none"):
        masked_loss(training.correction, without, training.model(range(2)), None, scale)


BY_TOKENS = {"mini_batch": 0, "num_microbatches": 1, "calculate_per_token_loss": True}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_microbatches": 2}, "the plan has 2 mini-batches: say which"),
        ({"mini_batch": 2, "num_microbatches": 2}, r"mini_batch=2 is not in \[0, 2\)"),
        ({"mini_batch": -1, "num_microbatches": 2}, "mini_batch=-1 is not in"),
        ({"mini_batch": 0, "num_microbatches": 0}, "num_microbatches=0 must be at least 1"),
        ({"mini_batch": 0, "num_microbatches": 2.0}, "num_microbatches=2.0 must be a whole number"),
        (BY_TOKENS, "local_tokens=0, total_tokens=0"),
        (BY_TOKENS | {"local_tokens": 4, "total_tokens": 2**31}, "total_tokens=2147483648"),
    ],
)
def test_scales_that_cannot_be_are_refused(training, arguments, message):
    with pytest.raises(ValueError, match=message):
        training.planned().loss_scale(**arguments)


def test_weights_that_are_not_applied_are_refused():
    training = Training("decoupled", CONFIG | {"rollout_is_apply": False})
    plan = training.planned()
    micro_batch = training.micro_batch(plan, range(2))
    masked_loss(training.correction, micro_batch, training.model(range(2)), None, training.scale(plan, 0))
    weighted = dataclasses.replace(micro_batch, weights=torch.ones(2, WIDTH))
    with pytest.raises(ValueError, match=r"rollout_is_apply=False: no weights are applied.* leave MicroBatch"):
        masked_loss(training.correction, weighted, training.model(range(2)), None, training.scale(plan, 0))


@pytest.mark.parametrize("bad_log_probs", ["error", "reject_token", "reject_sequence"])
@pytest.mark.parametrize("rows", [[(0, 2), (2, 4), (0, 2)], [(0, 2)]], ids=["one twice", "one missing"])
def test_a_step_counts_the_tokens_of_its_mini_batch(rows, bad_log_probs):
    """An evaluation by in_loss() with gradients on, or a repeated or incomplete schedule without a LossScale."""
    training = Training("bypass", CONFIG | {"bad_log_probs": bad_log_probs})
    if bad_log_probs != "error":
        training.rollout[1, int(training.mask[1].nonzero()[0])] = torch.nan
    correction = training.correction

    def count(pieces):
        for start, end in pieces:
            at = slice(start, end)
            correction.in_loss(training.old[at], training.rollout[at], training.mask[at], mini_batch=0)

    training.planned()
    count([(0, 2), (2, 4)])
    factor = correction.finish_step()
    count(rows)
    with pytest.raises(StepError, match=r"tokens \d+ instead of \d+.*reset_step"):
        correction.finish_step()
    correction.reset_step()
    count([(0, 2), (2, 4)])
    assert torch.equal(correction.finish_step(), factor)


def test_the_mini_batch_is_named_where_there_are_several():
    training = Training("bypass")
    training.planned()
    found = training.rollout[:2], training.rollout[:2], training.mask[:2]
    with pytest.raises(ValueError, match="the plan has 2 mini-batches: say which"):
        training.correction.in_loss(*found)
    with pytest.raises(ValueError, match=r"mini_batch=2 is not in \[0, 2\)"):
        training.correction.in_loss(*found, mini_batch=2)
    with torch.no_grad():
        weights, mask, lengths = training.correction.in_loss(*found, mini_batch=1)
    assert (weights.shape, mask.dtype, lengths.shape) == (mask.shape, torch.bool, (2,))
    # Without gradients nothing was counted, and another step may begin.
    training.correction.in_loss(*found, mini_batch=0)


def test_a_plan_of_other_counts_between_two_steps_changes_nothing():
    """A step's header is as long as the plan of its scale says, on the stages that see no loss too."""
    training = Training("bypass")
    plan = training.planned()
    versions = torch.zeros(ROWS, dtype=torch.int64)
    inputs = PlanInputs(None, training.rollout, training.mask, policy_versions=versions)
    training.correction.plan(inputs, current_version=2, max_staleness=2)
    gradient, _ = training.step(plan, 0)
    torch.testing.assert_close(gradient, training.expected(0), rtol=1e-12, atol=1e-15)


def test_ids_that_only_the_loss_is_given_are_not_compared():
    """The plan does not know them. Error messages name them."""
    training = Training("bypass")
    plan = training.planned()
    rollout = training.rollout.clone()
    rollout[1, training.mask[1]] = torch.nan
    for start in (0, 2):
        rows = slice(start, start + 2)
        ids = torch.tensor([50, 60]) + start
        training.correction.in_loss(
            training.old[rows], rollout[rows], training.mask[rows], mini_batch=0, sequence_ids=ids
        )
    training.correction.finish_step()
    with pytest.raises(ValueError, match="sample 60"):
        training.correction.step.check()
    assert plan.num_mini_batches == 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda one: {"mask": one.mask.float()}, "mask is torch.float32: expected bool"),
        (lambda one: {"mask": one.mask[:1]}, r"mask has shape \(1, 6\): expected \(2, 6\)"),
        (
            lambda one: {"sequence_lengths": one.sequence_lengths.repeat(2)},
            "sequence_lengths has 4 values: expected one for each of 2 sequences",
        ),
    ],
)
def test_what_the_plan_gave_must_fit_the_micro_batch(wrong, message):
    training = Training("decoupled")
    plan = training.planned()
    whole, scale = training.micro_batch(plan, range(2)), training.scale(plan, 0)
    micro_batch = dataclasses.replace(whole, **wrong(whole))
    with pytest.raises(ValueError, match=message):
        masked_loss(training.correction, micro_batch, training.model(range(2)), None, scale)


def test_what_is_no_scale_no_group_and_no_tensor_is_named():
    training = Training("decoupled")
    micro_batch = training.micro_batch(training.planned(), range(2))
    with pytest.raises(ValueError, match=r"scale is None: take it from plan\.loss_scale"):
        masked_loss(training.correction, micro_batch, training.model(range(2)), None, None)
    with pytest.raises(ValueError, match=r"groups is a NoneType: pass ParallelGroups"):
        RolloutCorrection(training.correction.config, None, loss=PolicyLossConfig())
    with pytest.raises(ValueError, match=r"response_mask is a NoneType: expected a torch\.Tensor"):
        correct_rollouts(training.old, training.rollout, None, training.correction.config)
    with pytest.raises(ValueError, match=r"loss is a dict: pass a PolicyLossConfig"):
        RolloutCorrection(training.correction.config, ParallelGroups(), loss={})
    for mode in MODES:
        training = Training(mode)
        with pytest.raises(ValueError, match=r"inputs is a dict: pass PlanInputs"):
            training.correction.plan({})
        for name in ("rollout_log_probs", "response_mask", "layout", "advantages", "mini_batch_ids"):
            inputs = listed(training)
            wrong = dataclasses.replace(inputs, **{name: [[0], *inputs.response_mask[1:]]})
            with pytest.raises(ValueError, match=rf"{name}\[0\] is a list: pass"):
                training.correction.plan(wrong, num_mini_batches=2)
    with pytest.raises(ValueError, match=r"max_staleness=None must be a whole number"):
        training.correction.plan(PlanInputs(training.old, training.rollout, training.mask), max_staleness=None)
    with pytest.raises(ValueError, match=r"num_mini_batches=2\.5 must be a whole number"):
        training.correction.plan(PlanInputs(training.old, training.rollout, training.mask), num_mini_batches=2.5)


def test_the_plan_makes_the_micro_batches():
    for mode in MODES:
        training = Training(mode)
        whole = training.planned()
        inputs = listed(training)
        ids = inputs.mini_batch_ids
        _, found = planned(training)
        assert len(found) == 4
        for index, micro_batch in enumerate(found):
            known = training.micro_batch(whole, range(2 * index, 2 * index + 2))
            assert micro_batch.plan_ids.tolist() == [2 * index, 2 * index + 1]
            known = dataclasses.replace(known, mini_batch_ids=ids[index], plan_ids=micro_batch.plan_ids)
            for name, value in vars(known).items():
                got = getattr(micro_batch, name)
                assert type(got) is type(value), name
                if isinstance(value, torch.Tensor):
                    torch.testing.assert_close(got, value, rtol=1e-12, atol=0)
        with pytest.raises(ValueError, match="advantages are missing"):
            whole.micro_batches(dataclasses.replace(inputs, advantages=None))
        for wrong in (torch.zeros(3), torch.zeros(2, dtype=torch.int64)):
            with pytest.raises(ValueError, match="advantages"):
                whole.micro_batches(dataclasses.replace(inputs, advantages=[wrong] * 4))


def test_the_benchmark_of_steps_times_methods_that_are_there():
    """It puts clocks around them by name, and takes them off again."""
    correction = RolloutCorrection(RolloutCorrectionConfig(), ParallelGroups(), loss=PolicyLossConfig())
    with timed_correction(correction) as calls:
        correction.plan(PlanInputs(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)))
        assert len(calls) == 1
    assert not {"plan", "corrected", "finish_step"} & set(vars(correction))
    assert "count" not in vars(correction.open_step)
