"""What docs/mathematics.md states of weights, bounds and objectives, on a policy whose responses can all be listed.

Every expectation is a finite sum (``tests/support/enumerated.py``), so "unbiased" means equal to 1e-12 and a bound is
compared with the number that it bounds. Weights, masks, losses and metrics are the library's.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections import Counter

import pytest
import torch

from megatron_rc import (
    PlanInputs,
    PolicyLossConfig,
    RolloutCorrection,
    RolloutCorrectionConfig,
    aggregate_loss,
    correct_rollouts,
    group_advantages,
    kl_penalty,
    policy_loss,
)
from megatron_rc.loss.kl import WEIGHTED_KL_ESTIMATORS
from megatron_rc.loss.objectives import OBJECTIVES
from megatron_rc.numerics import k3
from megatron_rc.parallel import ParallelGroups
from megatron_rc.training.schedule import masked_loss
from tests.support import one_step
from tests.support.enumerated import divergences, enumerated, reached
from tests.support.paths import ROOT

SCORE = math.sqrt(2)  # no gradient of a softmax's log-probability by its logits is longer
UNTRUNCATED = 1e8
PAGE = (ROOT / "docs" / "mathematics.md").read_text(encoding="utf-8")
NUMBERS = set(re.findall(r"\d+\.\d+", PAGE))
LENGTHS = (1, 2, 3, 4)


def corrected(toy, **fields):
    """Return the library's correction of all responses at once."""
    config = RolloutCorrectionConfig(**{"rollout_is": None, **fields})
    result = correct_rollouts(toy.train.detach(), toy.rollout, toy.mask, config)
    result.check()
    return result


def weights_of(toy, level, threshold=UNTRUNCATED, **fields):
    """Return the importance weights of all tokens, [n, T]."""
    return corrected(toy, rollout_is=level, rollout_is_threshold=threshold, **fields).weights


def metrics_of(toy, **fields):
    """Return the correction's metrics, without the group before the slash in their names."""
    return {name.partition("/")[2]: value for name, value in corrected(toy, **fields).metrics().items()}


def estimate(toy, weights=None, *, old=None, advantages=None, algorithm="reinforce", **settings):
    """Return E_μ of the gradient of the library's loss, negated: the direction that ascends the reward."""
    old = toy.train.detach() if old is None else old
    advantages = toy.rewards if advantages is None else advantages
    loss = policy_loss(toy.train, old, advantages, toy.mask, algorithm=algorithm, weights=weights, **settings)
    return -toy.gradient(loss.per_token.sum(1).mean())


def assert_same(gradient, expected):
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


def bias(toy, weights=None):
    """Return the length of the estimate's difference from the gradient of E_π[R]."""
    return float((estimate(toy, weights) - toy.wanted()).norm())


def token_distance(toy):
    """Return the largest TV of the two policies after any prefix."""
    trainer = toy.logits.detach().softmax(1)
    return float((trainer - toy.engine).abs().sum(1).max() / 2)


@pytest.mark.parametrize(
    ("length", "level"), [*((length, "sequence") for length in LENGTHS), (1, "token"), (1, "prefix")]
)
def test_weights_of_sequences_have_no_bias(length, level):
    toy = enumerated(length)
    assert bias(toy) > 0.05
    assert_same(estimate(toy, weights_of(toy, level)), toy.wanted())


@pytest.mark.parametrize("length", LENGTHS)
def test_without_weights_the_bias_grows_with_the_distance_and_the_length_squared(length):
    for distance in (0.1, 0.3, 1.0):
        toy = enumerated(length, distance=distance)
        assert bias(toy) <= 2 * SCORE * length * toy.distance()
        assert toy.distance() <= length * token_distance(toy) + 1e-12

    bias_near = bias(enumerated(length, distance=0.01))
    bias_far = bias(enumerated(length, distance=0.02))
    assert bias_far == pytest.approx(2 * bias_near, rel=0.05)
    assert bias(enumerated(length, distance=0)) < 1e-12


def sum_before(log_ratio):
    """Return at each token the sum over the tokens before it."""
    return log_ratio.cumsum(1) - log_ratio


# By level of the weights: a function of all log ρ for the log of w_t / ρ_t, and the largest bias in units of
# T (T - 1) S δ. The estimate is the gradient of rewards that are weighted by (w_t / ρ_t) ρ_t: of policies that follow π
# at one token, and μ at the others, or that follow π up to one token, and μ after it.
BIASED = {
    "token": (torch.zeros_like, 2),
    "prefix": (sum_before, 1),
}


@pytest.mark.parametrize("length", [2, 3, 4])
@pytest.mark.parametrize("level", BIASED)
def test_weights_of_tokens_and_prefixes_leave_a_bias_of_other_tokens(level, length):
    log_earlier_weight, bound_factor = BIASED[level]
    for distance in (0.1, 0.3, 1.0):
        toy = enumerated(length, distance=distance)
        bound = bound_factor * length * (length - 1) * SCORE * token_distance(toy)
        assert 1e-4 < bias(toy, weights_of(toy, level)) <= bound

    # With the last of these policies: w_t / ρ_t is held constant, ρ_t is differentiated.
    log_ratio = toy.train - toy.rollout
    surrogate = (log_earlier_weight(log_ratio.detach()) + log_ratio).exp() * toy.rewards.unsqueeze(1)
    assert_same(estimate(toy, weights_of(toy, level)), toy.gradient(surrogate.sum(1).mean()))


def test_weights_with_the_smallest_ratio_before_have_a_mean_below_one():
    means = weights_of(enumerated(4, distance=0.3), "min_prefix").mean(0)
    assert means[:2].tolist() == pytest.approx([1, 1])
    assert means[3] < means[2] < 0.9


# The columns of the page's table: the level of the weights, and their bound. None: no weights.
SHOWN = [None, ("token",), ("prefix",), ("min_prefix",), ("geometric",), ("sequence", 2.0), ("sequence",)]


@functools.cache
def ten_policies(length):
    """Measure the columns of the page's table on ten random policies.

    Returns:
        The bias, relative to the length of the exact gradient, and E_μ[w²], both [10, columns]; and the mean of δ.
    """
    biases, second_moments = torch.empty(2, 10, len(SHOWN), dtype=torch.float64)
    mean_distance = 0.0
    for seed in range(10):
        toy = enumerated(length, distance=0.3, seed=seed)
        exact_length = toy.wanted().norm()
        for column, level_and_bound in enumerate(SHOWN):
            weights = None
            second_moment = 1.0
            if level_and_bound is not None:
                weights = weights_of(toy, *level_and_bound)
                second_moment = float(weights.square().mean())
            biases[seed, column] = bias(toy, weights) / exact_length
            second_moments[seed, column] = second_moment
        mean_distance += token_distance(toy) / 10
    return biases, second_moments, mean_distance


@pytest.mark.parametrize("length", LENGTHS)
def test_the_page_has_the_biases_and_second_moments(length):
    biases, second_moments, _ = ten_policies(length)
    cells = [
        f"{mean_bias:.2f}, {second_moment:.2f}"
        for mean_bias, second_moment in zip(biases.mean(0), second_moments.mean(0), strict=True)
    ]
    assert f"| {length} | {' | '.join(cells)} |" in PAGE


def test_how_far_the_policies_are_apart_and_how_often_token_weights_are_worse():
    for length in (1, 4):
        _, _, mean_distance = ten_policies(length)
        assert f"{mean_distance:.2f}" in NUMBERS

    num_worse = 0
    for length in LENGTHS:
        biases, _, _ = ten_policies(length)
        without_weights = biases[:, 0]
        with_token_weights = biases[:, 1]
        num_worse += int((with_token_weights > without_weights).sum())
    assert num_worse == 3


@pytest.mark.parametrize("level", ["token", "sequence", "geometric", None])
def test_a_baseline_shifts_nothing_with_weights_that_have_no_bound(level):
    toy = enumerated(3)
    weights = weights_of(toy, level) if level else None
    shift = (estimate(toy, weights, advantages=toy.rewards + 5) - estimate(toy, weights)).norm()
    if level in ("token", "sequence"):
        assert shift < 1e-11
    else:
        assert shift > 0.1


@pytest.mark.parametrize(("level", "shown"), [("token", "0.034"), ("sequence", "0.100")])
def test_a_baseline_shifts_the_gradient_of_truncated_weights(level, shown):
    toy = enumerated(3)
    weights = weights_of(toy, level, threshold=None)
    untruncated = weights_of(toy, level)
    torch.testing.assert_close(weights, untruncated.clamp(max=2))  # the default bound
    shift = float((estimate(toy, weights, advantages=toy.rewards + 1) - estimate(toy, weights)).norm())
    assert 0.03 < shift <= SCORE * float((untruncated - weights).mean(0).sum())
    assert f"{shift:.3f}" == shown
    assert {shown, f"{toy.wanted().norm():.3f}"} <= NUMBERS


@pytest.mark.parametrize("length", [2, 3, 4])
def test_geometric_weights_are_below_one_in_the_mean_and_in_the_mean_square(length):
    weights = weights_of(enumerated(length), "geometric")[:, 0]
    assert weights.mean() < 1
    if length == 2:
        # For two tokens w² is ρ(y), whose mean is 1.
        assert weights.square().mean() == pytest.approx(1, rel=1e-12)
    else:
        assert weights.square().mean() < 1
    assert bias(enumerated(length), weights_of(enumerated(length), "geometric")) > 0.05


def test_geometric_weights_of_two_lengths_are_above_one():
    """Responses of 2 or of 50 tokens: the engine stops after two in one of four, the trainer in one of two."""
    mask = torch.ones(4, 50, dtype=torch.bool)
    mask[0, 2:] = False
    rollout = torch.full((4, 50), -0.5, dtype=torch.float64)  # of the tokens at which the policies agree
    train = rollout.clone()
    rollout[:, 1] = torch.tensor([1, 3, 3, 3]).div(4).log()
    train[:, 1] = math.log(1 / 2)

    config = RolloutCorrectionConfig(rollout_is="geometric", rollout_is_threshold=UNTRUNCATED)
    weights = correct_rollouts(train, rollout, mask, config).weights[:, 0]
    mean = weights.mean()
    mean_square = weights.square().mean()
    bound = (1 / 2 - 1 / 50) * (1 / 2 - 1 / 4)
    assert 1 < mean <= 1 + bound
    assert 1 < mean_square <= 1 + 2 * bound
    assert {f"{mean:.3f}", f"{mean_square:.3f}"} <= NUMBERS


def test_geometric_weights_of_long_responses_tend_to_the_divergence():
    variances = {}
    for length in (1, 2, 4):
        toy = enumerated(length, by_prefix=False)
        log_weights = weights_of(toy, "geometric")[:, 0].log()
        assert -log_weights.mean() == pytest.approx(metrics_of(toy)["kl"], abs=1e-12)
        variances[length] = float(log_weights.var(unbiased=False))
    assert variances[2] == pytest.approx(variances[1] / 2)
    assert variances[4] == pytest.approx(variances[1] / 4)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_second_moment_of_sequence_weights_grows_exponentially(length):
    toy = enumerated(length, by_prefix=False)
    chi2_of_a_token = metrics_of(enumerated(1, by_prefix=False))["chi2_token"]
    assert chi2_of_a_token > 0.1
    metrics = metrics_of(toy)
    assert metrics["chi2_seq"] == pytest.approx((1 + chi2_of_a_token) ** length - 1)
    assert metrics["chi2_token"] == pytest.approx(chi2_of_a_token)
    assert weights_of(toy, "sequence")[:, 0].square().mean() == pytest.approx((1 + chi2_of_a_token) ** length)


@pytest.mark.parametrize("length", LENGTHS)
def test_with_prefixes_the_second_moment_lies_between_the_powers(length):
    toy = enumerated(length)
    trainer = toy.logits.detach().softmax(1)
    after_prefixes = (trainer.square() / toy.engine).sum(1)  # 1 + χ² after each prefix
    smallest = after_prefixes.min()
    largest = after_prefixes.max()

    metrics = metrics_of(toy)
    of_prefixes = weights_of(toy, "prefix").square().mean(0).tolist()
    of_responses = 1 + metrics["chi2_seq"]
    for num_tokens, second_moment in [*enumerate(of_prefixes, start=1), (length, of_responses)]:
        assert smallest**num_tokens - 1e-9 <= second_moment <= largest**num_tokens + 1e-9
    assert 1 + metrics["chi2_token"] <= largest + 1e-9


def test_independent_tokens_multiply_second_moments_that_may_differ():
    """Two tokens of a policy (1/4, 3/4), which a trainer has with other probabilities at each position."""
    # All pairs of tokens, each as often as the policy samples it.
    tokens = torch.tensor(list(itertools.product((0, 1, 1, 1), repeat=2)))
    engine = torch.tensor([1, 3], dtype=torch.float64) / 4
    trainer = torch.tensor([[1, 1], [1, 4]], dtype=torch.float64) / torch.tensor([[2], [5]])
    train = trainer.log()[torch.arange(2), tokens]
    result = correct_rollouts(train, engine.log()[tokens], tokens >= 0, RolloutCorrectionConfig(rollout_is=None))

    of_positions = (trainer.square() / engine).sum(1)  # 1 + χ² at each position
    of_responses = 1 + result.metrics()["rollout_corr/chi2_seq"]
    assert of_responses == pytest.approx(float(of_positions.prod()))
    assert of_positions.min() ** 2 + 0.1 < of_responses < of_positions.max() ** 2 - 0.1


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_effective_sample_size_is_one_over_one_plus_chi_squared(level):
    metrics = metrics_of(enumerated(3), rollout_is=level, rollout_is_threshold=UNTRUNCATED)
    chi2 = metrics["chi2_token" if level == "token" else "chi2_seq"]
    assert metrics["rollout_is_eff_sample_size"] == pytest.approx(1 / (1 + chi2))


@pytest.mark.parametrize("upper", [1.2, 2.0, 4.0])
def test_truncation_trades_a_bounded_bias_for_a_bounded_second_moment(upper):
    toy = enumerated(4)
    ratio = toy.ratio
    weights = weights_of(toy, "sequence", upper)[:, 0]
    lost = float((ratio - weights).mean())
    assert 0 < lost == pytest.approx(float((ratio - upper).clamp(min=0).mean()))
    assert abs(float(((weights - ratio) * toy.rewards).mean())) <= lost
    assert bias(toy, weights_of(toy, "sequence", upper)) <= 4 * SCORE * lost
    probability_above = float((ratio * (ratio > upper)).mean())  # P_π(ρ > u)
    assert lost <= probability_above <= float(ratio.square().mean()) / upper
    assert weights.mean() <= 1
    assert weights.square().mean() <= upper


def test_masked_weights_lose_the_whole_probability_outside():
    toy = enumerated(4)
    ratio = toy.ratio
    weights = weights_of(toy, "sequence", "0.5_2.0")[:, 0]
    probability_outside = float((ratio * ((ratio < 0.5) | (ratio > 2))).mean())  # P_π(ρ outside of [0.5, 2])
    assert float((ratio - weights).mean()) == pytest.approx(probability_outside)
    assert bias(toy, weights.unsqueeze(1).expand(-1, 4).contiguous()) <= 4 * SCORE * probability_outside
    lost_by_truncation = float((ratio - ratio.clamp(max=2)).mean())
    assert probability_outside > lost_by_truncation
    assert weights.square().mean() <= 2


def test_the_divergence_metrics_are_the_divergences():
    toy = enumerated(3)
    metrics = metrics_of(toy)
    log_ratio = toy.log_ratio.sum(1)
    kl_of_engine = -float(log_ratio.mean())  # KL(μ‖π) of whole responses
    assert 3 * metrics["kl"] == pytest.approx(kl_of_engine)
    assert metrics["k3_kl"] == pytest.approx(metrics["kl"])
    assert metrics["chi2_seq"] == pytest.approx(float((2 * log_ratio).exp().mean()) - 1)

    # Pinsker's inequality, and KL ≤ log(1 + χ²).
    kl_of_trainer = float((log_ratio.exp() * log_ratio).mean())  # KL(π‖μ)
    assert 2 * toy.distance() ** 2 <= kl_of_engine
    assert 2 * toy.distance() ** 2 <= kl_of_trainer <= math.log1p(metrics["chi2_seq"])
    assert 2 * toy.distance() <= math.sqrt(metrics["chi2_seq"])


def test_k3_scatters_less_than_k1_unless_a_ratio_is_large():
    near = enumerated(3, distance=0.1).log_ratio
    assert k3(near).std() < 0.1 * near.std()

    # The first of two tokens has a probability of 0.001 under the engine, and of 0.1 under the trainer.
    engine, trainer = torch.tensor([[1, 999], [100, 900]], dtype=torch.float64) / 1000
    log_ratio = (trainer / engine).log().repeat_interleave(torch.tensor([1, 999]))
    assert float(-log_ratio.mean()) == pytest.approx(float(k3(log_ratio).mean()))
    std_of_k3 = float(k3(log_ratio).std(unbiased=False))
    std_of_k1 = float(log_ratio.std(unbiased=False))
    assert {f"{std_of_k3:.2f}", f"{std_of_k1:.3f}"} <= NUMBERS


def test_k2_is_off_by_the_third_order():
    errors = []
    for distance in (0.02, 0.04):
        toy = enumerated(2, distance=distance, seed=1)
        mean_of_k2 = float((toy.log_ratio.square() / 2).mean())
        errors.append(mean_of_k2 - metrics_of(toy)["kl"])
    assert errors[1] == pytest.approx(8 * errors[0], rel=0.1)


def accepted(toy, name, threshold):
    """Return whether each response has no rejected token, [n] bool."""
    mask = corrected(toy, rollout_rs=name, rollout_rs_threshold=threshold).mask.all(1)
    assert 0.1 < mask.double().mean() < 0.99, name
    return mask


def test_a_bound_on_the_product_bounds_the_distance_of_what_is_left():
    toy = enumerated(4, distance=0.5)
    is_accepted = accepted(toy, "seq_sum_k1", "0.5_2.0")
    assert torch.equal(is_accepted, (toy.ratio >= 0.5) & (toy.ratio <= 2))

    # The policies' probabilities of each accepted response, given that it is accepted.
    rows = toy.first[is_accepted[toy.first]]
    trainer = toy.train.detach().sum(1).exp()[rows]
    engine = toy.rollout.sum(1).exp()[rows]
    trainer = trainer / trainer.sum()
    engine = engine / engine.sum()
    assert ((trainer / engine) <= 2 / 0.5).all()
    assert ((trainer / engine) >= 0.5 / 2).all()
    assert (trainer - engine).abs().sum() / 2 <= 1 - 0.5 / 2


def test_each_criterion_bounds_what_the_page_says():
    toy = enumerated(4, distance=0.5)

    def accepted_log_ratio(name, threshold):
        return toy.log_ratio[accepted(toy, name, threshold)]

    by_token = accepted_log_ratio("token_k1", "0.5_2.0")
    assert (by_token.abs() <= math.log(2)).all()
    assert 2 < by_token.sum(1).exp().max() <= 2**4, "products are left"

    by_mean = accepted_log_ratio("seq_mean_k1", "0.8_1.25")
    assert (by_mean.mean(1).abs() <= math.log(1.25)).all()
    assert by_mean.abs().max() > math.log(1.5), "tokens are left"

    by_mean_square = accepted_log_ratio("seq_mean_k2", 0.1)
    assert (by_mean_square.square().mean(1) / 2 <= 0.1).all()

    by_mean_k3 = accepted_log_ratio("seq_mean_k3", 0.1)
    assert ((by_mean_k3.expm1() - by_mean_k3).mean(1) <= 0.1).all()
    # Also k3 of the mean: by Jensen's inequality, as k3 is convex in log ρ.
    mean_log_ratio = by_mean_k3.mean(1)
    assert (mean_log_ratio.expm1() - mean_log_ratio <= 0.1).all()

    assert (accepted_log_ratio("seq_max_k2", 0.5).abs() <= 1).all()


def test_a_mean_of_k3_lets_one_token_fall_further_than_it_lets_it_rise():
    length = 50
    limit = 0.1
    # How far one token may rise at most, and fall.
    rise = math.sqrt(2 * limit * length)
    fall = limit * length + 1
    log_ratio = torch.zeros(4, length, dtype=torch.float64)
    log_ratio[:, 7] = torch.tensor([2.0, rise, 0.01 - fall, -fall])
    rollout = torch.full_like(log_ratio, -7.0)
    mask = torch.ones_like(log_ratio, dtype=torch.bool)
    config = RolloutCorrectionConfig(rollout_is=None, rollout_rs="seq_mean_k3", rollout_rs_threshold=limit)
    result = correct_rollouts(rollout + log_ratio, rollout, mask, config)
    assert result.mask.all(1).tolist() == [True, False, True, False]
    assert fall > 1.5 * rise


def test_normalised_weights_have_mean_one_and_undo_a_batch_of_one():
    toy = enumerated(1)
    truncated = weights_of(toy, "sequence", 1.2, rollout_is_batch_normalize=True)
    assert truncated[:, 0].mean() == pytest.approx(1)
    assert metrics_of(toy, rollout_is="sequence", rollout_is_threshold=1.2)["rollout_is_mean"] < 0.99

    exact_mean = float((toy.ratio * toy.rewards).mean())
    errors = {}
    for size in (1, 2, 3, 4):
        # Every batch of so many responses: its weights are normalised by their own mean.
        batches = Counter(tuple(sorted(rows)) for rows in itertools.product(range(4), repeat=size))
        total = sum(times * self_normalised(toy, list(rows)) for rows, times in batches.items())
        errors[size] = total / 4**size - exact_mean
    assert errors[1] == pytest.approx(float(toy.rewards.mean()) - exact_mean)
    assert abs(errors[1]) > abs(errors[2]) > abs(errors[3]) > abs(errors[4]) > 0
    assert 4 * errors[4] == pytest.approx(3 * errors[3], rel=0.2)


def self_normalised(toy, rows):
    """Return the estimate of E_π[R] from a batch of these rows, with weights normalised over the batch."""
    config = RolloutCorrectionConfig(
        rollout_is="sequence", rollout_is_threshold=UNTRUNCATED, rollout_is_batch_normalize=True
    )
    weights = correct_rollouts(toy.train.detach()[rows], toy.rollout[rows], toy.mask[rows], config).weights
    return float((weights[:, 0] * toy.rewards[rows]).mean())


@pytest.mark.parametrize("algorithm", sorted(set(OBJECTIVES) - {"reinforce", "distill"}))
def test_at_the_old_policy_all_objectives_are_one(algorithm):
    toy = enumerated(3)
    weights = weights_of(toy, "token", 2.0)
    assert_same(estimate(toy, weights, algorithm=algorithm), estimate(toy, weights))


def ratio_in_bypass(toy, algorithm, dual_clip=math.inf):
    """The weights that REINFORCE needs to have this objective's gradient, where π_rollout stands for π_old."""
    ratio = toy.log_ratio.exp()
    is_positive = toy.rewards.unsqueeze(1) > 0
    if algorithm == "cispo":
        return ratio.clamp(0.8, 1.2)
    if algorithm == "gspo":
        ratio = toy.log_ratio.mean(1, keepdim=True).exp().expand_as(ratio)
    return ratio * torch.where(is_positive, ratio <= 1.2, (ratio >= 0.8) & (ratio <= dual_clip))


@pytest.mark.parametrize("algorithm", ["ppo_clip", "gspo", "cispo"])
def test_bypass_objectives_are_reinforce_with_weights_of_their_own(algorithm):
    toy = enumerated(3)
    weights = ratio_in_bypass(toy, algorithm)
    assert (weights != toy.log_ratio.exp()).any()
    assert_same(estimate(toy, old=toy.rollout, algorithm=algorithm), estimate(toy, weights))
    is_negative = toy.rewards < 0
    assert weights[~is_negative].max() <= 1.2
    if algorithm == "cispo":
        return

    # With A < 0 nothing bounds the weights but dual clip.
    far = enumerated(3, distance=3)
    unbounded = ratio_in_bypass(far, algorithm)
    assert unbounded[far.rewards < 0].max() > 2
    assert_same(estimate(far, old=far.rollout, algorithm=algorithm), estimate(far, unbounded))

    bounded = ratio_in_bypass(far, algorithm, dual_clip=1.5)
    assert bounded.max() <= 1.5
    with_dual_clip = estimate(far, old=far.rollout, algorithm=algorithm, dual_clip=1.5)
    assert_same(with_dual_clip, estimate(far, bounded))


def test_without_clipping_two_and_three_policies_have_one_gradient():
    toy = enumerated(3)
    old = enumerated(3, distance=0.4).train.detach()
    without_clipping = {"algorithm": "ppo_clip", "clip_low": 1.0, "clip_high": 1e9}
    three_policies = estimate(toy, (old - toy.rollout).exp(), old=old, **without_clipping)
    two_policies = estimate(toy, old=toy.rollout, **without_clipping)
    assert_same(three_policies, two_policies)


def test_denominators_change_the_scale_by_the_share_that_is_accepted():
    toy = enumerated(3)
    mask = corrected(toy, rollout_rs="token_k1", rollout_rs_threshold="0.5_2.0").mask
    loss = policy_loss(toy.train, toy.rollout, toy.rewards, toy.mask, algorithm="reinforce").per_token
    accepted_only = toy.gradient(aggregate_loss(loss, mask, "token-mean"))
    original = toy.gradient(aggregate_loss(loss, mask, "token-mean", denominator_mask=toy.mask))
    share = float(mask.double().mean())
    assert 0.1 < share < 0.9
    assert_same(original, accepted_only * share)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("estimator", ["rloo", "grpo-no-std"])
def test_leave_one_out_is_unbiased_and_the_whole_mean_shrinks_the_gradient(size, estimator):
    toy = enumerated(1, distance=0)  # the engine is the trainer
    rows = torch.tensor(list(itertools.product(range(4), repeat=size)))  # every group of so many responses
    rewards = toy.rewards[rows].flatten()
    prompts = torch.arange(len(rows)).repeat_interleave(size)
    advantages = group_advantages(rewards, prompts, estimator=estimator)
    log_probs = toy.train[rows.flatten(), 0]
    gradient = toy.gradient((advantages * log_probs).mean())
    scale = 1 if estimator == "rloo" else 1 - 1 / size
    assert_same(gradient, scale * toy.wanted())


def learned(length=4):
    """A trainer that has learned to say the third token, an engine that has not; the reward is that token's share."""
    toy = enumerated(length, by_prefix=False, trainer=(0.2, 0.1, 0.7))
    return dataclasses.replace(toy, rewards=(toy.tokens == 2).double().mean(1))


# The rows of the page's table: each row's baseline is a mean of rewards, with weights up to this bound; 1: no weights.
BASELINES = {"the group's mean": 1, "weighted, ratios up to 2": 2, "weighted, ratios up to 10": 10, "π's mean": 1e9}


def ascent(toy, upper, bound):
    """Return the baseline of a large group, and the estimate's component along the exact gradient, relative to it.

    Args:
        toy: all responses, which are the group.
        upper: bound of the importance weights in the loss.
        bound: bound of the importance weights in the baseline; 1: no weights.
    """
    weights = toy.ratio.clamp(max=bound) if bound > 1 else None
    one_prompt = torch.zeros(len(toy.tokens), dtype=torch.int64)
    advantages = group_advantages(toy.rewards, one_prompt, estimator="grpo-no-std", weights=weights)
    baseline = float((toy.rewards - advantages)[0])

    gradient = estimate(toy, weights_of(toy, "sequence", upper), advantages=advantages)
    exact = toy.wanted()
    return baseline, float((gradient * exact).sum() / exact.square().sum())


def test_the_mean_of_the_engines_rewards_turns_a_truncated_gradient_around():
    toy = learned()
    assert float(toy.rewards.mean()) == pytest.approx(0.25)
    assert float((toy.ratio * toy.rewards).mean()) == pytest.approx(0.7)

    along_at_2 = {}
    for name, bound in BASELINES.items():
        baseline, along_at_2[bound] = ascent(toy, upper=2.0, bound=bound)
        _, along_at_10 = ascent(toy, upper=10.0, bound=bound)
        _, along_untruncated = ascent(toy, upper=UNTRUNCATED, bound=bound)
        cells = f"{baseline:.2f} | {along_at_2[bound]:.2f} | {along_at_10:.2f} | {along_untruncated:.2f}"
        assert f"| {name} | {cells} |" in PAGE
        assert along_untruncated == pytest.approx(1)
    assert along_at_2[1] < 0 < along_at_2[2] < along_at_2[10]


@pytest.mark.parametrize(
    ("threshold", "mode"), [(2.0, "truncate"), (10.0, "truncate"), ("0.5_2.0", "mask"), ("0.5_2.0", "clamp")]
)
def test_the_bias_of_a_baseline_is_that_of_the_lost_part(threshold, mode):
    toy = learned()
    weights = weights_of(toy, "sequence", threshold, rollout_is_mode=mode)
    lost = toy.ratio - weights[:, 0]
    bounds = {}
    for baseline in torch.linspace(0, 1, 41).tolist():
        advantages = toy.rewards - baseline
        difference = estimate(toy, weights, advantages=advantages) - toy.wanted()
        of_lost_part = toy.gradient((lost * advantages * toy.train.sum(1)).mean())
        assert_same(difference, -of_lost_part)
        bounds[baseline] = float((lost * advantages).abs().mean())
        assert difference.norm() <= 4 * SCORE * bounds[baseline] + 1e-12

    best_baseline = min(bounds, key=bounds.get)
    lost_below = float(lost[toy.rewards < best_baseline].abs().sum())
    lost_above = float(lost[toy.rewards > best_baseline].abs().sum())
    half = float(lost.abs().sum()) / 2
    assert max(lost_below, lost_above) <= half, "a median of the rewards of the lost part"


@pytest.mark.parametrize("size", [2, 3])
def test_leave_one_out_with_importance_weights_is_unbiased(size):
    """Every group of so many responses of two tokens, each with its probability under the engine."""
    toy = enumerated(2, distance=0.5, seed=1)
    rows = torch.tensor(list(itertools.product(range(16), repeat=size)))
    prompts = torch.arange(len(rows)).repeat_interleave(size)
    rewards = toy.rewards[rows].flatten()
    ratio = toy.ratio[rows].flatten()
    log_probs = toy.train.sum(1)[rows].flatten()

    gradients = {}
    for estimator in ("rloo", "grpo-no-std"):
        advantages = group_advantages(rewards, prompts, estimator=estimator, weights=ratio)
        gradients[estimator] = toy.gradient((ratio * advantages * log_probs).mean())
    exact = toy.wanted()
    assert_same(gradients["rloo"], exact)

    # With the response itself the mean takes more of a heavy response: no factor for all of them.
    shrunk = gradients["grpo-no-std"]
    along = float((shrunk * exact).sum() / exact.square().sum())
    assert 0 < along < 1 - 1 / size
    assert (shrunk - along * exact).norm() > 1e-3


ON_POLICY = {"distance": 0}  # the engine is the trainer
REFERENCE = {"distance": 2.0, "seed": 1}
# The distance of divergences() whose gradient each estimator has in the mean; None: 0.
KL = {
    "k1": None,
    "k2": "forward",
    "k3": "reverse",
    "abs": "distance",
    "k1+": "forward",
    "k3+": "forward",
    "abs+": "forward",
}


def penalized(toy, reference, estimator):
    """Return the KL penalty of each token, [n, T]."""
    return kl_penalty(toy.train, reference.train.detach(), estimator)


@pytest.mark.parametrize(("estimator", "direction"), KL.items())
def test_the_means_and_the_mean_gradients_of_the_kl_estimators(estimator, direction):
    """The tokens are the policy's own, and the KL is that of each token, after the prefix that was sampled."""
    toy = enumerated(3, **ON_POLICY)
    reference = enumerated(3, **REFERENCE)
    mean_penalty = penalized(toy, reference, estimator).sum(1).mean()
    after_prefixes = divergences(toy, reference)
    means = {name: (reached(toy.engine) * values).sum() for name, values in after_prefixes.items()}
    if estimator.removesuffix("+") == "abs":
        assert mean_penalty > means["forward"] + 0.1
    elif estimator != "k2":
        torch.testing.assert_close(mean_penalty, means["forward"])

    gradient = toy.gradient(mean_penalty)
    exact_gradients = {name: toy.gradient(mean) for name, mean in means.items()}
    assert (exact_gradients["forward"] - exact_gradients["reverse"]).norm() > 0.1
    expected = torch.zeros_like(gradient) if direction is None else exact_gradients[direction]
    assert_same(gradient, expected)


def test_a_penalty_in_the_reward_has_the_gradient_of_whole_responses():
    toy = enumerated(3, **ON_POLICY)
    reference = enumerated(3, **REFERENCE)
    # KL of whole responses: the probabilities of the prefixes are differentiated too.
    after_prefixes = divergences(toy, reference)["forward"]
    of_responses = toy.gradient((reached(toy.logits.softmax(1)) * after_prefixes).sum())

    penalty = penalized(toy, reference, "k1").detach()
    penalty_to_come = penalty.flip(1).cumsum(1).flip(1)
    assert_same(estimate(toy, advantages=penalty_to_come), of_responses)

    in_the_loss = toy.gradient(penalized(toy, reference, "k3+").sum(1).mean())
    assert (in_the_loss - of_responses).norm() > 0.1


def step_with_penalty(toy, reference, **loss_fields):
    """Return the gradient of a step whose loss is the KL penalty alone, and the micro-batch of its plan.

    The gradient is that of the penalty's sum over a response, in the mean over responses.
    """
    loss_config = PolicyLossConfig(algorithm="reinforce", kl_coef=1.0, **loss_fields)
    config = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_threshold=UNTRUNCATED)
    correction = RolloutCorrection(config, ParallelGroups(), loss=loss_config)
    # Without advantages the objective itself is 0.
    inputs = PlanInputs(toy.train.detach(), toy.rollout, toy.mask, advantages=torch.zeros_like(toy.rewards))
    micro_batch, scale, _end = one_step.planned(correction, inputs)
    micro_batch = dataclasses.replace(micro_batch, ref_log_probs=reference.train.detach())
    loss, divisor, _ = masked_loss(correction, micro_batch, toy.train, None, scale)
    tokens_of_a_response = toy.tokens.shape[1]
    return tokens_of_a_response * toy.gradient(loss / divisor), micro_batch


@pytest.mark.parametrize("estimator", WEIGHTED_KL_ESTIMATORS)
@pytest.mark.parametrize("length", [1, 3])
def test_with_an_importance_weight_the_kl_penalty_has_the_gradient_of_the_kl(estimator, length):
    """The KL of each token, after the prefix that the engine sampled; for responses of one token the KL itself."""
    toy = enumerated(length, distance=0.7)
    reference = enumerated(length, **REFERENCE)
    exact_kl = (reached(toy.engine) * divergences(toy, reference)["forward"]).sum()
    exact_gradient = toy.gradient(exact_kl)

    penalty = kl_penalty(toy.train, reference.train.detach(), estimator, rollout_log_probs=toy.rollout)
    torch.testing.assert_close(penalty.sum(1).mean(), exact_kl, rtol=0, atol=1e-12)
    gradient, _ = step_with_penalty(toy, reference, kl_estimator=estimator, kl_importance_weight=True)
    assert_same(gradient, exact_gradient)

    # Also as the derivative of the weighted mean itself, with a ratio that is differentiated.
    ratio = (toy.train - toy.rollout).exp()
    weighted_mean = (ratio * k3(reference.train.detach() - toy.train)).sum(1).mean()
    assert_same(toy.gradient(weighted_mean), exact_gradient)

    without_weight, _ = step_with_penalty(toy, reference, kl_estimator=estimator)
    assert (without_weight - exact_gradient).norm() > 0.1


def test_the_kl_penalty_has_no_importance_weight():
    """Without advantages the loss is the penalty alone: it is the unweighted mean, off by the first order."""
    errors = []
    for distance in (0.01, 0.02, 1.0):
        toy = enumerated(2, distance=distance)
        reference = enumerated(2, **REFERENCE)
        gradient, micro_batch = step_with_penalty(toy, reference, kl_estimator="k3+")
        penalty = penalized(toy, reference, "k3+")
        assert_same(gradient, toy.gradient(penalty.sum(1).mean()))

        # The exact gradient, after prefixes of the trainer. Weights of whole responses give it.
        trainer = toy.logits.detach().softmax(1)
        exact_gradient = toy.gradient((reached(trainer) * divergences(toy, reference)["forward"]).sum())
        weighted = toy.gradient((micro_batch.weights * penalty).sum(1).mean())
        assert_same(weighted, exact_gradient)
        errors.append(float((gradient - exact_gradient).norm()))
    assert errors[1] == pytest.approx(2 * errors[0], rel=0.05)
    assert errors[2] > 0.1
