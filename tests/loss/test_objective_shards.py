"""Every objective equals the loops of the oracle, values and gradients, on whole sequences and on shards of them."""

import functools
import math
from collections import Counter

import pytest
import torch

from megatron_rc.loss.metrics import SUMS
from megatron_rc.loss.objectives import OBJECTIVES
from megatron_rc.loss.policy import policy_loss
from megatron_rc.numerics import two_point_kl
from megatron_rc.parallel import ParallelGroups, SequenceLayout
from tests.support.far_device import far_device
from tests.support.objectives_oracle import Bounds, of_response, over_budget, two_point
from tests.support.on_rank import cp_place, recorded
from tests.support.ranks import Layout

EXACT = 1e-12
ROWS, WIDTH = 12, 16
# Bounds at which each objective leaves out tokens on both sides; cppo's budget of earlier tokens decides some.
SETTINGS = {
    "ppo_clip": {"dual": 1.3},
    "gspo": {"low": 0.05, "high": 0.02, "dual": 1.1},
    "dppo_tv": {"low": 0.05, "high": 0.03},
    "dppo_kl": {"low": 0.02, "high": 0.005, "dual": 1.5},
    "cppo": {"low": 0.15, "high": 0.2},
    "sapo": {"tau_pos": 1.5, "tau_neg": 2.0},
    "gmpo": {"low": 0.1, "high": 0.2},
}
BOUNDS = {name: Bounds(name, **SETTINGS.get(name, {})) for name in OBJECTIVES}
SEVERAL = {"gspo": 2, "gmpo": 2, "cppo": 2 * WIDTH}  # numbers of each sequence in the one sum over CP


def float64(values):
    return torch.tensor(values, dtype=torch.float64)


def drawn(seed=0):
    """(log π_θ, log π_old, advantages, weights, mask): prompts, gaps between turns, one response without a token."""
    generator = torch.Generator().manual_seed(seed)
    old = -4 * torch.rand(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    # Tokens that are certain, and rounded to it; far drops and rises.
    old[:, 3], old[0, 5], old[1, 5] = -1e-9, 0.0, -30.0
    new = (old + 0.4 * torch.randn(old.shape, generator=generator, dtype=torch.float64)).clamp(max=0.0)
    new[0, 6], new[2, 7], new[3, 8], new[1, 5] = -60.0, 0.0, -1e-9, -0.1
    place = torch.arange(WIDTH)
    starts = torch.randint(0, 3, (ROWS, 1), generator=generator)
    mask = (place >= starts) & (place < WIDTH - torch.arange(ROWS).unsqueeze(1) % 4)
    mask &= torch.rand(mask.shape, generator=generator) > 0.25
    mask[4], mask[5] = False, place == 9
    worths, weights = torch.randn(ROWS, generator=generator).double(), torch.rand(mask.shape, generator=generator)
    worths[7] = 0.0  # as GRPO's, if all rewards of a prompt are equal
    return new, old, worths, weights.double(), mask


def by_loops(bounds, new, old, worths, weights, mask):
    """(loss [n, s], its gradient with each token's loss once, {kind of clipping: tokens})."""
    theta = new.clone().requires_grad_()
    loss, kinds = torch.zeros_like(new), {"low": 0, "high": 0, "dual": 0}
    for row in range(len(new)):
        tokens = mask[row].nonzero().flatten().tolist()
        before, worth = [old[row, t].item() for t in tokens], [worths[row].item()] * len(tokens)
        for t, (value, kind) in zip(
            tokens, of_response(bounds, [theta[row, t] for t in tokens], before, worth), strict=True
        ):
            loss[row, t] = weights[row, t] * value
            if kind:
                kinds[kind] += 1
    (gradient,) = torch.autograd.grad(loss.sum(), theta)
    return loss.detach(), gradient, kinds


def settings_of(bounds):
    given = {"clip_low": bounds.low, "clip_high": bounds.high, "dual_clip": bounds.dual}
    tau = {"tau_pos": bounds.tau_pos, "tau_neg": bounds.tau_neg} if bounds.algorithm == "sapo" else {}
    return given | tau | {"algorithm": bounds.algorithm}


def ours(bounds, new, old, worths, weights, mask, **place):
    theta = new.clone().requires_grad_()
    found = policy_loss(theta, old, worths, mask, weights=weights, **settings_of(bounds), **place)
    (gradient,) = torch.autograd.grad(found.per_token.sum(), theta)
    return found.per_token.detach(), gradient, dict(zip(SUMS, found.statistics.sums.tolist(), strict=True))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_values_gradients_and_counts_are_those_of_the_loops(name):
    counted = Counter()
    for seed in range(3):
        tensors = drawn(seed)
        loss, gradient, kinds = by_loops(BOUNDS[name], *tensors)
        found, slope, sums = ours(BOUNDS[name], *tensors)
        torch.testing.assert_close(found, loss, rtol=EXACT, atol=EXACT)
        torch.testing.assert_close(slope, gradient, rtol=EXACT, atol=EXACT)
        assert [sums[key] for key in ("clipped_low", "clipped_high", "dual_clipped")] == list(kinds.values())
        counted.update(kinds)
    objective = OBJECTIVES[name]
    assert objective.clips == (counted["low"] >= 3) == (counted["high"] >= 3)
    assert (counted["dual"] > 0) == objective.takes_dual_clip


@pytest.mark.parametrize("algorithm", ["gmpo", "cppo", "ppo_clip", "gspo"])
def test_an_advantage_of_0_is_of_neither_sign(algorithm):
    """Log r of ±1 is beyond every bound, and an advantage of 0 pushes to neither side: no token is clipped."""
    new = torch.tensor([[-1.0, -2.0, -1.0], [-2.0, -1.0, -2.0]], dtype=torch.float64)
    old, mask = new.flip(0), torch.ones(2, 3, dtype=torch.bool)
    found = policy_loss(new, old, torch.zeros(2, dtype=torch.float64), mask, algorithm=algorithm)
    sums = dict(zip(SUMS, found.statistics.sums.tolist(), strict=True))
    assert sums["clipped_low"] == sums["clipped_high"] == 0
    assert not found.per_token.any()


def test_gmpo_takes_the_log_ratio_of_an_advantage_of_0_as_it_is():
    old = torch.tensor([[-2.0, -2.0]], dtype=torch.float64)
    new, mask = old + torch.tensor([[0.1, 1.0]], dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool)
    advantages = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    found = policy_loss(new, old, advantages, mask, algorithm="gmpo", clip_low=0.4, clip_high=0.4)
    assert found.per_token.tolist() == [pytest.approx([-math.exp((0.1 + 1.0) / 2), 0.0])]


def parts(form):
    """(layout, function that cuts [n, s] to this rank's tokens) for one way of cutting all rows."""
    where = cp_place()
    if form != "packed":
        layout = SequenceLayout.padded(ROWS, WIDTH // where["cp_size"], split=form, **where)
        return layout, layout.cut
    lengths = [WIDTH - 8 * (row % 4 == 3) for row in range(ROWS)]
    local = [length // where["cp_size"] for length in lengths]
    layout = SequenceLayout.packed([sum(local[:index]) for index in range(ROWS + 1)], **where)
    return layout, lambda full: layout.cut(torch.cat([row[:length] for row, length in zip(full, lengths, strict=True)]))


def on_shards(wanted, tensors, form):
    """{objective: (loss and gradient, the same of the loops, collectives)} of this rank, with NaN outside the mask."""
    (layout, cut), groups = parts(form), ParallelGroups.from_megatron()
    new, old, worths, weights, mask = tensors
    theta, before, filled = (cut(torch.where(mask, value, torch.nan)) for value in (new, old, weights))
    found = {}
    for name, want in wanted.items():
        with recorded() as calls:
            got = ours(BOUNDS[name], theta, before, worths, filled, cut(mask), layout=layout, groups=groups)
        found[name] = got[:2], [cut(value) for value in want], list(calls)
    return found


@functools.cache
def wanted_of(form):
    """({objective: loss and gradient of the loops}, the tensors that :func:`on_shards` gets)."""
    new, old, worths, weights, mask = drawn()
    if form == "packed":  # every fourth row is short
        mask[3::4, WIDTH - 8 :] = False
    tensors = new, old, worths, weights, mask
    return {name: by_loops(bounds, *tensors)[:2] for name, bounds in BOUNDS.items()}, tensors


@pytest.mark.parametrize(
    ("layout", "form"),
    [
        *((Layout(cp=2), form) for form in ("zigzag", "contiguous", "packed")),
        *((Layout(cp=4), form) for form in ("zigzag", "contiguous", "packed")),
        (Layout(cp=2, dp=2), "zigzag"),
    ],
    ids=str,
)
def test_shards_are_those_of_the_loops_with_at_most_one_sum(ranks, layout, form):
    for rank in ranks.run(on_shards, layout, *wanted_of(form), form):
        for name, (got, want, calls) in rank.items():
            for one, other in zip(got, want, strict=True):
                torch.testing.assert_close(one, other, rtol=EXACT, atol=EXACT)
            numbers = SEVERAL.get(name)
            assert calls == ([] if numbers is None else [("SUM", layout.cp, numbers * ROWS)]), name


def test_a_certain_token_has_a_finite_divergence():
    """log-probs of 0, above it by rounding, and so near that 1 - p is lost in p."""
    some = [1e-5, 0.0, -1e-12, -1e-9, -1e-8, -1e-5, -0.1, -3.0, -60.0]
    for log_p in some:
        for log_q in some:
            found = two_point_kl(*(torch.tensor(one, dtype=torch.float64) for one in (log_p, log_q))).item()
            assert found == pytest.approx(two_point(log_p, log_q), rel=1e-12, abs=1e-15)
    assert two_point(0.0, 0.0) == 0
    # verl adds 1e-8 inside the logarithm: 4 % off where 1 - p is of that size.
    p, q = math.exp(-1e-7), math.exp(-4e-7)
    verls = p * (-1e-7 + 4e-7) + (1 - p) * math.log((1 - p + 1e-8) / (1 - q + 1e-8))
    assert abs(verls / two_point(-1e-7, -4e-7) - 1) > 0.02


def test_cppo_has_less_room_for_late_tokens_of_a_response_that_is_far_already():
    """By hand: three of four tokens move by 0.1, more than their budget of 0.04, and the fourth by 0.13."""
    old, new = [math.log(0.5)] * 4, [math.log(0.6)] * 3 + [math.log(0.63)]
    needed = over_budget(new, old)
    second, third = 1 - 0.2 / 3, 1 - 0.4 / 3
    later = [0.1 * second + 0.06, 0.1 * third + 0.06 * (1 + second), 0.8 * 0.13 + 0.06 * (1 + second + third)]
    assert needed == pytest.approx([0.1, *later])
    theta, mask = float64([new]), torch.ones(1, 4, dtype=torch.bool)
    for high, kept in ((needed[3] + 1e-9, 4), (needed[3] - 1e-9, 3), (needed[2] - 1e-9, 2), (0.1 - 1e-9, 0)):
        loss = policy_loss(theta, float64([old]), float64([2.0]), mask, algorithm="cppo", clip_high=high).per_token
        assert loss[loss != 0].tolist() == pytest.approx([-2.4, -2.4, -2.4, -2.52][:kept])
    # What goes back towards the old policy is always kept.
    loss = policy_loss(theta, float64([old]), float64([-2.0]), mask, algorithm="cppo", clip_low=0.0).per_token
    assert (loss != 0).all()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_far_and_certain_tokens_give_finite_losses_and_gradients(name):
    some = float64([0.0, -1e-12, -1.0, -1e3, -1e30])
    new, old = torch.cartesian_prod(some, some).T
    for dtype, sign in ((torch.float32, 1.0), (torch.float64, -1.0)):
        theta = new.to(dtype).unsqueeze(1).requires_grad_()
        worths, mask = torch.full((25,), sign, dtype=dtype), torch.ones(25, 1, dtype=torch.bool)
        found = policy_loss(theta, old.to(dtype).unsqueeze(1), worths, mask, **settings_of(BOUNDS[name])).per_token
        found.sum().backward()
        assert found.isfinite().all()
        assert theta.grad.isfinite().all()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_log_prob_that_is_no_number_is_not_hidden_by_a_bound(name):
    for log_prob in ("new", "old"):
        new, old, worths, _, mask = drawn()
        {"new": new, "old": old}[log_prob][mask.nonzero()[0][0], mask.nonzero()[0][1]] = torch.nan
        found = policy_loss(new, old, worths, mask, **settings_of(BOUNDS[name])).per_token
        assert found.isnan().any() or (name == "reinforce" and log_prob == "old")


@pytest.mark.parametrize("name", OBJECTIVES)
def test_on_a_gpu_the_host_does_not_wait(name):
    with far_device() as device:
        new, old, worths, weights, mask = (tensor.to("cuda") for tensor in drawn())
        layout = SequenceLayout.padded(ROWS, WIDTH)
        device.waits.clear()
        found = policy_loss(new, old, worths, mask, weights=weights, layout=layout, **settings_of(BOUNDS[name]))
        assert not device.waits
        want = policy_loss(*drawn()[:3], drawn()[4], weights=drawn()[3], **settings_of(BOUNDS[name]))
        torch.testing.assert_close(found.per_token.cpu(), want.per_token, rtol=0, atol=0)


def test_responses_without_a_token_and_batches_without_a_response():
    for rows, width in ((0, 4), (3, 0), (2, 4)):
        tokens = torch.zeros(rows, width, dtype=torch.float64, requires_grad=True)
        for name, bounds in BOUNDS.items():
            nothing = [tokens.detach(), torch.ones(rows), torch.zeros(rows, width, dtype=torch.bool)]
            found = policy_loss(tokens, *nothing, **settings_of(bounds)).per_token
            assert found.shape == (rows, width), name
            assert not found.any()


def test_defaults_are_the_papers():
    """DPPO's ratio is at most 20, and SAPO's temperatures are 1 and 1.05."""
    theta, old, mask = float64([[-1.0, -1.0]]), float64([[-1.0 - math.log(30), -1.5]]), torch.ones(1, 2).bool()
    wide = {"clip_low": 1.0, "clip_high": 1.0}
    found = policy_loss(theta, old, float64([1.0]), mask, algorithm="dppo_tv", **wide).per_token
    assert found.tolist()[0] == pytest.approx([20, math.exp(0.5)])
    for sign, tau in ((1.0, 1.0), (-1.0, 1.05)):
        found = policy_loss(theta, old, float64([sign]), mask, algorithm="sapo").per_token[0, 1].item()
        assert found == pytest.approx(-sign * 4 / tau / (1 + math.exp(-tau * (math.exp(0.5) - 1))), rel=1e-14)
