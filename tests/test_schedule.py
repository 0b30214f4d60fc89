"""The masked loss of one micro-batch: what it needs, what must not reach it, and how a step ends."""

import dataclasses
import itertools
import math

import pytest
import torch

from megatron_rc import MicroBatch, PlanInputs, RolloutCorrection, RolloutCorrectionConfig, StepError
from megatron_rc.loss.kl import KL_ESTIMATORS
from megatron_rc.loss.objectives import OBJECTIVES
from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.parallel import ParallelGroups, SequenceLayout
from megatron_rc.training.schedule import masked_loss, wrap_finalize
from tests.support import one_step

ALONE = ParallelGroups()
ROWS = 3
WIDTH = 8
LOSS = PolicyLossConfig()
MODES = [*(("decoupled", algorithm) for algorithm in OBJECTIVES), *(("bypass", algorithm) for algorithm in OBJECTIVES)]


def make_correction(mode, algorithm, bad="error", **loss):
    fields = {"rollout_is": None, "rollout_rs": "token_k1", "rollout_rs_threshold": "0.8_1.25", "bad_log_probs": bad}
    if mode == "bypass":
        config = RolloutCorrectionConfig(**fields, bypass_mode=True, loss_type=algorithm)
    else:
        config = RolloutCorrectionConfig(**fields)
    return RolloutCorrection(config, ALONE, loss=PolicyLossConfig(algorithm=algorithm, **loss))


def tensors(seed=0):
    """Log π_θ, the others near it, and a mask with holes."""
    generator = torch.Generator().manual_seed(seed)
    shape = (ROWS, WIDTH)
    theta = -2 + 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    near = [theta + 0.2 * torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)]
    mask = torch.rand(shape, generator=generator) > 0.3
    return theta, *near, theta.abs(), mask


def inputs_of(correction, old, rollout, mask):
    advantages = torch.tensor([1.0, -0.7, 0.4], dtype=torch.float64)
    return PlanInputs(None if correction.config.bypass_mode else old, rollout, mask, advantages=advantages)


def run_loss(correction, theta, old, rollout, ref, entropy, mask):
    """(loss, gradients, metrics) of one step of one micro-batch."""
    leaves = [value.clone().requires_grad_() for value in (theta, entropy)]
    loss, count = one_step.made(correction, inputs_of(correction, old, rollout, mask), *leaves, ref_log_probs=ref)
    assert (int(count), count.dtype) == (1, torch.int32)
    return loss, *(leaf.grad for leaf in leaves), correction.loss_metrics()


@pytest.mark.parametrize("bypass", [False, True])
def test_weights_that_are_only_measured_do_not_reach_the_loss(bypass):
    algorithm = "reinforce" if bypass else "ppo_clip"
    mode = {"bypass_mode": True, "loss_type": algorithm} if bypass else {}
    steps = {
        name: run_loss(RolloutCorrection(RolloutCorrectionConfig(**fields, **mode), ALONE, loss=LOSS), *tensors())
        for name, fields in {
            "none": {"rollout_is": None},
            "measured": {"rollout_is": "token", "rollout_is_apply": False},
            "applied": {"rollout_is": "token"},
        }.items()
    }
    assert_equal(steps["measured"], steps["none"])
    assert not torch.equal(steps["applied"][1], steps["none"][1])


def assert_equal(step, other_step):
    for a, b in zip(step[:3], other_step[:3], strict=True):
        assert a.isfinite().all()
        assert torch.equal(a, b)
    assert step[3] == other_step[3]


@pytest.mark.parametrize(("mode", "estimator"), [*zip(MODES, itertools.cycle(KL_ESTIMATORS), strict=False)])
@pytest.mark.parametrize("filler", [math.nan])
def test_what_stands_at_masked_positions_changes_no_bit(mode, estimator, filler):
    *values, mask = tensors()
    filled = [torch.where(mask, value, filler) for value in values]
    loss = {"kl_coef": 0.1, "kl_estimator": estimator, "entropy_coef": 0.05}
    with_zeros, with_filler = (
        run_loss(make_correction(*mode, **loss), *log_probs, mask)
        for log_probs in ([torch.where(mask, value, 0.0) for value in values], filled)
    )
    assert_equal(with_zeros, with_filler)


@pytest.mark.parametrize(("mode", "algorithm"), MODES)
@pytest.mark.parametrize("bad", [math.nan, 0.5])
def test_rejected_bad_tokens_do_not_reach_the_loss(mode, algorithm, bad):
    """As if the response mask had never held them."""
    theta, old, rollout, ref, entropy, mask = tensors()
    places = mask.nonzero()[[1, -2]]
    spoilt = [rollout.clone(), old.clone()]
    spoilt[0][tuple(places[0])], spoilt[1][tuple(places[1])] = bad, bad
    without = mask.clone()
    without[tuple(places[0])] = False
    if mode == "decoupled":
        without[tuple(places[1])] = False
    loss = {"kl_coef": 0.1, "entropy_coef": 0.05}
    got = run_loss(
        make_correction(mode, algorithm, "reject_token", **loss), theta, spoilt[1], spoilt[0], ref, entropy, mask
    )
    expected = run_loss(make_correction(mode, algorithm, **loss), theta, old, rollout, ref, entropy, without)
    if mode == "decoupled":
        return assert_equal(expected, got)
    # D₀ still counts the bad token; the factor of the gradients makes up for it.
    torch.testing.assert_close(got[1] / got[1].norm(), expected[1] / expected[1].norm())
    assert got[3] == pytest.approx(expected[3])


@pytest.mark.parametrize("mode", ["decoupled", "bypass"])
def test_a_wrapped_finalize_passes_everything_on_and_ends_the_step_once(mode):
    correction = make_correction(mode, "ppo_clip")
    seen = []
    chunks = [one_step.Chunk(), one_step.Chunk()]
    *values, mask = tensors()
    run_loss(correction, *values, mask)
    bypass = mode == "bypass"
    if bypass:
        correction.plan(PlanInputs(None, values[2], mask))
        correction.in_loss(values[0], values[2], mask)
    wrapped = wrap_finalize(correction, lambda *args, **kwargs: seen.append((args, kwargs)))
    assert wrapped(chunks, None, pg_collection="groups", force_all_reduce=True) is None
    assert seen == [((chunks, None), {"pg_collection": "groups", "force_all_reduce": True})]
    expected = [float(correction.step.factor)] if bypass else []
    assert [chunk.factors for chunk in chunks] == [expected, expected]


def test_what_the_loss_needs_is_named():
    theta, old, rollout, _, entropy, mask = tensors()
    layout = SequenceLayout.padded(ROWS, WIDTH)
    batch = MicroBatch(None, rollout, mask, layout, torch.ones(ROWS))
    correction = make_correction("decoupled", "ppo_clip", entropy_coef=0.1, kl_coef=0.1)
    plan = correction.plan(PlanInputs(old, rollout, mask))
    plan.check()
    scale = plan.loss_scale(num_microbatches=1)
    with pytest.raises(ValueError, match=r"decoupled mode needs train_log_probs .*, and mask and sequence_lengths"):
        masked_loss(correction, batch, theta, entropy, scale)
    lengths = torch.full((ROWS,), 4.0, dtype=torch.float64)
    batch = dataclasses.replace(batch, train_log_probs=old, mask=mask, sequence_lengths=lengths)
    with pytest.raises(ValueError, match=r"entropy_coef=0\.1 needs the entropy"):
        masked_loss(correction, batch, theta, None, scale)
    with pytest.raises(ValueError, match=r"kl_coef=0\.1 needs the reference policy"):
        masked_loss(correction, batch, theta, entropy, scale)


def corrected_by_plan(mode, **loss):
    """(correction, its scale, its one micro-batch with every tensor, entropy, what ends its steps)."""
    _, old, rollout, ref, entropy, mask = tensors()
    correction = make_correction(mode, "reinforce", **loss)
    batch, scale, end = one_step.planned(correction, inputs_of(correction, old, rollout, mask))
    batch = dataclasses.replace(batch, ref_log_probs=ref, mini_batch_ids=torch.zeros(ROWS, dtype=torch.int64))
    return correction, scale, batch, entropy, end


@pytest.mark.parametrize("name", ["train_log_probs", "weights", "mask", "sequence_lengths"])
def test_what_the_loss_finds_is_not_taken_and_ignored(name):
    """It was worked out for decoupled mode."""
    correction, scale, batch, _, end = corrected_by_plan("bypass")
    results = {"mask": batch.response_mask, "sequence_lengths": torch.full((ROWS,), 4.0, dtype=torch.float64)}
    batch = dataclasses.replace(batch, **{name: results.get(name, batch.rollout_log_probs)})
    with pytest.raises(ValueError, match=rf"^{name} would be ignored: bypass_mode=True .*: pass {name}=None, or use"):
        masked_loss(correction, batch, tensors()[0], None, scale)
    with pytest.raises(StepError, match="without a micro-batch"):
        end([one_step.Chunk()])


@pytest.mark.parametrize("index", [slice(1)], ids=["one row"])
@pytest.mark.parametrize("name", ["ref_log_probs", "rollout_log_probs", "plan_ids", "entropy"])
@pytest.mark.parametrize("mode", ["decoupled", "bypass"])
def test_no_tensor_of_a_micro_batch_is_broadcast(mode, name, index):
    correction, scale, batch, entropy, _end = corrected_by_plan(mode, entropy_coef=0.1, kl_coef=0.1)
    theta = tensors()[0]
    masked_loss(correction, batch, theta, entropy, scale)
    if name == "entropy":
        entropy = entropy[index]
    else:
        batch = dataclasses.replace(batch, **{name: getattr(batch, name)[index]})
    with pytest.raises(ValueError, match=name):
        masked_loss(correction, batch, theta, entropy, scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16])
@pytest.mark.parametrize("mode", ["decoupled", "bypass"])
def test_gradients_of_narrow_log_probs_add_in_float32(mode, dtype):
    """Of the objective, the entropy bonus and the KL penalty: rounded once, to the last bit."""
    gradients = []
    for wide in (False, True):
        correction, scale, batch, entropy, _end = corrected_by_plan(mode, entropy_coef=0.3, kl_coef=0.7)
        leaves = [value.to(dtype) for value in (tensors()[0], entropy)]
        leaves = [(value.float() if wide else value).requires_grad_() for value in leaves]
        loss, _, _ = masked_loss(correction, batch, *leaves, scale)
        loss.backward()
        gradients.append([loss.detach(), *(leaf.grad.to(dtype) for leaf in leaves)])
    for narrow, rounded in zip(*gradients, strict=True):
        assert torch.equal(narrow, rounded)


TOLD = {"calculate_per_token_loss": True, "local_tokens": ROWS * WIDTH, "total_tokens": ROWS * WIDTH}


def end_step(mode, num_tokens, **told):
    """A step that Megatron ends by dividing by these tokens."""
    correction = make_correction(mode, "reinforce")
    theta, old, rollout, _, _, mask = tensors()
    batch, scale, end = one_step.planned(correction, inputs_of(correction, old, rollout, mask), **told)
    masked_loss(correction, batch, theta.requires_grad_(), None, scale)[0].backward()
    end([one_step.Chunk()], num_tokens, pg_collection=None)


@pytest.mark.parametrize("mode", ["decoupled", "bypass"])
def test_what_the_scale_was_told_is_compared_with_what_megatron_divides_by(mode):
    """The gradient of the loss would be right where the setting is forgotten, that of auxiliary losses not."""
    end_step(mode, None)
    end_step(mode, torch.tensor(ROWS * WIDTH), **TOLD)
    for num_tokens, told in ((torch.tensor(1), {}), (None, TOLD), (torch.tensor(ROWS * WIDTH + 2), TOLD)):
        with pytest.raises(StepError, match=r"total_tokens of calculate_per_token_loss \d+ instead of \d+"):
            end_step(mode, num_tokens, **told)
    with pytest.raises(ValueError, match=rf"local_tokens=10 .* of {ROWS * WIDTH} tokens"):
        end_step(mode, None, **TOLD | {"local_tokens": 10})
