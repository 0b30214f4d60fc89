"""Policy losses, KL penalties, aggregations, statistics and schedule factors by hand."""

import math

import pytest
import torch

from megatron_rc.loss.aggregation import AGGREGATIONS, aggregate_loss
from megatron_rc.loss.kl import KL_ESTIMATORS, kl_penalty
from megatron_rc.loss.metrics import MAXIMA, SUMS, LossStatistics, derive_loss_metrics
from megatron_rc.loss.objectives import OBJECTIVES
from megatron_rc.loss.policy import PolicyLossConfig, policy_loss
from megatron_rc.parallel import ParallelGroups, SequenceLayout
from megatron_rc.parallel.groups import group_rank, group_size
from tests.support.far_device import far_device
from tests.support.objectives_oracle import divergence_of
from tests.support.on_rank import outcome
from tests.support.ranks import Layout


def float64(values):
    return torch.tensor(values, dtype=torch.float64)


def sums_of(statistics, *names):
    sums = dict(zip(SUMS, statistics.sums.tolist(), strict=True))
    return [sums[name] for name in names]


def derived(statistics):
    sums = dict(zip(SUMS, statistics.sums.tolist(), strict=True))
    maxima = dict(zip(MAXIMA, statistics.maxima.tolist(), strict=True))
    return derive_loss_metrics(sums, maxima)


def kl_by_hand(estimator, difference):
    """Return the KL penalty of one token and its derivative by log π_θ, in floats."""
    # Below -20 the difference counts as -20, so that k3 is constant there.
    clamped = max(difference, -20.0)
    slope_of_k3 = 1 - math.exp(-clamped) if difference >= -20 else 0.0
    sign = float(difference > 0) - float(difference < 0)
    values_and_slopes = {
        "k1": (difference, 1.0),
        "k2": (difference**2 / 2, difference),
        "k3": (math.exp(-clamped) - 1 + clamped, slope_of_k3),
        "abs": (abs(difference), sign),
    }
    value, slope = values_and_slopes[estimator.removesuffix("+")]
    # Estimators with a plus sign have the gradient of k2.
    return value, difference if estimator.endswith("+") else slope


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_kl_estimators_follow_loops(estimator):
    generator = torch.Generator().manual_seed(0)
    ref = -5 * torch.rand(200, generator=generator, dtype=torch.float64)
    log_probs = ref + torch.randn(200, generator=generator, dtype=torch.float64)
    log_probs[:6] = ref[:6] + float64([-1000.0, -20.5, -19.5, 0.0, 20.5, 1000.0])
    log_probs.requires_grad_()
    ref.requires_grad_()
    coefficients = torch.randn(200, generator=generator, dtype=torch.float64)
    penalty = kl_penalty(log_probs, ref, estimator)
    (penalty * coefficients).sum().backward()

    values_and_slopes = [kl_by_hand(estimator, difference) for difference in (log_probs - ref).tolist()]
    expected_values = float64([value for value, _ in values_and_slopes])
    expected_slopes = float64([slope for _, slope in values_and_slopes])
    torch.testing.assert_close(penalty, expected_values, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(log_probs.grad, expected_slopes * coefficients, rtol=1e-12, atol=1e-12)
    assert ref.grad is None


def test_gspo_takes_the_mean_that_is_known():
    log_probs = float64([[-1.0, -1.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    known_mean = float64([0.1])
    loss = policy_loss(log_probs, log_probs, float64([1.0]), mask, algorithm="gspo", sequence_log_ratio=known_mean)
    assert loss.per_token.tolist() == [pytest.approx([-math.exp(0.1)] * 2)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"algorithm": "ppo"}, r"algorithm='ppo' .*ppo_clip"),
        ({"clip_low": 1.1}, "clip_low=1.1"),
        ({"clip_high": -0.1}, "clip_high=-0.1"),
        ({"dual_clip": 1.0}, "dual_clip=1.0"),
        ({"dual_clip": 3.0, "algorithm": "reinforce"}, r"dual_clip=3.0 .*'reinforce'"),
        ({"kl_coef": -1.0}, "kl_coef=-1.0"),
        ({"kl_estimator": "k4"}, "kl_estimator='k4'"),
        ({"kl_importance_weight": 1}, "kl_importance_weight=1 must be True or False"),
        ({"kl_importance_weight": True, "kl_estimator": "k2"}, "kl_importance_weight=True .*'k2'"),
        ({"entropy_coef": math.inf}, "entropy_coef=inf"),
        ({"aggregation": "mean"}, "aggregation='mean'"),
        ({"aggregation": "token-sum"}, "loss_scale_factor=None"),
        ({"algorithm": "ppo_clip", "tau_pos": 1.0}, "tau_pos=1.0"),
        ({"algorithm": "sapo", "tau_neg": 0.0}, "tau_neg=0.0"),
        ({"distillation_coef": -1.0}, "distillation_coef=-1.0"),
        ({"distillation_coef": 0.5, "algorithm": "distill"}, r"distillation_coef=0\.5 .*'distill'"),
        ({"distillation_kind": "kl"}, "distillation_kind='kl'"),
        ({"distillation_beta": 0.3}, r"distillation_beta=0\.3 .*distillation_kind='reverse_kl'"),
        ({"distillation_kind": "jsd", "distillation_beta": 1.0}, r"distillation_beta=1\.0"),
    ],
)
def test_objectives_that_cannot_work_are_refused_and_those_at_the_edge_are_not(fields, message):
    with pytest.raises(ValueError, match=message):
        PolicyLossConfig(**fields)
    # At the edge.
    PolicyLossConfig(clip_low=1.0, clip_high=0.0, dual_clip=1.01, algorithm="gspo")
    PolicyLossConfig(clip_low=0.0, aggregation="token-sum", loss_scale_factor=0.5)


def test_calls_that_cannot_be_are_refused():
    single_token = torch.zeros(1, 1)
    tokens = torch.zeros(2, 3)
    narrower_layout = SequenceLayout.padded(2, 1)
    with pytest.raises(ValueError, match="algorithm='gpg'"):
        policy_loss(single_token, single_token, single_token, single_token.bool(), algorithm="gpg")
    with pytest.raises(ValueError, match=r"log_probs .*\(2, 3\).*\(2, 1\)"):
        policy_loss(tokens, tokens, torch.ones(2), tokens > -1, layout=narrower_layout)
    with pytest.raises(ValueError, match=r"ref_log_probs .*\(3,\)"):
        kl_penalty(tokens, torch.zeros(3))
    with pytest.raises(ValueError, match="estimator='k4'"):
        kl_penalty(single_token, single_token, "k4")


@pytest.mark.parametrize("name", ["old_log_probs", "response_mask", "weights", "advantages"])
def test_shapes_that_do_not_fit_are_named(name):
    arguments = {
        "log_probs": torch.zeros(2, 3),
        "old_log_probs": torch.zeros(2, 3),
        "advantages": torch.zeros(2),
        "response_mask": torch.ones(2, 3, dtype=torch.bool),
    }
    misshapen = torch.zeros(3, 3)
    if name == "response_mask":
        misshapen = misshapen.bool()
    with pytest.raises(ValueError, match=name):
        policy_loss(**(arguments | {name: misshapen}))


@pytest.mark.parametrize(
    ("algorithm", "dtype"), [*((name, torch.float16) for name in OBJECTIVES), ("ppo_clip", torch.bfloat16)]
)
def test_narrow_log_probs_are_reckoned_with_in_float32(algorithm, dtype):
    """The loss is exact for the rounded log-probs, and no ratio overflows: exp(20) is no float16."""
    generator = torch.Generator().manual_seed(0)
    # [2, sequences, tokens]: log π_θ and log π_old. The log-ratio of the first token is 30.
    narrow = -(4 * torch.rand(2, 3, 50, generator=generator)).to(dtype)
    narrow[0, 0, 0] = 0.0
    narrow[1, 0, 0] = -30.0
    mask = torch.rand(3, 50, generator=generator) > 0.2
    mask[0, 0] = True
    advantages = torch.tensor([1.0, -1.0, 0.5])
    bounds = {"clip_high": 1e9} if algorithm == "ppo_clip" else {}

    losses = []
    gradients = []
    for theta, old in (narrow, narrow.double()):
        theta = theta.clone().requires_grad_()
        divergence = divergence_of(algorithm, theta)
        objective = policy_loss(
            theta, old, advantages.to(old.dtype), mask, algorithm=algorithm, divergence=divergence, **bounds
        )
        loss = objective.per_token + 0.1 * torch.where(mask, kl_penalty(theta, old, "k3"), 0)
        loss.sum().backward()
        losses.append(loss.detach())
        gradients.append(theta.grad)

    narrow_loss, exact_loss = losses
    assert narrow_loss.dtype == torch.float32
    torch.testing.assert_close(narrow_loss.double(), exact_loss, rtol=2e-6, atol=2e-6)

    # Gradients have the dtype of the log-probs. The largest float16 is 65504.
    narrow_gradient, exact_gradient = gradients
    all_are_representable = dtype == torch.bfloat16 or exact_gradient.abs().max() < 65504
    assert narrow_gradient.isfinite().all() == all_are_representable
    representable = exact_gradient.abs() < 65504
    torch.testing.assert_close(
        narrow_gradient[representable], exact_gradient.to(dtype)[representable], rtol=2e-2, atol=2e-3
    )


def test_statistics_merge():
    """Statistics of two parts merge to the statistics of the whole. Those of no token change nothing."""
    generator = torch.Generator().manual_seed(1)
    log_probs = -2 * torch.rand(6, 5, generator=generator).double()
    old = -2 * torch.rand(6, 5, generator=generator).double()
    mask = torch.rand(6, 5, generator=generator) < 0.7
    advantages = torch.randn(6, generator=generator).double()

    def statistics_of(rows):
        return policy_loss(log_probs[rows], old[rows], advantages[rows], mask[rows], dual_clip=1.5).statistics

    whole = statistics_of(slice(0, 6))
    first_part = statistics_of(slice(0, 2))
    second_part = statistics_of(slice(2, 6))
    no_rows = statistics_of(slice(0, 0))
    merged = first_part.merge(no_rows).merge(LossStatistics.nothing()).merge(second_part)
    torch.testing.assert_close(merged.sums, whole.sums, rtol=1e-12, atol=0)
    assert torch.equal(merged.maxima, whole.maxima)
    # Some tokens are clipped on either side, and some by the dual clip.
    assert min(sums_of(whole, *SUMS[:6])[3:]) > 0
    assert torch.equal(no_rows.maxima, LossStatistics.nothing().maxima)


def test_statistics_take_more_sums_and_become_metrics():
    log_probs = float64([[math.log(1.5), math.log(0.5), 0.0, 9.0]])
    mask = torch.tensor([[True, True, True, False]])
    loss = policy_loss(log_probs, torch.zeros_like(log_probs), float64([[1.0, -1.0, 1.0, 1.0]]), mask)
    statistics = loss.statistics.plus(loss=float64(2.5), entropy=float64(6.0)).plus(entropy=float64(3.0))
    metrics = derived(statistics.merge(LossStatistics.nothing()))
    low = math.log(0.5)
    high = math.log(1.5)
    expected = {
        "loss/total": 2.5,
        "policy/approx_kl": -(low + high) / 3,
        "policy/abs_log_ratio": (high - low) / 3,
        "policy/log_ratio_max": high,
        "policy/log_ratio_min": low,
        "policy/clip_fraction_low": 1 / 3,
        "policy/clip_fraction_high": 1 / 3,
        "policy/dual_clip_fraction": 0,
        "policy/entropy": 3,
        "policy/reference_kl": 0,
        "policy/divergence": 0,
    }
    assert metrics == pytest.approx(expected)
    assert derived(LossStatistics.nothing()) == dict.fromkeys(expected, 0)
    with pytest.raises(ValueError, match="kl is no statistic of the loss"):
        statistics.plus(kl=float64(1.0))


# Of the three tokens that count, and of others, whatever stands there.
PER_TOKEN = [[1.0, 2.0, math.nan], [4.0, math.inf, -math.inf], [80.0, 90.0, math.nan]]
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]]).bool()
ORIGINAL = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]]).bool()
# Mode, scale factor; loss and gradients of the three tokens under the mask, then with ORIGINAL in the denominators.
BY_HAND = [
    ("token-mean", None, 7 / 3, [1 / 3, 1 / 3, 1 / 3], 7 / 6, [1 / 6, 1 / 6, 1 / 6]),
    ("token-sum", 4.0, 7 / 4, [1 / 4, 1 / 4, 1 / 4], 7 / 4, [1 / 4, 1 / 4, 1 / 4]),
    ("seq-mean-token-sum", None, 7 / 2, [1 / 2, 1 / 2, 1 / 2], 7 / 3, [1 / 3, 1 / 3, 1 / 3]),
    ("seq-mean-token-mean", None, 11 / 4, [1 / 4, 1 / 4, 1 / 2], 5 / 3, [1 / 9, 1 / 9, 1 / 3]),
    ("seq-mean-token-sum-norm", 4.0, 7 / 8, [1 / 8, 1 / 8, 1 / 8], 7 / 12, [1 / 12, 1 / 12, 1 / 12]),
]


@pytest.mark.parametrize(("mode", "factor", "loss", "gradient", "original_loss", "original_gradient"), BY_HAND)
def test_aggregations_by_hand(mode, factor, loss, gradient, original_loss, original_gradient):
    cases = ((None, loss, gradient), (ORIGINAL, original_loss, original_gradient))
    for denominator_mask, expected_loss, expected_gradient in cases:
        per_token = float64(PER_TOKEN).requires_grad_()
        total = aggregate_loss(per_token, MASK, mode, loss_scale_factor=factor, denominator_mask=denominator_mask)
        total.backward()
        assert (total.dtype, total.dim()) == (torch.float64, 0)
        assert total.item() == pytest.approx(expected_loss)
        assert per_token.grad[MASK].tolist() == pytest.approx(expected_gradient)
        assert not per_token.grad[~MASK].any()
    assert tuple(mode for mode, *_ in BY_HAND) == AGGREGATIONS

    # Terms are added in float64: in float32, 2^24 + 1 is 2^24.
    per_token = torch.tensor([[2.0**24, 1.0, 1.0]])
    assert aggregate_loss(per_token, per_token > 0, "token-sum", loss_scale_factor=1.0).item() == 2**24 + 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "mean"}, "aggregation='mean'"),
        ({"mode": "token-sum"}, r"loss_scale_factor=None .*'token-sum'"),
        ({"loss_scale_factor": 2.0}, r"loss_scale_factor=2.0 .*'token-mean'"),
        ({"mask": MASK[:2]}, r"mask .*\(2, 3\)"),
        ({"denominator_mask": MASK[:, :2]}, r"denominator_mask .*\(3, 2\)"),
    ],
)
def test_aggregations_that_cannot_work_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        aggregate_loss(**({"per_token": torch.tensor(PER_TOKEN), "mask": MASK} | arguments))


def test_accepted_tokens_lie_in_the_denominator():
    """With nine accepted tokens over a denominator of four, a mean of ones would be 2.25."""
    ones = torch.ones(3, 3)
    all_tokens = torch.ones(3, 3, dtype=torch.bool)
    four_tokens = torch.zeros(3, 3, dtype=torch.bool)
    four_tokens[0] = True
    four_tokens[1, 0] = True
    with pytest.raises(ValueError, match=r"5 .*denominator_mask"):
        aggregate_loss(ones, all_tokens, denominator_mask=four_tokens)
    assert aggregate_loss(ones, four_tokens, denominator_mask=all_tokens).item() == pytest.approx(4 / 9)


def stray_on_ranks():
    """The error if the last rank alone accepts tokens outside the denominator."""
    groups = ParallelGroups.from_megatron()
    accepted = torch.ones(1, 2, dtype=torch.bool)
    is_last_rank = group_rank(groups.dp_cp) == group_size(groups.dp_cp) - 1
    denominator = torch.full((1, 2), not is_last_rank)
    return outcome(aggregate_loss, torch.ones(1, 2), accepted, denominator_mask=denominator, groups=groups)


def test_tokens_outside_the_denominator_are_one_error_on_all_ranks(ranks):
    messages = ranks.run(stray_on_ranks, Layout(cp=2, dp=2))
    assert len(set(messages)) == 1
    assert messages[0].startswith("2 ")
    assert "denominator_mask" in messages[0]


def test_on_a_gpu_the_host_does_not_wait_for_the_loss():
    """On a GPU the device itself refuses tokens outside the denominator."""
    ones = torch.ones(2, 3)
    all_tokens = torch.ones(2, 3, dtype=torch.bool)
    no_tokens = torch.zeros(2, 3, dtype=torch.bool)
    with far_device() as device:
        per_token = ones.to("cuda")
        accepted = all_tokens.to("cuda")
        empty_denominator = no_tokens.to("cuda")
        device.waits.clear()
        loss = aggregate_loss(per_token, accepted, denominator_mask=accepted)
        assert not device.waits
        with pytest.raises(RuntimeError, match="denominator_mask"):
            aggregate_loss(per_token, accepted, denominator_mask=empty_denominator)
        assert loss.cpu().item() == 1


@pytest.mark.parametrize("mask", [torch.ones(1, 2), torch.ones(1, 2, dtype=torch.int64)], ids=["float", "int"])
def test_masks_are_bool(mask):
    values = float64([[-1.0, -2.0]])
    with pytest.raises(ValueError, match=r"response_mask .*bool"):
        policy_loss(values, values, float64([1.0]), mask)
    with pytest.raises(ValueError, match=r"denominator_mask .*bool"):
        aggregate_loss(values, values < 0, denominator_mask=mask)


def test_advantages_of_either_shape_are_those_of_sequences():
    """Two advantages fit both two sequences and two tokens; they are read by sequence, as the correction does.

    Both tokens belong to the second sequence.
    """
    log_probs = torch.full((2,), -1.0)
    advantages = torch.tensor([5.0, -3.0])
    layout = SequenceLayout.packed([0, 0, 2])
    loss = policy_loss(log_probs, log_probs, advantages, log_probs < 0, algorithm="reinforce", layout=layout)
    assert loss.per_token.tolist() == [-3.0, -3.0]
