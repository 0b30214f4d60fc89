"""Every objective equals the loops of the oracle, values and gradients, on whole sequences and on shards of them."""

import functools
import math
from collections import Counter

import pytest
import torch

from megatron_rc.loss.metrics import SUMS
from megatron_rc.loss.objectives import OBJECTIVES
from megatron_rc.loss.policy import policy_loss
from megatron_rc.parallel import ParallelGroups, SequenceLayout
from tests.support.far_device import far_device
from tests.support.objectives_oracle import Bounds, divergence_of, of_response
from tests.support.on_rank import cp_place, recorded
from tests.support.ranks import Layout

EXACT = 1e-12
ROWS = 12
WIDTH = 16
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
# Numbers of each sequence in the one sum over CP; the other objectives need no sum.
SUMMED_PER_SEQUENCE = {"gspo": 2, "gmpo": 2, "cppo": 2 * WIDTH}


def float64(values):
    return torch.tensor(values, dtype=torch.float64)


def random_batch(seed=0):
    """Random responses behind prompts, with gaps between turns; one response has no token, and one a single token.

    Returns:
        (log π_θ, log π_old, advantages, weights, mask), [n, s]; the advantages are [n].
    """
    generator = torch.Generator().manual_seed(seed)
    old_log_probs = -4 * torch.rand(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    # Tokens that are certain, or rounded to certain, and one that is improbable.
    old_log_probs[:, 3] = -1e-9
    old_log_probs[0, 5] = 0.0
    old_log_probs[1, 5] = -30.0

    noise = 0.4 * torch.randn(old_log_probs.shape, generator=generator, dtype=torch.float64)
    log_probs = (old_log_probs + noise).clamp(max=0.0)
    # A far drop, two tokens that become certain, and a far rise.
    log_probs[0, 6] = -60.0
    log_probs[2, 7] = 0.0
    log_probs[3, 8] = -1e-9
    log_probs[1, 5] = -0.1

    position = torch.arange(WIDTH)
    starts = torch.randint(0, 3, (ROWS, 1), generator=generator)
    ends = WIDTH - torch.arange(ROWS).unsqueeze(1) % 4
    mask = (position >= starts) & (position < ends)
    mask &= torch.rand(mask.shape, generator=generator) > 0.25
    mask[4] = False
    mask[5] = position == 9

    advantages = torch.randn(ROWS, generator=generator).double()
    advantages[7] = 0.0  # as GRPO's, if all rewards of a prompt are equal
    weights = torch.rand(mask.shape, generator=generator).double()
    return log_probs, old_log_probs, advantages, weights, mask


def oracle_loss(bounds, log_probs, old_log_probs, advantages, weights, mask):
    """Return the oracle's (loss of each token [n, s], gradient of their sum, {kind of clipping: tokens})."""
    leaf = log_probs.clone().requires_grad_()
    losses = torch.zeros_like(log_probs)
    tokens_clipped = {"low": 0, "high": 0, "dual": 0}
    for row in range(len(log_probs)):
        positions = mask[row].nonzero().flatten().tolist()
        token_losses = of_response(
            bounds,
            log_probs=[leaf[row, t] for t in positions],
            old=[old_log_probs[row, t].item() for t in positions],
            worths=[advantages[row].item() for _ in positions],
        )
        for t, (loss, kind) in zip(positions, token_losses, strict=True):
            losses[row, t] = weights[row, t] * loss
            if kind:
                tokens_clipped[kind] += 1
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    return losses.detach(), gradient, tokens_clipped


def settings_of(bounds, log_probs):
    """Return the keyword arguments of policy_loss() for these bounds; ``log_probs`` are log π_θ."""
    settings = {
        "algorithm": bounds.algorithm,
        "clip_low": bounds.low,
        "clip_high": bounds.high,
        "dual_clip": bounds.dual,
        "divergence": divergence_of(bounds.algorithm, log_probs),
    }
    # Only SAPO has temperatures.
    if bounds.algorithm == "sapo":
        settings["tau_pos"] = bounds.tau_pos
        settings["tau_neg"] = bounds.tau_neg
    return settings


def library_loss(bounds, log_probs, old_log_probs, advantages, weights, mask, **placement):
    """Return the library's (loss of each token, gradient of their sum, {statistic: sum over the tokens})."""
    leaf = log_probs.clone().requires_grad_()
    policy = policy_loss(
        leaf, old_log_probs, advantages, mask, weights=weights, **settings_of(bounds, leaf), **placement
    )
    (gradient,) = torch.autograd.grad(policy.per_token.sum(), leaf)
    return policy.per_token.detach(), gradient, sums_of(policy)


def sums_of(policy):
    """Return the sums of a policy loss, by name."""
    return dict(zip(SUMS, policy.statistics.sums.tolist(), strict=True))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_values_gradients_and_counts_are_those_of_the_loops(name):
    clipped_of_all_seeds = Counter()
    for seed in range(2):
        tensors = random_batch(seed)
        expected_losses, expected_gradient, tokens_clipped = oracle_loss(BOUNDS[name], *tensors)
        losses, gradient, sums = library_loss(BOUNDS[name], *tensors)
        torch.testing.assert_close(losses, expected_losses, rtol=EXACT, atol=EXACT)
        torch.testing.assert_close(gradient, expected_gradient, rtol=EXACT, atol=EXACT)
        assert sums["clipped_low"] == tokens_clipped["low"]
        assert sums["clipped_high"] == tokens_clipped["high"]
        assert sums["dual_clipped"] == tokens_clipped["dual"]
        clipped_of_all_seeds.update(tokens_clipped)

    # The batches have tokens that are clipped in every way that the objective knows.
    objective = OBJECTIVES[name]
    assert objective.clips == (clipped_of_all_seeds["low"] >= 3) == (clipped_of_all_seeds["high"] >= 3)
    assert (clipped_of_all_seeds["dual"] > 0) == objective.takes_dual_clip


def test_gmpo_takes_the_log_ratio_of_an_advantage_of_0_as_it_is():
    old_log_probs = float64([[-2.0, -2.0]])
    log_probs = old_log_probs + float64([[0.1, 1.0]])
    advantages = float64([[1.0, 0.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    policy = policy_loss(log_probs, old_log_probs, advantages, mask, algorithm="gmpo", clip_low=0.4, clip_high=0.4)
    assert policy.per_token.tolist() == [pytest.approx([-math.exp((0.1 + 1.0) / 2), 0.0])]


def layout_on_rank(form):
    """Return (this rank's layout, function that cuts its tokens out of [n, s]) for one way of cutting all rows."""
    place_in_cp = cp_place()
    cp_size = place_in_cp["cp_size"]
    if form != "packed":
        layout = SequenceLayout.padded(ROWS, WIDTH // cp_size, split=form, **place_in_cp)
        return layout, layout.cut

    # Every fourth row is short.
    lengths = [WIDTH - 8 if row % 4 == 3 else WIDTH for row in range(ROWS)]
    local_lengths = [length // cp_size for length in lengths]
    bounds = [sum(local_lengths[:row]) for row in range(ROWS + 1)]
    layout = SequenceLayout.packed(bounds, **place_in_cp)

    def cut_packed(full):
        return layout.cut(torch.cat([row[:length] for row, length in zip(full, lengths, strict=True)]))

    return layout, cut_packed


def losses_on_rank(expected, tensors, form):
    """Compute every objective on this rank's shard, with NaN outside of the mask.

    Returns:
        {objective: (losses and gradient, those of the oracle, collectives)}
    """
    layout, cut = layout_on_rank(form)
    groups = ParallelGroups.from_megatron()
    log_probs, old_log_probs, advantages, weights, mask = tensors
    local_log_probs = cut(torch.where(mask, log_probs, torch.nan))
    local_old_log_probs = cut(torch.where(mask, old_log_probs, torch.nan))
    local_weights = cut(torch.where(mask, weights, torch.nan))
    local_mask = cut(mask)

    results = {}
    for name, expected_tensors in expected.items():
        with recorded() as collectives:
            losses, gradient, _ = library_loss(
                BOUNDS[name],
                local_log_probs,
                local_old_log_probs,
                advantages,
                local_weights,
                local_mask,
                layout=layout,
                groups=groups,
            )
        expected_shards = [cut(tensor) for tensor in expected_tensors]
        results[name] = (losses, gradient), expected_shards, list(collectives)
    return results


@functools.cache
def expected_of(form):
    """Return ({objective: the oracle's losses and gradient}, the tensors that they are computed from)."""
    log_probs, old_log_probs, advantages, weights, mask = random_batch()
    if form == "packed":  # every fourth row is short
        mask[3::4, WIDTH - 8 :] = False
    tensors = (log_probs, old_log_probs, advantages, weights, mask)
    expected = {}
    for name, bounds in BOUNDS.items():
        losses, gradient, _ = oracle_loss(bounds, *tensors)
        expected[name] = (losses, gradient)
    return expected, tensors


@pytest.mark.parametrize(
    ("layout", "form"),
    [
        (Layout(cp=2), "zigzag"),
        (Layout(cp=4), "contiguous"),
        (Layout(cp=2, dp=2), "packed"),
    ],
    ids=str,
)
def test_shards_are_those_of_the_loops_with_at_most_one_sum(ranks, layout, form):
    expected, tensors = expected_of(form)
    for results in ranks.run(losses_on_rank, layout, expected, tensors, form):
        for name, ((losses, gradient), (expected_losses, expected_gradient), collectives) in results.items():
            torch.testing.assert_close(losses, expected_losses, rtol=EXACT, atol=EXACT)
            torch.testing.assert_close(gradient, expected_gradient, rtol=EXACT, atol=EXACT)
            expected_collectives = []
            if name in SUMMED_PER_SEQUENCE:
                expected_collectives = [("SUM", layout.cp, SUMMED_PER_SEQUENCE[name] * ROWS)]
            assert collectives == expected_collectives, name


@pytest.mark.parametrize("name", OBJECTIVES)
def test_far_and_certain_tokens_give_finite_losses_and_gradients(name):
    extremes = float64([0.0, -1e-12, -1.0, -1e3, -1e30])
    # All 25 pairs, each a response of one token.
    new, old = torch.cartesian_prod(extremes, extremes).T
    mask = torch.ones(25, 1, dtype=torch.bool)
    for dtype, sign in ((torch.float32, 1.0), (torch.float64, -1.0)):
        log_probs = new.to(dtype).unsqueeze(1).requires_grad_()
        old_log_probs = old.to(dtype).unsqueeze(1)
        advantages = torch.full((25,), sign, dtype=dtype)
        settings = settings_of(BOUNDS[name], log_probs)
        losses = policy_loss(log_probs, old_log_probs, advantages, mask, **settings).per_token
        losses.sum().backward()
        assert losses.isfinite().all()
        assert log_probs.grad.isfinite().all()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_log_prob_that_is_no_number_is_not_hidden_by_a_bound(name):
    for spoilt in ("new", "old"):
        log_probs, old_log_probs, advantages, _, mask = random_batch()
        row, position = mask.nonzero()[0]
        if spoilt == "new":
            log_probs[row, position] = torch.nan
        else:
            old_log_probs[row, position] = torch.nan
        settings = settings_of(BOUNDS[name], log_probs)
        losses = policy_loss(log_probs, old_log_probs, advantages, mask, **settings).per_token
        # REINFORCE and the distillation have no ratio to the old policy.
        assert losses.isnan().any() or (name in ("reinforce", "distill") and spoilt == "old")


@pytest.mark.parametrize("name", OBJECTIVES)
def test_on_a_gpu_the_host_does_not_wait(name):
    with far_device() as device:
        log_probs, old_log_probs, advantages, weights, mask = (tensor.to("cuda") for tensor in random_batch())
        layout = SequenceLayout.padded(ROWS, WIDTH)
        settings = settings_of(BOUNDS[name], log_probs)
        device.waits.clear()
        on_gpu = policy_loss(log_probs, old_log_probs, advantages, mask, weights=weights, layout=layout, **settings)
        assert not device.waits

        log_probs, old_log_probs, advantages, weights, mask = random_batch()
        settings = settings_of(BOUNDS[name], log_probs)
        on_cpu = policy_loss(log_probs, old_log_probs, advantages, mask, weights=weights, **settings)
        torch.testing.assert_close(on_gpu.per_token.cpu(), on_cpu.per_token, rtol=0, atol=0)


def test_defaults_are_the_papers():
    """DPPO's ratio is at most 20, and SAPO's temperatures are 1 and 1.05."""
    # Ratios of 30 and of e^0.5.
    log_probs = float64([[-1.0, -1.0]])
    old_log_probs = float64([[-1.0 - math.log(30), -1.5]])
    mask = torch.ones(1, 2).bool()
    losses = policy_loss(
        log_probs, old_log_probs, float64([1.0]), mask, algorithm="dppo_tv", clip_low=1.0, clip_high=1.0
    ).per_token
    assert losses.tolist()[0] == pytest.approx([20, math.exp(0.5)])

    for sign, tau in ((1.0, 1.0), (-1.0, 1.05)):
        losses = policy_loss(log_probs, old_log_probs, float64([sign]), mask, algorithm="sapo").per_token
        expected = -sign * 4 / tau / (1 + math.exp(-tau * (math.exp(0.5) - 1)))
        assert losses[0, 1].item() == pytest.approx(expected, rel=1e-14)
