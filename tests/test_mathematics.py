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
from tests.support.enumerated import enumerated
from tests.support.paths import ROOT

SCORE = math.sqrt(2)  # no gradient of a softmax's log-probability by its logits is longer
UNTRUNCATED = 1e8
PAGE = (ROOT / "docs" / "mathematics.md").read_text(encoding="utf-8")
NUMBERS = set(re.findall(r"\d+\.\d+", PAGE))
LENGTHS = (1, 2, 3, 4)


def corrected(toy, **fields):
    """The library's verdict on all responses at once."""
    config = RolloutCorrectionConfig(**{"rollout_is": None, **fields})
    result = correct_rollouts(toy.train.detach(), toy.rollout, toy.mask, config)
    result.check()
    return result


def weights_of(toy, level, threshold=UNTRUNCATED, **fields):
    return corrected(toy, rollout_is=level, rollout_is_threshold=threshold, **fields).weights


def metrics_of(toy, **fields):
    return {name.partition("/")[2]: value for name, value in corrected(toy, **fields).metrics().items()}


def estimate(toy, weights=None, *, old=None, advantages=None, algorithm="reinforce", **settings):
    """E_μ of the gradient that the library's loss has, turned upwards: what ascends the reward."""
    old = toy.train.detach() if old is None else old
    advantages = toy.rewards if advantages is None else advantages
    loss = policy_loss(toy.train, old, advantages, toy.mask, algorithm=algorithm, weights=weights, **settings)
    return -toy.gradient(loss.per_token.sum(1).mean())


def assert_same(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def bias(toy, weights=None):
    return float((estimate(toy, weights) - toy.wanted()).norm())


def token_distance(toy):
    """The largest TV of the two policies after any prefix."""
    own = toy.logits.detach().softmax(1)
    engine = toy.engine
    return float((own - engine).abs().sum(1).max() / 2)


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
    near, far = (bias(enumerated(length, distance=distance)) for distance in (0.01, 0.02))
    assert far == pytest.approx(2 * near, rel=0.05)
    assert bias(enumerated(length, distance=0)) < 1e-12


# The estimate is the gradient of rewards weighed by ``given`` · ρ_t: of policies that follow π at one token, and μ at
# the others, or that follow π up to one token, and μ after it. The bias is at most this factor times S δ.
BIASED = {
    "token": (torch.zeros_like, lambda length: 2 * length * (length - 1)),
    "prefix": (lambda logs: logs.cumsum(1) - logs, lambda length: length * (length - 1)),
}


@pytest.mark.parametrize("length", [2, 3, 4])
@pytest.mark.parametrize("level", BIASED)
def test_weights_of_tokens_and_prefixes_leave_a_bias_of_other_tokens(level, length):
    given, factor = BIASED[level]
    for distance in (0.1, 0.3, 1.0):
        toy = enumerated(length, distance=distance)
        assert 1e-4 < bias(toy, weights_of(toy, level)) <= factor(length) * SCORE * token_distance(toy)
    log_ratio = toy.train - toy.rollout
    surrogate = (given(log_ratio.detach()) + log_ratio).exp() * toy.rewards.unsqueeze(1)
    assert_same(estimate(toy, weights_of(toy, level)), toy.gradient(surrogate.sum(1).mean()))


def test_weights_with_the_smallest_ratio_before_have_a_mean_below_one():
    means = weights_of(enumerated(4, distance=0.3), "min_prefix").mean(0)
    assert means[:2].tolist() == pytest.approx([1, 1])
    assert means[3] < means[2] < 0.9


SHOWN = [None, ("token",), ("prefix",), ("min_prefix",), ("geometric",), ("sequence", 2.0), ("sequence",)]


@functools.cache
def ten_policies(length):
    """For each policy and each of ``SHOWN`` the bias by the length of the wanted gradient, and E_μ[w²]; mean of δ."""
    biases, moments = torch.empty(2, 10, len(SHOWN), dtype=torch.float64)
    distance = 0.0
    for seed in range(10):
        toy = enumerated(length, distance=0.3, seed=seed)
        weights = [None if choice is None else weights_of(toy, *choice) for choice in SHOWN]
        biases[seed] = torch.tensor([bias(toy, given) for given in weights]) / toy.wanted().norm()
        moments[seed] = torch.tensor([1.0 if given is None else float(given.square().mean()) for given in weights])
        distance += token_distance(toy) / 10
    return biases, moments, distance


@pytest.mark.parametrize("length", LENGTHS)
def test_the_page_has_the_biases_and_second_moments(length):
    biases, moments, _ = ten_policies(length)
    cells = [f"{value:.2f}, {moment:.2f}" for value, moment in zip(biases.mean(0), moments.mean(0), strict=True)]
    assert f"| {length} | {' | '.join(cells)} |" in PAGE


def test_how_far_the_policies_are_apart_and_how_often_token_weights_are_worse():
    assert {f"{ten_policies(length)[2]:.2f}" for length in (1, 4)} <= NUMBERS
    assert sum(int((biases[:, 1] > biases[:, 0]).sum()) for biases, *_ in map(ten_policies, LENGTHS)) == 3


@pytest.mark.parametrize("level", ["token", "sequence", "geometric", None])
def test_a_baseline_shifts_nothing_with_weights_that_have_no_bound(level):
    toy = enumerated(3)
    weights = weights_of(toy, level) if level else None
    shift = (estimate(toy, weights, advantages=toy.rewards + 5) - estimate(toy, weights)).norm()
    assert shift < 1e-11 if level in ("token", "sequence") else shift > 0.1


@pytest.mark.parametrize(("level", "shown"), [("token", "0.034"), ("sequence", "0.100")])
def test_a_baseline_shifts_the_gradient_of_truncated_weights(level, shown):
    toy = enumerated(3)
    weights, raw = weights_of(toy, level, threshold=None), weights_of(toy, level)
    torch.testing.assert_close(weights, raw.clamp(max=2))  # the default bound
    shift = float((estimate(toy, weights, advantages=toy.rewards + 1) - estimate(toy, weights)).norm())
    assert 0.03 < shift <= SCORE * float((raw - weights).mean(0).sum())
    assert f"{shift:.3f}" == shown
    assert {shown, f"{toy.wanted().norm():.3f}"} <= NUMBERS


@pytest.mark.parametrize("length", [2, 3, 4])
def test_geometric_weights_are_below_one_in_the_mean_and_in_the_mean_square(length):
    weights = weights_of(enumerated(length), "geometric")[:, 0]
    assert weights.mean() < 1
    # For two tokens w² is ρ(y), whose mean is 1.
    assert weights.square().mean() == pytest.approx(1, rel=1e-12) if length == 2 else weights.square().mean() < 1
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
    bound = (1 / 2 - 1 / 50) * (1 / 2 - 1 / 4)
    assert 1 < weights.mean() <= 1 + bound
    assert 1 < weights.square().mean() <= 1 + 2 * bound
    shown = (weights.mean(), weights.square().mean(), 1 + bound, 1 + 2 * bound)
    assert {f"{number:.3f}" for number in shown} <= NUMBERS


def test_geometric_weights_of_long_responses_tend_to_the_divergence():
    spread = {}
    for length in (1, 2, 4):
        toy = enumerated(length, by_prefix=False)
        log_weights = weights_of(toy, "geometric")[:, 0].log()
        assert -log_weights.mean() == pytest.approx(metrics_of(toy)["kl"], abs=1e-12)
        spread[length] = float(log_weights.var(unbiased=False))
    assert spread[2] == pytest.approx(spread[1] / 2)
    assert spread[4] == pytest.approx(spread[1] / 4)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_second_moment_of_sequence_weights_grows_exponentially(length):
    toy = enumerated(length, by_prefix=False)
    one = metrics_of(enumerated(1, by_prefix=False))["chi2_token"]
    assert one > 0.1
    found = metrics_of(toy)
    assert found["chi2_seq"] == pytest.approx((1 + one) ** length - 1)
    assert found["chi2_token"] == pytest.approx(one)
    assert weights_of(toy, "sequence")[:, 0].square().mean() == pytest.approx((1 + one) ** length)


@pytest.mark.parametrize("length", LENGTHS)
def test_with_prefixes_the_second_moment_lies_between_the_powers(length):
    toy = enumerated(length)
    moments = (toy.logits.detach().softmax(1).square() / toy.engine).sum(1)  # 1 + χ² after each prefix
    of_prefixes, of_whole = weights_of(toy, "prefix").square().mean(0).tolist(), metrics_of(toy)
    for position, value in [*enumerate(of_prefixes, start=1), (length, 1 + of_whole["chi2_seq"])]:
        assert moments.min() ** position - 1e-9 <= value <= moments.max() ** position + 1e-9
    assert 1 + of_whole["chi2_token"] <= moments.max() + 1e-9


def test_independent_tokens_multiply_second_moments_that_may_differ():
    """Two tokens of a policy (1/4, 3/4), which a trainer has with other probabilities at each position."""
    tokens = torch.tensor(list(itertools.product((0, 1, 1, 1), repeat=2)))
    engine = torch.tensor([1, 3], dtype=torch.float64) / 4
    trainer = torch.tensor([[1, 1], [1, 4]], dtype=torch.float64) / torch.tensor([[2], [5]])
    train = trainer.log()[torch.arange(2), tokens]
    result = correct_rollouts(train, engine.log()[tokens], tokens >= 0, RolloutCorrectionConfig(rollout_is=None))
    moments = (trainer.square() / engine).sum(1)  # 1 + χ² at each position
    found = 1 + result.metrics()["rollout_corr/chi2_seq"]
    assert found == pytest.approx(float(moments.prod()))
    assert moments.min() ** 2 + 0.1 < found < moments.max() ** 2 - 0.1


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_effective_sample_size_is_one_over_one_plus_chi_squared(level):
    found = metrics_of(enumerated(3), rollout_is=level, rollout_is_threshold=UNTRUNCATED)
    chi2 = found["chi2_token" if level == "token" else "chi2_seq"]
    assert found["rollout_is_eff_sample_size"] == pytest.approx(1 / (1 + chi2))


@pytest.mark.parametrize("upper", [1.2, 2.0, 4.0])
def test_truncation_trades_a_bounded_bias_for_a_bounded_second_moment(upper):
    toy = enumerated(4)
    raw = toy.ratio
    weights = weights_of(toy, "sequence", upper)[:, 0]
    lost = float((raw - weights).mean())
    assert 0 < lost == pytest.approx(float((raw - upper).clamp(min=0).mean()))
    assert abs(float(((weights - raw) * toy.rewards).mean())) <= lost
    assert bias(toy, weights_of(toy, "sequence", upper)) <= 4 * SCORE * lost
    outside = float((raw * (raw > upper)).mean())  # P_π(ρ > u)
    assert lost <= outside <= float(raw.square().mean()) / upper
    assert weights.mean() <= 1
    assert weights.square().mean() <= upper


def test_masked_weights_lose_the_whole_probability_outside():
    toy = enumerated(4)
    raw = toy.ratio
    masked = weights_of(toy, "sequence", "0.5_2.0")[:, 0]
    outside = float((raw * ((raw < 0.5) | (raw > 2))).mean())  # P_π(ρ outside of [0.5, 2])
    assert float((raw - masked).mean()) == pytest.approx(outside)
    assert bias(toy, masked.unsqueeze(1).expand(-1, 4).contiguous()) <= 4 * SCORE * outside
    assert outside > float((raw - raw.clamp(max=2)).mean())  # more than truncation at the same bound
    assert masked.square().mean() <= 2


def test_the_divergence_metrics_are_the_divergences():
    toy = enumerated(3)
    found = metrics_of(toy)
    log_ratio = toy.log_ratio.sum(1)
    divergence = -float(log_ratio.mean())  # KL(μ‖π) of whole responses
    assert 3 * found["kl"] == pytest.approx(divergence)
    assert found["k3_kl"] == pytest.approx(found["kl"])
    assert found["chi2_seq"] == pytest.approx(float((2 * log_ratio).exp().mean()) - 1)
    other = float((log_ratio.exp() * log_ratio).mean())  # KL(π‖μ)
    assert 2 * toy.distance() ** 2 <= divergence
    assert 2 * toy.distance() ** 2 <= other <= math.log1p(found["chi2_seq"])
    assert 2 * toy.distance() <= math.sqrt(found["chi2_seq"])


def test_k3_scatters_less_than_k1_unless_a_ratio_is_large():
    near = enumerated(3, distance=0.1).log_ratio
    assert k3(near).std() < 0.1 * near.std()
    engine, trainer = torch.tensor([[1, 999], [100, 900]], dtype=torch.float64) / 1000
    log_ratio = (trainer / engine).log().repeat_interleave(torch.tensor([1, 999]))
    assert float(-log_ratio.mean()) == pytest.approx(float(k3(log_ratio).mean()))
    spread = [float(values.std(unbiased=False)) for values in (k3(log_ratio), log_ratio)]
    assert {f"{spread[0]:.2f}", f"{spread[1]:.3f}"} <= NUMBERS


def test_k2_is_off_by_the_third_order():
    errors = []
    for distance in (0.02, 0.04):
        toy = enumerated(2, distance=distance, seed=1)
        errors.append(float((toy.log_ratio.square() / 2).mean()) - metrics_of(toy)["kl"])
    assert errors[1] == pytest.approx(8 * errors[0], rel=0.1)


def accepted(toy, name, threshold):
    """[n] bool: responses of which no token is rejected."""
    mask = corrected(toy, rollout_rs=name, rollout_rs_threshold=threshold).mask.all(1)
    assert 0.1 < mask.double().mean() < 0.99, name
    return mask


def test_a_bound_on_the_product_bounds_the_distance_of_what_is_left():
    toy = enumerated(4, distance=0.5)
    kept = accepted(toy, "seq_sum_k1", "0.5_2.0")
    assert torch.equal(kept, (toy.ratio >= 0.5) & (toy.ratio <= 2))
    rows = toy.first[kept[toy.first]]
    own, engine = (log.sum(1).exp()[rows] for log in (toy.train.detach(), toy.rollout))
    own, engine = own / own.sum(), engine / engine.sum()
    assert ((own / engine) <= 2 / 0.5).all()
    assert ((own / engine) >= 0.5 / 2).all()
    assert (own - engine).abs().sum() / 2 <= 1 - 0.5 / 2


def test_each_criterion_bounds_what_the_page_says():
    toy = enumerated(4, distance=0.5)

    def left(name, threshold):
        return toy.log_ratio[accepted(toy, name, threshold)]

    tokens = left("token_k1", "0.5_2.0")
    assert (tokens.abs() <= math.log(2)).all()
    assert 2 < tokens.sum(1).exp().max() <= 2**4, "products are left"
    means = left("seq_mean_k1", "0.8_1.25")
    assert (means.mean(1).abs() <= math.log(1.25)).all()
    assert means.abs().max() > math.log(1.5), "tokens are left"
    squares = left("seq_mean_k2", 0.1)
    assert (squares.square().mean(1) / 2 <= 0.1).all()
    of_k3 = left("seq_mean_k3", 0.1)
    for log_ratio in (of_k3, of_k3.mean(1, keepdim=True)):  # Jensen: k3 is convex in log ρ
        assert ((log_ratio.expm1() - log_ratio).mean(1) <= 0.1).all()
    assert (left("seq_max_k2", 0.5).abs() <= 1).all()


def test_a_mean_of_k3_lets_one_token_fall_further_than_it_lets_it_rise():
    length, limit = 50, 0.1
    up, down = math.sqrt(2 * limit * length), limit * length + 1
    log_ratio = torch.zeros(4, length, dtype=torch.float64)
    log_ratio[:, 7] = torch.tensor([2.0, up, 0.01 - down, -down])
    rollout = torch.full_like(log_ratio, -7.0)
    config = RolloutCorrectionConfig(rollout_is=None, rollout_rs="seq_mean_k3", rollout_rs_threshold=limit)
    result = correct_rollouts(rollout + log_ratio, rollout, log_ratio < 9, config)
    assert result.mask.all(1).tolist() == [True, False, True, False]
    assert down > 1.5 * up


def test_normalised_weights_have_mean_one_and_undo_a_batch_of_one():
    toy = enumerated(1)
    truncated = weights_of(toy, "sequence", 1.2, rollout_is_batch_normalize=True)
    assert truncated[:, 0].mean() == pytest.approx(1)
    assert metrics_of(toy, rollout_is="sequence", rollout_is_threshold=1.2)["rollout_is_mean"] < 0.99
    wanted = float((toy.ratio * toy.rewards).mean())
    errors = {}
    for size in (1, 2, 3, 4):
        # Every batch of so many responses: its weights are normalised by their own mean.
        batches = Counter(tuple(sorted(rows)) for rows in itertools.product(range(4), repeat=size))
        total = sum(times * self_normalised(toy, list(rows)) for rows, times in batches.items())
        errors[size] = total / 4**size - wanted
    assert errors[1] == pytest.approx(float(toy.rewards.mean()) - wanted)
    assert abs(errors[1]) > abs(errors[2]) > abs(errors[3]) > abs(errors[4]) > 0
    assert 4 * errors[4] == pytest.approx(3 * errors[3], rel=0.2)


def self_normalised(toy, rows):
    config = RolloutCorrectionConfig(
        rollout_is="sequence", rollout_is_threshold=UNTRUNCATED, rollout_is_batch_normalize=True
    )
    weights = correct_rollouts(toy.train.detach()[rows], toy.rollout[rows], toy.mask[rows], config).weights
    return float((weights[:, 0] * toy.rewards[rows]).mean())


@pytest.mark.parametrize("algorithm", sorted(set(OBJECTIVES) - {"reinforce"}))
def test_at_the_old_policy_all_objectives_are_one(algorithm):
    toy = enumerated(3)
    weights = weights_of(toy, "token", 2.0)
    assert_same(estimate(toy, weights, algorithm=algorithm), estimate(toy, weights))


def ratio_in_bypass(toy, algorithm, dual_clip=math.inf):
    """The weights that REINFORCE needs to have this objective's gradient, where π_rollout stands for π_old."""
    ratio, positive = toy.log_ratio.exp(), toy.rewards.unsqueeze(1) > 0
    if algorithm == "cispo":
        return ratio.clamp(0.8, 1.2)
    if algorithm == "gspo":
        ratio = toy.log_ratio.mean(1, keepdim=True).exp().expand_as(ratio)
    return ratio * torch.where(positive, ratio <= 1.2, (ratio >= 0.8) & (ratio <= dual_clip))


@pytest.mark.parametrize("algorithm", ["ppo_clip", "gspo", "cispo"])
def test_bypass_objectives_are_reinforce_with_weights_of_their_own(algorithm):
    toy = enumerated(3)
    found = estimate(toy, old=toy.rollout, algorithm=algorithm)
    weights = ratio_in_bypass(toy, algorithm)
    assert (weights != toy.log_ratio.exp()).any()
    assert_same(found, estimate(toy, weights))
    negative = toy.rewards < 0
    assert weights[~negative].max() <= 1.2
    if algorithm == "cispo":
        return
    far = enumerated(3, distance=3)
    raw = ratio_in_bypass(far, algorithm)
    assert raw[far.rewards < 0].max() > 2  # with A < 0 nothing bounds them but dual clip
    assert_same(estimate(far, old=far.rollout, algorithm=algorithm), estimate(far, raw))
    found = estimate(far, old=far.rollout, algorithm=algorithm, dual_clip=1.5)
    bounded = ratio_in_bypass(far, algorithm, dual_clip=1.5)
    assert bounded.max() <= 1.5
    assert_same(found, estimate(far, bounded))


def test_without_clipping_two_and_three_policies_have_one_gradient():
    toy = enumerated(3)
    old = enumerated(3, distance=0.4).train.detach()
    wide = {"algorithm": "ppo_clip", "clip_low": 1.0, "clip_high": 1e9}
    three = estimate(toy, (old - toy.rollout).exp(), old=old, **wide)
    assert_same(three, estimate(toy, old=toy.rollout, **wide))


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
    advantages = group_advantages(rewards, torch.arange(len(rows)).repeat_interleave(size), estimator=estimator)
    chosen = toy.train[rows.flatten(), 0]
    found = toy.gradient((advantages * chosen).mean())
    scale = 1 if estimator == "rloo" else 1 - 1 / size
    assert_same(found, scale * toy.wanted())


def learned(length=4):
    """A trainer that has learned to say the third token, an engine that has not; the reward is that token's share."""
    toy = enumerated(length, by_prefix=False, trainer=(0.2, 0.1, 0.7))
    return dataclasses.replace(toy, rewards=(toy.tokens == 2).double().mean(1))


BASELINES = {"the group's mean": 1, "weighted, ratios up to 2": 2, "weighted, ratios up to 10": 10, "π's mean": 1e9}


def ascent(toy, upper, bound):
    """(the baseline of a large group, the part of the wanted gradient that the estimate has along it)."""
    weights = toy.ratio.clamp(max=bound) if bound > 1 else None
    one = torch.zeros(len(toy.tokens), dtype=torch.int64)
    advantages = group_advantages(toy.rewards, one, estimator="grpo-no-std", weights=weights)
    found, wanted = estimate(toy, weights_of(toy, "sequence", upper), advantages=advantages), toy.wanted()
    return float((toy.rewards - advantages)[0]), float((found * wanted).sum() / wanted.square().sum())


def test_the_mean_of_the_engines_rewards_turns_a_truncated_gradient_around():
    toy = learned()
    assert float(toy.rewards.mean()) == pytest.approx(0.25)
    assert float((toy.ratio * toy.rewards).mean()) == pytest.approx(0.7)
    for name, bound in BASELINES.items():
        cells = [ascent(toy, upper, bound) for upper in (2.0, 10.0, UNTRUNCATED)]
        assert f"| {name} | {cells[0][0]:.2f} | {' | '.join(f'{along:.2f}' for _, along in cells)} |" in PAGE
        assert cells[2][1] == pytest.approx(1)
    assert ascent(toy, 2.0, 1)[1] < 0 < ascent(toy, 2.0, 2)[1] < ascent(toy, 2.0, 10)[1]


@pytest.mark.parametrize(
    ("threshold", "mode"), [(2.0, "truncate"), (10.0, "truncate"), ("0.5_2.0", "mask"), ("0.5_2.0", "clamp")]
)
def test_the_bias_of_a_baseline_is_that_of_the_lost_part(threshold, mode):
    toy = learned()
    weights = weights_of(toy, "sequence", threshold, rollout_is_mode=mode)
    lost, bounds = toy.ratio - weights[:, 0], {}
    for baseline in torch.linspace(0, 1, 41).tolist():
        advantages = toy.rewards - baseline
        found = estimate(toy, weights, advantages=advantages) - toy.wanted()
        of_lost = toy.gradient((lost * advantages * toy.train.sum(1)).mean())
        torch.testing.assert_close(found, -of_lost, rtol=0, atol=1e-12)
        bounds[baseline] = float((lost * advantages).abs().mean())
        assert found.norm() <= 4 * SCORE * bounds[baseline] + 1e-12
    best = min(bounds, key=bounds.get)
    below, above = (float(lost[side].abs().sum()) for side in (toy.rewards < best, toy.rewards > best))
    assert max(below, above) <= float(lost.abs().sum()) / 2, "a median of the rewards of the lost part"


@pytest.mark.parametrize("size", [2, 3])
def test_leave_one_out_with_importance_weights_is_unbiased(size):
    """Every group of so many responses of two tokens, each with its probability under the engine."""
    toy = enumerated(2, distance=0.5, seed=1)
    rows = torch.tensor(list(itertools.product(range(16), repeat=size)))
    prompts = torch.arange(len(rows)).repeat_interleave(size)
    rewards, ratio, score = (value[rows].flatten() for value in (toy.rewards, toy.ratio, toy.train.sum(1)))
    found = {}
    for estimator in ("rloo", "grpo-no-std"):
        advantages = group_advantages(rewards, prompts, estimator=estimator, weights=ratio)
        found[estimator] = toy.gradient((ratio * advantages * score).mean())
    torch.testing.assert_close(found["rloo"], toy.wanted(), rtol=0, atol=1e-12)
    # With the response itself the mean takes more of a heavy response: no factor for all of them.
    shrunk = found["grpo-no-std"]
    along = float((shrunk * toy.wanted()).sum() / toy.wanted().square().sum())
    assert 0 < along < 1 - 1 / size
    assert (shrunk - along * toy.wanted()).norm() > 1e-3


ON_POLICY = {"distance": 0}  # the engine is the trainer
REFERENCE = {"distance": 2.0, "seed": 1}
KL = {
    "k1": None,
    "k2": "forward",
    "k3": "reverse",
    "abs": "distance",
    "k1+": "forward",
    "k3+": "forward",
    "abs+": "forward",
}


def reached(policy):
    """The probability of each prefix; those one token longer than prefix i are 3i + 1, 3i + 2 and 3i + 3."""
    found = [policy.new_ones(())]
    for prefix in range(len(policy) // 3):
        found.extend(found[prefix] * policy[prefix])
    return torch.stack(found)


def divergences(toy, other):
    """Distances of the next token's distributions after each prefix, in the graph of the logits.

    KL(π_θ ‖ π_ref), KL(π_ref ‖ π_θ) and Σ|π_θ - π_ref|.
    """
    own, ref = toy.logits.log_softmax(1), other.logits.detach().log_softmax(1)
    return {
        "forward": (own.exp() * (own - ref)).sum(1),
        "reverse": (ref.exp() * (ref - own)).sum(1),
        "distance": (own.exp() - ref.exp()).abs().sum(1),
    }


def penalized(toy, other, estimator):
    return kl_penalty(toy.train, other.train.detach(), estimator)


@pytest.mark.parametrize(("estimator", "direction"), KL.items())
def test_the_means_and_the_mean_gradients_of_the_kl_estimators(estimator, direction):
    """On tokens of the policy itself, and of each token after the prefix that it was sampled after."""
    toy, other = enumerated(3, **ON_POLICY), enumerated(3, **REFERENCE)
    mean = penalized(toy, other, estimator).sum(1).mean()
    means = {name: (reached(toy.engine) * value).sum() for name, value in divergences(toy, other).items()}
    if estimator.removesuffix("+") == "abs":
        assert mean > means["forward"] + 0.1
    elif estimator != "k2":
        torch.testing.assert_close(mean, means["forward"])
    found = toy.gradient(mean)
    wanted = {name: toy.gradient(value) for name, value in means.items()}
    assert (wanted["forward"] - wanted["reverse"]).norm() > 0.1
    expected = torch.zeros_like(found) if direction is None else wanted[direction]
    assert_same(found, expected)


def test_a_penalty_in_the_reward_has_the_gradient_of_whole_responses():
    toy, other = enumerated(3, **ON_POLICY), enumerated(3, **REFERENCE)
    each = divergences(toy, other)["forward"]
    whole = toy.gradient((reached(toy.logits.softmax(1)) * each).sum())
    penalty = penalized(toy, other, "k1").detach()
    to_come = penalty.flip(1).cumsum(1).flip(1)
    assert_same(estimate(toy, advantages=to_come), whole)
    after_prefixes = toy.gradient(penalized(toy, other, "k3+").sum(1).mean())
    assert (after_prefixes - whole).norm() > 0.1


def step_with_penalty(toy, other, **loss):
    """The gradient of a step whose loss is the KL penalty alone, a mean over responses; and its plan's micro-batch."""
    objective = PolicyLossConfig(algorithm="reinforce", kl_coef=1.0, **loss)
    config = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_threshold=UNTRUNCATED)
    correction = RolloutCorrection(config, ParallelGroups(), loss=objective)
    inputs = PlanInputs(toy.train.detach(), toy.rollout, toy.mask, advantages=torch.zeros_like(toy.rewards))
    batch, scale, _end = one_step.planned(correction, inputs)
    batch = dataclasses.replace(batch, ref_log_probs=other.train.detach())
    value, count, _ = masked_loss(correction, batch, toy.train, None, scale)
    tokens_of_a_response = toy.tokens.shape[1]
    return tokens_of_a_response * toy.gradient(value / count), batch


@pytest.mark.parametrize("estimator", WEIGHTED_KL_ESTIMATORS)
@pytest.mark.parametrize("length", [1, 3])
def test_with_an_importance_weight_the_kl_penalty_has_the_gradient_of_the_kl(estimator, length):
    """Of each token after the prefix that the engine sampled; for responses of one token that is the KL itself."""
    toy, other = enumerated(length, distance=0.7), enumerated(length, **REFERENCE)
    each = divergences(toy, other)["forward"]
    wanted = toy.gradient((reached(toy.engine) * each).sum())

    value = kl_penalty(toy.train, other.train.detach(), estimator, rollout_log_probs=toy.rollout)
    torch.testing.assert_close(value.sum(1).mean(), (reached(toy.engine) * each).sum(), rtol=0, atol=1e-12)
    found, _ = step_with_penalty(toy, other, kl_estimator=estimator, kl_importance_weight=True)
    assert_same(found, wanted)

    # Also as the derivative of the weighted mean itself, with a ratio that is differentiated.
    ratio = (toy.train - toy.rollout).exp()
    weighted_mean = (ratio * k3(other.train.detach() - toy.train)).sum(1).mean()
    assert_same(toy.gradient(weighted_mean), wanted)
    without, _ = step_with_penalty(toy, other, kl_estimator=estimator)
    assert (without - wanted).norm() > 0.1


def test_the_kl_penalty_has_no_importance_weight():
    """Without advantages the loss is the penalty alone: it is the unweighted mean, off by the first order."""
    errors = []
    for distance in (0.01, 0.02, 1.0):
        toy, other = enumerated(2, distance=distance), enumerated(2, **REFERENCE)
        found, batch = step_with_penalty(toy, other, kl_estimator="k3+")
        penalty = penalized(toy, other, "k3+")
        assert_same(found, toy.gradient(penalty.sum(1).mean()))
        own = toy.logits.detach().softmax(1)
        wanted = toy.gradient((reached(own) * divergences(toy, other)["forward"]).sum())
        weighted = toy.gradient((batch.weights * penalty).sum(1).mean())
        assert_same(weighted, wanted)
        errors.append(float((found - wanted).norm()))
    assert errors[1] == pytest.approx(2 * errors[0], rel=0.05)
    assert errors[2] > 0.1
