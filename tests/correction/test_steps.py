"""What one optimizer step counts, and that calls between two steps change no gradient or are refused."""

import contextlib
import dataclasses
import types

import pytest
import torch

from benchmarks.step import timed_correction
from megatron_rc import (
    PlanInputs,
    PolicyLossConfig,
    RolloutCorrection,
    RolloutCorrectionConfig,
    StepError,
    correct_rollouts,
    masked_loss,
    wrap_finalize,
)
from megatron_rc.parallel import ParallelGroups
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
    with pytest.raises(OSError, match="out of memory"):
        training.schedule(plan, 0, fails_at=1)
    for _ in range(2):
        training.model.zero_grad_buffer()
        with pytest.raises(StepError, match=r"sums that no step has finished .* call reset_step\(\)"):
            training.schedule(plan, 0)
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
    with pytest.raises(StepError, match="scales of several mini-batches or plans"):
        training.schedule(plan, 1)


@pytest.mark.parametrize("chosen", [(2, 3), (0, 3)], ids=str)
def test_micro_batches_of_another_mini_batch_are_refused(training, chosen):
    """Their tokens would be divided by the number of others."""
    plan, made = planned(training)
    scale = plan.loss_scale(0, num_microbatches=2)
    with pytest.raises(StepError, match="another mini-batch, as their mini_batch_ids say, than the LossScale"):
        run(training, scale, {index: made[index] for index in chosen})


def test_what_fills_a_step_may_be_of_any_mini_batch(training):
    training.mask[6:] = False
    plan, made = planned(training)
    run(training, plan.loss_scale(0, num_microbatches=3), {index: made[index] for index in (0, 1, 3)})
    torch.testing.assert_close(training.model.gradient, training.expected(0), rtol=1e-12, atol=1e-15)


def test_losses_of_half_a_step_are_not_a_step(training):
    plan = training.planned()
    half = plan.loss_scale(0, num_microbatches=4)
    with pytest.raises(StepError, match="another number of micro-batches than num_microbatches"):
        training.schedule(plan, 0, half)


def test_two_schedules_before_one_optimizer_step_in_bypass():
    training = Training("bypass")
    plan = training.planned()
    for _ in range(2):
        training.step(plan, 0)
    with pytest.raises(StepError, match="two schedules without an optimizer step"):
        training.schedule(plan, 1)
    # An evaluation before the gradients are zeroed is none of it.
    training.correction.reset_step()
    training.step(plan, 0)
    training.schedule(plan, 1, forward_only=True)
    gradient, _ = training.step(plan, 1)
    torch.testing.assert_close(gradient, training.expected(1), rtol=1e-12, atol=1e-15)


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
    hidden = wrap_finalize(training.correction, lambda model: training.finalize(model))
    plan = training.planned()
    training.schedule(plan, 0, finalize=False)
    with pytest.raises(StepError, match=r"wrap_finalize\(\) inside another"):
        hidden([training.model])
    wrap_finalize(Training(training.mode).correction, training.finalize)


def test_without_a_wrapped_function_no_step_begins_in_the_loss():
    """On every pipeline stage, since all of them take the scale. One that nobody keeps is like none."""
    config = RolloutCorrectionConfig(**CONFIG, **MODES["bypass"])
    correction = RolloutCorrection(config, ParallelGroups(), loss=PolicyLossConfig())
    log_probs = torch.full((2, WIDTH), -1.0)
    plan = correction.plan(PlanInputs(None, log_probs, log_probs < 0))
    with pytest.raises(ValueError, match=r"finalize_model_grads_func=wrap_finalize\(correction\)"):
        plan.loss_scale(num_microbatches=1)
    transformer_config = types.SimpleNamespace(finalize_model_grads_func=wrap_finalize(correction, lambda model: None))
    assert plan.loss_scale(num_microbatches=1).denominator == 2 * WIDTH
    transformer_config.finalize_model_grads_func = None
    with pytest.raises(ValueError, match=r"finalize_model_grads_func=wrap_finalize\(correction\)"):
        plan.loss_scale(num_microbatches=1)
    decoupled = RolloutCorrection(RolloutCorrectionConfig(**CONFIG), ParallelGroups(), loss=PolicyLossConfig())
    plan = decoupled.plan(PlanInputs(log_probs, log_probs, log_probs < 0))
    plan.check()
    plan.loss_scale(num_microbatches=1)


def test_a_wrapped_function_that_is_not_called_ends_no_step():
    """It was made, and never given to Megatron's config: known when the next step's scale is asked for."""
    training = Training("bypass")
    plan = training.planned()
    training.schedule(plan, 0, finalize=False)
    for read in (lambda: training.correction.step, training.correction.loss_metrics):
        with pytest.raises(StepError, match=r"before finish_step\(\): end every step, as wrap_finalize"):
            read()
    with pytest.raises(StepError, match="nothing has ended its step or scaled its gradients"):
        training.scale(plan, 1)
    with pytest.raises(StepError, match="nothing has ended its step or scaled its gradients"):
        training.scale(training.planned(), 0)


def test_an_early_stage_learns_from_the_losses_metrics_alone_that_no_step_was_ended(monkeypatch):
    monkeypatch.setattr(ParallelGroups, "is_last_stage", False)
    config = RolloutCorrectionConfig(**CONFIG, **MODES["bypass"])
    correction = RolloutCorrection(config, ParallelGroups(), loss=PolicyLossConfig())
    wrapped = wrap_finalize(correction, lambda model: None)
    assert wrapped
    plan = correction.plan(None)
    for _ in range(2):
        plan.loss_scale(num_microbatches=1)
        assert correction.step is None
        with pytest.raises(StepError, match=r"loss_metrics\(\) before finish_step"):
            correction.loss_metrics()


def test_a_wrapped_function_that_is_not_called_is_missed_with_scales_made_before_too():
    training = Training("bypass")
    plan = training.planned()
    scales = [training.scale(plan, index) for index in range(2)]
    for index in range(2):
        training.schedule(plan, index, scales[index], finalize=False)
    with pytest.raises(StepError, match="sums that no step has finished"):
        training.schedule(plan, 0, scales[0], finalize=False)


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
    with pytest.raises(StepError, match=r"not those of its mini-batch in the plan.*reset_step"):
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


def test_a_scale_of_other_counts_is_refused():
    """The header of a step is as long as the newest plan says, on the stages that see no scale too."""
    training = Training("bypass")
    plan = training.planned()
    versions = torch.zeros(ROWS, dtype=torch.int64)
    inputs = PlanInputs(None, training.rollout, training.mask, policy_versions=versions)
    training.correction.plan(inputs, current_version=2, max_staleness=2)
    with pytest.raises(StepError, match="is not that of the newest plan"):
        training.schedule(plan, 0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda one: {"mask": one.mask.float()}, r"MicroBatch\(mask=...\) is torch.float32: expected bool"),
        (lambda one: {"mask": one.mask[:1]}, r"MicroBatch\(mask=...\) has shape \(1, 6\): expected \(2, 6\)"),
        (lambda one: {"sequence_lengths": one.sequence_lengths.repeat(2)}, r"MicroBatch\(sequence_lengths=...\) has"),
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
            assert torch.equal(micro_batch.mini_batch_ids, ids[index])
            for name, value in vars(dataclasses.replace(known, mini_batch_ids=ids[index])).items():
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
    assert not {"count", "record"} & set(vars(correction.steps))
