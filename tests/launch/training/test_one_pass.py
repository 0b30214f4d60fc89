"""Decoupled mode without a forward-only pass equals the step with one, in layouts; and the runs that keep it.

The model computes in float64 here, so that everything agrees to 1e-12: weights, mask, n_i, metrics, and the gradient of
every parameter. The training steps of both kinds start from the same weights.
"""

import contextlib
import dataclasses
import functools
import itertools
from unittest import mock

import pytest
import torch

from megatron_rc.launch.run_config.passes import is_one_pass, scoring_in_words, why_scored
from megatron_rc.parallel.groups import group_rank, group_size
from tests.support import training_cases, training_oracle
from tests.support.on_rank import recorded
from tests.support.ranks import Layout
from tests.support.recorded_training import LLAMA, flags, make_trainer, run_config
from tests.support.training_cases import LENGTH, SEQUENCES
from tests.support.training_oracle import Data

EXACT = 1e-12
RUN = (f"--grpo-prompts-per-step={SEQUENCES // 4}", f"--global-batch-size={SEQUENCES}", "--grpo-iterations=1")
REJECT = ("--rollout-rs=token_k1,seq_mean_k3", "--rollout-rs-threshold=0.65_1.6,0.12")
OBJECTIVES = {
    "ppo": (
        *(*REJECT, "--rollout-is=token", "--rollout-is-threshold=1.4", "--grpo-kl-beta=0.05"),
        *("--grpo-entropy-term-weight=0.02", "--rollout-staleness=3"),
    ),
    "ppo normalised": (
        *("--rollout-rs=token_k1,opsm", "--rollout-rs-threshold=0.65_1.6,0.05", "--rollout-is=sequence"),
        *("--rollout-is-threshold=1.5", "--rollout-is-batch-normalize", "--ppo-dual-clip=1.2", "--grpo-kl-beta=0"),
        *("--loss-aggregation=seq-mean-token-sum", "--rollout-token-veto-threshold=0.35"),
    ),
    "gspo": (
        *(*REJECT, "--policy-loss=gspo", "--rollout-is=sequence", "--rollout-is-threshold=1.5", "--grpo-kl-beta=0.05"),
        *("--rejection-denominator=original", "--loss-aggregation=seq-mean-token-mean"),
    ),
    "cispo": (
        *(*REJECT, "--policy-loss=cispo", "--rollout-is=geometric", "--rollout-is-threshold=0.8_1.2"),
        *("--grpo-kl-beta=0.05", "--kl-estimator=k2", "--loss-aggregation=seq-mean-token-sum-norm"),
        "--loss-scale-factor=9",
    ),
    "reinforce normalised": (
        *("--rollout-rs=token_k1,seq_max_k3", "--rollout-rs-threshold=0.65_1.6,0.9", "--policy-loss=reinforce"),
        *("--rollout-is=token", "--rollout-is-threshold=0.7_1.4", "--rollout-is-mode=clamp", "--grpo-kl-beta=0"),
        *("--rollout-is-batch-normalize", "--rollout-is-batch-normalize-scope=accepted"),
        "--loss-aggregation=seq-mean-token-mean",
    ),
    "sums": (*REJECT, "--rollout-is=token", "--loss-aggregation=token-sum", "--loss-scale-factor=40"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One step, made with a forward-only pass and without."""

    layout: Layout
    name: str
    packed: bool
    per_token_loss: bool
    size: int

    def words(self, folder, *more):
        clip = () if "reinforce" in self.name else ("--grpo-clamp-eps-lower=0.1", "--grpo-clamp-eps-upper=0.15")
        arguments = training_cases.cut_words(self, *RUN, *clip, *OBJECTIVES[self.name], *more)
        replaced = ("--rollout-", "--grpo-clamp")
        return [word for word in flags(folder, model=LLAMA) if not word.startswith(replaced)] + arguments


PADDED = {"packed": False}
PACKED = {"packed": True}
PER_TOKEN = {"per_token_loss": True}
PER_BATCH = {"per_token_loss": False}
CASES = [
    Case(Layout(), "ppo", **PADDED, **PER_BATCH, size=8),
    Case(Layout(tp=2, sp=True), "cispo", **PACKED, **PER_TOKEN, size=16),
    Case(Layout(pp=2, vpp=True), "sums", **PADDED, **PER_TOKEN, size=8),
    Case(Layout(cp=2), "ppo", **PACKED, **PER_BATCH, size=8),
    Case(Layout(cp=2, dp=2), "ppo normalised", **PADDED, **PER_TOKEN, size=8),
    Case(Layout(cp=2), "gspo", **PADDED, **PER_BATCH, size=16),
    Case(Layout(pp=2), "reinforce normalised", **PACKED, **PER_TOKEN, size=16),
]
LAYOUTS = list(dict.fromkeys(case.layout for case in CASES))


@functools.cache
def make_data():
    """Ragged responses with holes, one rank's share without any, of 0 to 3 versions before."""
    generator = torch.Generator().manual_seed(5)
    shape = (SEQUENCES, LENGTH)
    ids = torch.arange(SEQUENCES)
    tokens = torch.randint(0, training_oracle.VOCABULARY, shape, generator=generator)
    scores = training_oracle.score({k: w.double() for k, w in training_cases.weights()[1].items()}, tokens)[0]
    noise = 0.25 * torch.randn(SEQUENCES, 1, generator=generator) + 0.3 * torch.randn(shape, generator=generator)
    ends = torch.randint(3, LENGTH, (SEQUENCES, 1), generator=generator)
    mask = (torch.arange(LENGTH) < ends) & (torch.rand(shape, generator=generator) > 0.15)
    mask[SEQUENCES * 3 // 4 :] = False
    return Data(
        tokens=tokens,
        mask=mask,
        rollout=(scores + noise).clamp(max=-0.01).float().double(),
        rewards=torch.randn(SEQUENCES, generator=generator),
        group_ids=ids // 4,
        mini_batch_ids=ids // training_cases.PER_MINI_BATCH,
        ages=torch.randint(0, 4, shape, generator=generator),
    )


# On the ranks


@contextlib.contextmanager
def in_float64():
    """Models and gradient buffers of double precision."""
    from megatron_rc.launch.run_config import RunConfig
    from megatron_rc.launch.training.models import build

    build_config = build.build_ddp_config

    def build_ddp_config(config):
        built = build_config(config)
        built.grad_reduce_in_fp32 = False
        return built

    exact = mock.patch.object(RunConfig, "dtype", torch.float64)
    with exact, mock.patch.object(build, "build_ddp_config", build_ddp_config):
        yield


def step(words, data, old, new):
    """(weights, mask, n_i) of the local tokens, metrics and gradients of a step, and how many passes only score."""
    trainer = make_trainer(words)
    groups = trainer.groups
    training_cases.load(trainer.chunks, new)
    if trainer.reference is not None:
        with trainer.reference.in_place_of(trainer.chunks):
            training_cases.load(trainer.chunks, old)
    batch, _ = training_cases.batch_of(data, group_rank(groups.dp), group_size(groups.dp))
    scored = mock.Mock(wraps=trainer.passes.score)
    trainer.passes.score = scored
    prepared = trainer.prepare(batch)
    held = training_cases.watch(trainer)
    with recorded(of_library=True) as calls:
        metrics = trainer.accumulate(prepared, 0) | prepared.plan.metrics()
    local = prepared.batch.local
    applied = [local.weights, local.mask, local.sequence_lengths] if held is None else training_cases.joined(held)
    norm = metrics.get("rollout_corr/rollout_is_batch_norm_factor")
    if held is not None and norm and applied[0] is not None:
        applied[0] = applied[0] / norm
    gradients = {name: p.main_grad.clone() for name, p in training_cases.named(trainer.chunks)}
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float64}
    passes = scored.call_count - (trainer.reference is not None)
    return applied, metrics, gradients, passes, calls


def compare(cases, data, old, new):
    """What differs between the steps of each case, on this rank."""
    return [compare_one(arguments, data, old, new) for arguments in cases]


def compare_one(words, data, old, new):
    with in_float64():
        one, two = (step([*words, *more], data, old, new) for more in ([], ["--always-score"]))
    wrong = []
    for name, got, want in zip(("weights", "mask", "lengths"), one[0], two[0], strict=True):
        if (got is None) != (want is None) or (got is not None and not close(got, want)):
            wrong.append(name)
    if one[1].keys() != two[1].keys() - {"policy/noise_floor"}:
        wrong.append(f"metrics {one[1].keys() ^ two[1].keys()}")
    wrong += [name for name in one[1].keys() & two[1].keys() if not near(one[1][name], two[1][name])]
    largest = max(float(gradient.norm()) for gradient in two[2].values())
    for name, want in two[2].items():
        distance = float((one[2][name] - want).norm())
        if not distance <= EXACT * (float(want.norm()) + 1e-3 * largest):
            wrong.append(f"gradient of {name}: {distance / largest}")
    return wrong, one[3], two[3], len(one[1]), largest


def close(got, want):
    return torch.allclose(got.double(), want.double(), rtol=EXACT, atol=EXACT)


def near(got, want):
    return got == pytest.approx(want, rel=EXACT, abs=EXACT)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_step_is_that_of_two_passes(ranks, tmp_path, layout):
    cases = [case.words(tmp_path) for case in CASES if case.layout == layout]
    for rank in ranks.run(compare, layout, cases, make_data(), *training_cases.weights()):
        for wrong, one, two, metrics, largest in rank:
            assert wrong == []
            assert (one, two) == (0, 1), "forward-only passes for log π_old"
            assert metrics > 40
            assert largest > 1e-3


def test_the_cases_are_not_vacuous():
    for names in itertools.combinations(("packed", "per_token_loss", "size"), 2):
        met = {tuple(getattr(case, name) for name in names) for case in CASES}
        assert len(met) == 4, names
    assert {case.name for case in CASES} == set(OBJECTIVES)


NORMALISED = Case(Layout(cp=2), "ppo normalised", packed=True, per_token_loss=False, size=16)


def compare_wrongly(words, data, old, new):
    """As ``compare_one``, with D₀ in the place of G."""
    from megatron_rc.training.in_loss import InLossPlan

    right = InLossPlan.gradient_factor

    def wrong(plan, header, mini_batch):
        header, factor = right(plan, header, mini_batch)
        return header, torch.ones_like(factor)

    with mock.patch.object(InLossPlan, "gradient_factor", wrong):
        return compare_one(words, data, old, new)


def test_a_wrong_factor_is_seen(ranks, tmp_path):
    arguments = NORMALISED.words(tmp_path)
    for wrong, *_ in ranks.run(compare_wrongly, NORMALISED.layout, arguments, make_data(), *training_cases.weights()):
        assert any(name.startswith("gradient") for name in wrong)
        assert "loss/total" in wrong
        assert "weights" not in wrong


def numbers_of_the_step(words, data, old, new):
    """What was decided, and the collectives of the step."""
    with in_float64():
        _, metrics, _, _, calls = step(words, data, old, new)
    return metrics, calls


def test_the_data_are_not_vacuous_and_gspo_sends_one_sum_a_micro_batch(ranks, tmp_path):
    case = Case(Layout(cp=2), "gspo", packed=False, per_token_loss=False, size=8)
    arguments = case.words(tmp_path)
    for metrics, calls in ranks.run(
        numbers_of_the_step, case.layout, arguments, make_data(), *training_cases.weights()
    ):
        assert 0.1 < metrics["rollout_corr/rollout_rs_masked_fraction"] < 0.9
        assert 0.1 < metrics["rollout_corr/rollout_is_ratio_fraction_high"] < 0.9
        assert metrics["rollout_corr/rollout_rs_masked_fraction_reward_negative"] > 0
        assert metrics["policy/abs_log_ratio"] == metrics["policy/clip_fraction_high"] == 0
        assert [kind for kind, *_ in calls] == ["SUM"] * (SEQUENCES // 8) + ["SUM", "MAX"]


# The choice

NORMALISED_WITH = "--rollout-is-batch-normalize with --grpo-kl-beta"
NEEDED = {
    "--always-score": "--always-score",
    "--grpo-iterations=2": "2 optimizer steps",
    "--global-batch-size=8": "2 optimizer steps",
    "--rollout-rs=group_any,token_k1 --rollout-rs-threshold=0.5_2.5": "--rollout-rs group_any",
    "--rollout-is-batch-normalize --grpo-kl-beta=0.1": NORMALISED_WITH,
    "--rollout-is-batch-normalize --grpo-kl-beta=0 --grpo-entropy-term-weight=0.1": "--grpo-entropy-term-weight",
    "--num-experts=4 --moe-aux-loss-coeff=0.1": "auxiliary losses",
    "--kl-in-reward=0.1 --grpo-kl-beta=0": "--kl-in-reward 0.1",
    "--advantage-scope=accepted": "--advantage-scope accepted",
    "--advantage-baseline=weighted": "--advantage-baseline weighted",
    "--advantage-estimator=optimal-token-baseline": "optimal-token-baseline needs π_old",
    "--advantage-estimator=gae": "--correct-values mask",
    "--advantage-estimator=gae --correct-values=none --num-critic-only-steps=1": "--num-critic-only-steps 1",
    "--save-rollouts=records --save-log-probs": "--save-log-probs",
}
NOT_NEEDED = (
    *("", "--rollout-is-batch-normalize --grpo-kl-beta=0", "--advantage-estimator=gae --correct-values=none"),
    "--num-experts=4 --moe-aux-loss-coeff=0.1 --rejection-denominator=original",
    *("--rollout-correction-preset=disabled", "--bad-log-probs=reject_token", "--rollout-staleness=1"),
)


def choice(folder, *more):
    return run_config(flags(folder, "--grpo-iterations=1", *more))


@pytest.mark.parametrize("more", NEEDED)
def test_a_pass_that_is_needed_is_made_and_said(tmp_path, more):
    config = choice(tmp_path, *more.split())
    assert not is_one_pass(config)
    sentence = scoring_in_words(config)
    assert sentence.startswith("a forward-only pass scores each rollout batch: ")
    assert NEEDED[more] in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize("more", NOT_NEEDED)
def test_else_none_is_made(tmp_path, more):
    config = choice(tmp_path, *more.split())
    assert why_scored(config) is None
    assert is_one_pass(config)
    assert "no forward-only pass: each rollout batch makes one optimizer step" in scoring_in_words(config)


@pytest.mark.parametrize("mode", ["--bypass-mode", "--proximal-interpolation"])
def test_other_modes_need_none_and_cannot_be_told_to_score(tmp_path, mode):
    config = choice(tmp_path, mode, "--always-score")
    assert not is_one_pass(config)
    assert mode in scoring_in_words(config)
    assert not config.rollouts.always_score
    assert config.unused[0].startswith("--always-score ")


def test_layers_in_fp8_keep_the_pass(tmp_path):
    config = choice(tmp_path)
    megatron = dataclasses.replace(config.megatron, given=config.megatron.given | {"fp8": "hybrid"})
    assert "layers in hybrid" in str(why_scored(dataclasses.replace(config, megatron=megatron)))
