"""The proximal policy by interpolation: its ends, the gradients of a float64 reference, and its refusals."""

import functools
import math

import pytest
import torch

from megatron_rc import PlanInputs, RolloutCorrection, RolloutCorrectionConfig
from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.loss.proximal import interpolate
from megatron_rc.parallel import ParallelGroups
from tests.launch.training.test_matrix import TO_REFERENCE, assert_gradients, whole_gradients
from tests.support import correction_oracle as oracle
from tests.support import training_cases, training_oracle
from tests.support.ranks import Layout
from tests.support.recorded_training import flags
from tests.support.training_cases import LENGTH, NEAREST, PER_MINI_BATCH, SEQUENCES
from tests.support.training_oracle import Data, Objective

ALONE = ParallelGroups()


def test_both_ends_are_exact():
    generator = torch.Generator().manual_seed(0)
    theta, rollout = -3 * torch.rand(2, 4, 5, generator=generator)
    fresh = torch.zeros(4, 5, dtype=torch.int64)
    very_old = torch.full((4, 5), 10**9)
    first_update = interpolate(theta, rollout, fresh, updates=0)
    assert torch.equal(first_update, theta), "the first update has the weights of the proximal policy"
    assert torch.equal(interpolate(theta, rollout, very_old, updates=0), theta)
    second_update = interpolate(theta, rollout, fresh, updates=1)
    assert torch.equal(second_update, rollout), "later, fresh tokens were sampled by it"
    torch.testing.assert_close(interpolate(theta, rollout, very_old, updates=1), theta)


def test_versions_in_between_are_weighed_by_their_distance():
    """One step after weights that were s versions ahead of the token's: v_prox is s/(s + 1) of the way."""
    theta = torch.full((4,), -1.0)
    rollout = torch.full((4,), -3.0)
    assert interpolate(theta, rollout, torch.tensor([0, 1, 3, 9]), 1).tolist() == pytest.approx([-3, -2, -1.5, -1.2])
    after_two_steps = interpolate(theta, rollout, torch.tensor([1, 2, 2, 4]), 2)
    assert after_two_steps.tolist() == pytest.approx([-7 / 3, -2, -2, -5 / 3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_log_probs_of_a_model_round_no_log_prob_of_the_engine(dtype):
    generator = torch.Generator().manual_seed(0)
    theta, rollout = -6 * torch.rand(2, 4, 5, generator=generator)
    narrow_theta = theta.to(dtype)
    fresh = torch.zeros(4, 5, dtype=torch.int64)
    old = torch.full((4, 5), 3)
    assert torch.equal(interpolate(narrow_theta, rollout, fresh, updates=1), rollout)
    expected = interpolate(narrow_theta.float(), rollout, old, updates=2)
    assert torch.equal(interpolate(narrow_theta, rollout, old, updates=2), expected)
    assert interpolate(narrow_theta, rollout, old, updates=0).dtype == torch.float32


def test_what_is_bad_stays_with_its_policy():
    theta = torch.tensor([-1.0, math.nan, -math.inf, 0.5])
    rollout = torch.tensor([math.nan, -1.0, -1.0, -math.inf])
    for updates in (0, 1):
        proximal = interpolate(theta, rollout, torch.ones(4, dtype=torch.int64), updates)
        assert proximal[0] == -1, "the rollout's log-prob is the bad one"
        assert not proximal[1].isfinite()
        assert not proximal[2].isfinite()
        assert proximal[3] == 0.5


# Against the reference

_CRITERIA = (("token_k1", oracle.log(0.8), oracle.log(1.3)), ("seq_mean_k3", -math.inf, 0.06))
_FLAGS = (
    "--proximal-interpolation",
    "--rollout-staleness=8",
    "--rollout-rs=token_k1,seq_mean_k3",
    "--rollout-rs-threshold=0.8_1.3,0.06",
)
OBJECTIVES = {
    "ppo": Objective(
        words=(
            *_FLAGS,
            "--rollout-is=token",
            "--rollout-is-threshold=1.2",
            "--grpo-kl-beta=0.05",
            "--grpo-clamp-eps-lower=0.02",
            "--grpo-clamp-eps-upper=0.03",
            "--grpo-entropy-term-weight=0.02",
        ),
        settings=oracle.Settings(level="token", upper=1.2, criteria=_CRITERIA),
        low=0.02,
        high=0.03,
        kl=0.05,
        entropy=0.02,
        interpolation=True,
    ),
    "gspo": Objective(
        words=(
            *_FLAGS,
            "--rollout-is=geometric",
            "--rollout-is-threshold=1.05",
            "--rollout-is-batch-normalize",
            "--policy-loss=gspo",
            "--grpo-clamp-eps-lower=0.01",
            "--grpo-clamp-eps-upper=0.01",
            "--grpo-kl-beta=0",
            "--loss-aggregation=seq-mean-token-mean",
        ),
        settings=oracle.Settings(level="geometric", upper=1.05, batch_normalize=True, criteria=_CRITERIA),
        algorithm="gspo",
        low=0.01,
        high=0.01,
        aggregation="seq-mean-token-mean",
        interpolation=True,
    ),
}


@functools.cache
def make_data():
    """Tokens of 0 to 3 versions before the old weights; drawn until every objective decides clearly."""
    generator = torch.Generator().manual_seed(5)
    shape = (SEQUENCES, LENGTH)
    sequences = torch.arange(SEQUENCES)
    tokens = torch.randint(0, training_oracle.VOCABULARY, shape, generator=generator)
    _, new_weights = training_cases.weights()
    exact_weights = {name: weight.double() for name, weight in new_weights.items()}
    new_log_probs, _ = training_oracle.score(exact_weights, tokens)
    ages = torch.randint(0, 4, shape, generator=generator)
    rewards = torch.rand(SEQUENCES, generator=generator)
    data = Data(
        tokens=tokens,
        mask=torch.zeros(shape, dtype=torch.bool),  # filled in by draw(), like the rollout's log-probs
        rollout=new_log_probs.clone(),
        rewards=rewards,
        group_ids=sequences // 4,
        mini_batch_ids=sequences // PER_MINI_BATCH,
        ages=ages,
    )
    for row in range(SEQUENCES):
        draw(data, row, new_log_probs, generator)
    return data


def draw(data, row, new_log_probs, generator):
    """Fill in the mask and the rollout's log-probs of a sequence."""
    for _ in range(2000):
        data.mask[row] = torch.rand(LENGTH, generator=generator) > 0.4
        data.mask[row, -1] = False
        token_noise = 0.3 * torch.randn(LENGTH, generator=generator)
        sequence_noise = 0.15 * float(torch.randn((), generator=generator))
        noisy = new_log_probs[row] + (token_noise + sequence_noise)
        data.rollout[row] = noisy.clamp(max=-0.01).float().double()
        distances = [
            training_oracle.nearest_bound(objective, data, row, new_log_probs, new_log_probs)
            for objective in OBJECTIVES.values()
        ]
        if data.mask[row].any() and min(distances) > NEAREST:
            return
    raise AssertionError(f"no draw of sequence {row} is clear")


@functools.cache
def reference_update(name):
    """The reference's losses, gradients and metrics of an objective."""
    old_weights, new_weights = training_cases.weights()
    return training_oracle.update(OBJECTIVES[name], make_data(), old_weights, new_weights)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_data_are_not_vacuous(name):
    expected = reference_update(name)
    assert expected.policy[0]["log_ratio"] == 0, "the first update is on the proximal policy itself"
    assert min(expected.policy[1]["low"], expected.policy[1]["high"]) > 0.05
    assert 0.1 < expected.metrics[1]["rollout_rs_masked_fraction"] < 0.9
    assert expected.metrics[1]["rollout_is_ratio_fraction_high"] > 0.1


def flags_of(name, layout, folder, *more):
    """The launcher's flags of an objective on a layout."""
    replaced = ("--rollout-", "--grpo-clamp")
    common = [flag for flag in flags(folder, *training_cases.BATCH) if not flag.startswith(replaced)]
    return [*common, *layout.flags(), *OBJECTIVES[name].words, *more]


@pytest.mark.parametrize(
    ("name", "layout", "more"),
    [
        ("ppo", Layout(cp=2, dp=2), ["--rl-use-sequence-packing", "--calculate-per-token-loss"]),
        ("gspo", Layout(tp=2, pp=2), []),
    ],
    ids=lambda value: str(value) if not isinstance(value, list) else "-".join(value).strip("-"),
)
def test_the_gradients_are_those_of_the_reference(ranks, tmp_path, name, layout, more):
    expected = reference_update(name)
    launcher_flags = flags_of(name, layout, tmp_path, *more)
    old_weights, new_weights = training_cases.weights()
    results = ranks.run(training_cases.run_case, layout, launcher_flags, make_data(), old_weights, new_weights)

    for index in range(training_cases.MINI_BATCHES):
        assert_gradients(whole_gradients(results, index), expected.gradients[index], TO_REFERENCE)
        metrics = results[0].metrics[index]
        for result in results:
            assert result.metrics[index] == metrics
        assert abs(metrics["loss/total"] - expected.loss[index]) <= TO_REFERENCE * expected.size[index]
        for metric, value in expected.metrics[index].items():
            assert metrics[f"rollout_corr/{metric}"] == pytest.approx(value, rel=1e-4, abs=2e-5), metric
        log_ratio = expected.policy[index]["log_ratio"]
        assert metrics["policy/approx_kl"] == pytest.approx(-log_ratio, rel=1e-4, abs=1e-5)


# Refusals


INTERPOLATION = {"rollout_is": "token", "proximal_interpolation": True}


def test_without_versions_it_is_an_error():
    correction = RolloutCorrection(RolloutCorrectionConfig(**INTERPOLATION), ALONE, loss=PolicyLossConfig())
    train = torch.full((2, 3), -1.0)
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"proximal_interpolation=True.*policy_versions="):
        correction.plan(PlanInputs(None, train, mask))
    versions = torch.tensor([4, 1])
    correction.plan(PlanInputs(None, train, mask, policy_versions=versions), current_version=4)
    with pytest.raises(ValueError, match=r"policy_versions.*current_version"):
        correction.in_loss(train, train, mask)
    with pytest.raises(ValueError, match="rollout_log_probs"):
        correction.in_loss(train, train[:1], mask, policy_versions=versions)
