"""The proximal policy by interpolation: its ends, the gradients of a float64 reference, and what it cannot do."""

import dataclasses
import functools
import math

import pytest
import torch

from megatron_rc import PlanInputs, RolloutCorrection, RolloutCorrectionConfig
from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.configure import configure
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
    now, then = -3 * torch.rand(2, 4, 5, generator=generator)
    fresh, old = torch.zeros(4, 5, dtype=torch.int64), torch.full((4, 5), 10**9)
    assert torch.equal(interpolate(now, then, fresh, 0), now), "the first update has the weights of the proximal policy"
    assert torch.equal(interpolate(now, then, old, 0), now)
    assert torch.equal(interpolate(now, then, fresh, 1), then), "later, fresh tokens were sampled by it"
    torch.testing.assert_close(interpolate(now, then, old, 1), now)


def test_versions_in_between_are_weighed_by_their_distance():
    now, then = torch.tensor([-1.0, -1.0, -1.0, -1.0]), torch.tensor([-3.0, -3.0, -3.0, -3.0])
    found = interpolate(now, then, torch.tensor([0, 1, 3, 9]), 1)
    # One step after weights that were s versions ahead of the token's: v_prox is s/(s + 1) of the way.
    assert found.tolist() == pytest.approx([-3, -2, -1.5, -1.2])
    assert interpolate(now, then, torch.tensor([1, 2, 2, 4]), 2).tolist() == pytest.approx([-7 / 3, -2, -2, -5 / 3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_log_probs_of_a_model_round_no_log_prob_of_the_engine(dtype):
    generator = torch.Generator().manual_seed(0)
    now, then = -6 * torch.rand(2, 4, 5, generator=generator)
    fresh, old = torch.zeros(4, 5, dtype=torch.int64), torch.full((4, 5), 3)
    assert torch.equal(interpolate(now.to(dtype), then, fresh, 1), then)
    want = interpolate(now.to(dtype).float(), then, old, 2)
    assert torch.equal(interpolate(now.to(dtype), then, old, 2), want)
    assert interpolate(now.to(dtype), then, old, 0).dtype == torch.float32


def test_what_is_bad_stays_with_its_policy():
    now, then = torch.tensor([-1.0, math.nan, -math.inf, 0.5]), torch.tensor([math.nan, -1.0, -1.0, -math.inf])
    for updates in (0, 1):
        found = interpolate(now, then, torch.ones(4, dtype=torch.int64), updates)
        assert found[0] == -1, "the rollout's log-prob is the bad one"
        assert not found[1].isfinite()
        assert not found[2].isfinite()
        assert found[3] == 0.5


# Against the reference

_CRITERIA = (("token_k1", oracle.log(0.8), oracle.log(1.3)), ("seq_mean_k3", -math.inf, 0.06))
_WORDS = ("--proximal-interpolation", "--rollout-staleness=8", "--rollout-rs=token_k1,seq_mean_k3")
_WORDS += ("--rollout-rs-threshold=0.8_1.3,0.06",)
OBJECTIVES = {
    "ppo": Objective(
        words=(
            *(*_WORDS, "--rollout-is=token", "--rollout-is-threshold=1.2", "--grpo-kl-beta=0.05"),
            *("--grpo-clamp-eps-lower=0.02", "--grpo-clamp-eps-upper=0.03", "--grpo-entropy-term-weight=0.02"),
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
            *(*_WORDS, "--rollout-is=geometric", "--rollout-is-threshold=1.05", "--rollout-is-batch-normalize"),
            *("--policy-loss=gspo", "--grpo-clamp-eps-lower=0.01", "--grpo-clamp-eps-upper=0.01", "--grpo-kl-beta=0"),
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
    """Tokens of 0 to 3 versions before the old weights; drawn until no objective decides anything narrowly."""
    generator = torch.Generator().manual_seed(5)
    shape, ids = (SEQUENCES, LENGTH), torch.arange(SEQUENCES)
    tokens = torch.randint(0, training_oracle.VOCABULARY, shape, generator=generator)
    new = training_oracle.score({k: w.double() for k, w in training_cases.weights()[1].items()}, tokens)[0]
    ages, mask = torch.randint(0, 4, shape, generator=generator), torch.zeros(shape, dtype=torch.bool)
    rewards = torch.rand(SEQUENCES, generator=generator)
    data = Data(tokens, mask, new.clone(), rewards, ids // 4, ids // PER_MINI_BATCH, ages)
    for row in range(SEQUENCES):
        draw(data, row, new, generator)
    return data


def draw(data, row, new, generator):
    for _ in range(2000):
        data.mask[row] = torch.rand(LENGTH, generator=generator) > 0.4
        data.mask[row, -1] = False
        noise = 0.3 * torch.randn(LENGTH, generator=generator) + 0.15 * float(torch.randn((), generator=generator))
        data.rollout[row] = (new[row] + noise).clamp(max=-0.01).float().double()
        if data.mask[row].any() and all(
            narrowest(objective, data, row, new) > NEAREST for objective in OBJECTIVES.values()
        ):
            return
    raise AssertionError(f"no draw of sequence {row} is clear")


def narrowest(objective, data, row, new):
    """How near anything that is decided in a sequence comes to flipping."""
    one = dataclasses.replace(
        data, **{name: getattr(data, name)[row : row + 1] for name in ("mini_batch_ids", "ages", "rollout")}
    )
    between = training_oracle.proximal(one, new[row : row + 1])
    lists = (between.tolist(), one.rollout.tolist(), data.mask[row : row + 1].tolist())
    log_ratio = (new[row] - between[0])[data.mask[row]]
    log_ratio = log_ratio.mean(0, keepdim=True) if objective.algorithm == "gspo" else log_ratio
    bounds = (1 - objective.low, 1 + objective.high)
    near = [abs(float(r) - bound) for r in log_ratio.exp() for bound in bounds]
    return min(oracle.distance_to_bounds(*lists, objective.settings), *near, math.inf)


@functools.cache
def expected(name):
    return training_oracle.update(OBJECTIVES[name], make_data(), *training_cases.weights())


def words_of(name, layout, folder, *more):
    kept = [
        word for word in flags(folder, *training_cases.BATCH) if not word.startswith(("--rollout-", "--grpo-clamp"))
    ]
    return [*kept, *layout.flags(), *OBJECTIVES[name].words, *more]


@pytest.mark.parametrize(
    ("name", "layout", "more"),
    [
        ("ppo", Layout(), []),
        ("ppo", Layout(cp=2), ["--rl-use-sequence-packing"]),
        ("ppo", Layout(dp=2), ["--calculate-per-token-loss"]),
        ("ppo", Layout(tp=2, pp=2), []),
        ("gspo", Layout(cp=2, dp=2), []),
    ],
    ids=lambda value: str(value) if not isinstance(value, list) else "-".join(value).strip("-"),
)
def test_the_gradients_are_those_of_the_reference(ranks, tmp_path, name, layout, more):
    want, words = expected(name), words_of(name, layout, tmp_path, *more)
    everywhere = ranks.run(training_cases.run_case, layout, words, make_data(), *training_cases.weights())
    for index in range(training_cases.MINI_BATCHES):
        assert_gradients(whole_gradients(everywhere, index), want.gradients[index], TO_REFERENCE)
        for rank in everywhere:
            assert rank.metrics[index] == everywhere[0].metrics[index]
        got = everywhere[0].metrics[index]
        assert abs(got["loss/total"] - want.loss[index]) <= TO_REFERENCE * want.size[index]
        for metric, value in want.metrics[index].items():
            assert got[f"rollout_corr/{metric}"] == pytest.approx(value, rel=1e-4, abs=2e-5), metric
        assert got["policy/approx_kl"] == pytest.approx(-want.policy[index]["log_ratio"], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_data_are_not_vacuous(name):
    want = expected(name)
    assert want.policy[0]["log_ratio"] == 0, "the first update is on the proximal policy itself"
    assert min(want.policy[1]["low"], want.policy[1]["high"]) > 0.05
    assert 0.1 < want.metrics[1]["rollout_rs_masked_fraction"] < 0.9
    assert want.metrics[1]["rollout_is_ratio_fraction_high"] > 0.1


# What it cannot do


INTERPOLATION = {"rollout_is": "token", "proximal_interpolation": True}


def test_what_would_not_be_exact_is_refused():
    normalized = RolloutCorrectionConfig(**INTERPOLATION, rollout_is_batch_normalize=True)
    with pytest.raises(ValueError, match=r"rollout_is_batch_normalize=True.*proximal_interpolation"):
        RolloutCorrection(normalized, ALONE, loss=PolicyLossConfig(kl_coef=0.1))
    with pytest.raises(ValueError, match=r"proximal_interpolation.*rejection_denominator"):
        RolloutCorrection(normalized, ALONE, loss=PolicyLossConfig(), has_auxiliary_losses=True)
    RolloutCorrection(RolloutCorrectionConfig(**INTERPOLATION), ALONE, loss=PolicyLossConfig(algorithm="gspo"))


def test_without_versions_it_is_an_error():
    correction = RolloutCorrection(RolloutCorrectionConfig(**INTERPOLATION), ALONE, loss=PolicyLossConfig())
    train, mask = torch.full((2, 3), -1.0), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"proximal_interpolation=True.*policy_versions="):
        correction.plan(PlanInputs(None, train, mask))
    versions = torch.tensor([4, 1])
    correction.plan(PlanInputs(None, train, mask, policy_versions=versions), current_version=4)
    with pytest.raises(ValueError, match=r"policy_versions.*current_version"):
        correction.in_loss(train, train, mask)
    with pytest.raises(ValueError, match="rollout_log_probs"):
        correction.in_loss(train, train[:1], mask, policy_versions=versions)


def test_the_launcher_needs_versions_of_this_run(tmp_path):
    words = ["--proximal-interpolation"]
    configure(flags(tmp_path, *words), 1)
    (tmp_path / "step-0000000-replica-0000.safetensors").touch()
    words += [f"--load-rollouts={tmp_path}", "--train-iters=2"]
    with pytest.raises(ConfigurationError, match="--proximal-interpolation"):
        configure(flags(tmp_path, *words), 1)
    configure(flags(tmp_path, *words, "--rollout-staleness=4"), 1)
