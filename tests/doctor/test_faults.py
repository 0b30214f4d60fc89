"""Each fault is recognised on data that are made to have it, and nothing is found on healthy data."""

import dataclasses
import math
import random

import pytest
import torch

from benchmarks.study.results import read
from benchmarks.study.settings import BONUS
from megatron_rc import SamplingParams
from megatron_rc.doctor.advice import Choice, effect
from megatron_rc.doctor.facts import Facts
from megatron_rc.doctor.measure import facts_of_batch
from megatron_rc.doctor.rules import BY_NAME, RULES, judge, not_looked_at
from megatron_rc.doctor.sampled import Sampled
from megatron_rc.doctor.series import facts_of_series
from megatron_rc.doctor.tables import own_rows
from tests.support.exported_runs import exported, verdicts
from tests.support.made_faults import FAULTS, Setting, made
from tests.support.made_runs import drifting_run, healthy_run, study_rows, with_steps
from tests.support.paths import ROOT

# Many words and open choices, or few words and sure ones.
SETTINGS = (
    Setting(),
    Setting(sequences=48, length=64, vocab=96, sharpness=5.0),
)


def found(batch):
    return [verdict.rule.name for verdict in judge(facts_of_batch(Sampled(**batch)))]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: f"{setting.sequences}x{setting.length}")
def test_the_first_verdict_is_the_made_fault(fault, setting):
    assert found(made(fault, 7, setting))[:1] == [FAULTS[fault][0]]


@pytest.mark.parametrize("seed", range(24))
def test_nothing_is_found_on_healthy_data(seed):
    """benchmarks/doctor.py does the same 200 times; docs/doctor.md has its figure."""
    setting = Setting(
        sequences=(8, 32, 64)[seed % 3],
        length=(16, 48, 96)[seed % 4 % 3],
        vocab=(64, 256)[seed % 2],
        noise=("bf16", "none")[seed % 5 == 0],
        sharpness=(1.0, 3.0, 6.0)[seed % 7 % 3],
    )
    assert found(made(None, 100 + seed, setting)) == []


def test_a_few_tokens_are_not_judged():
    """A hundred tokens say nothing of temperatures and truncation, and copies of few responses no more than they."""
    setting = Setting(sequences=4, length=24)
    for fault in ("temperature 0.7", "top_p 0.9", "raw at 1.3", "shift"):
        assert FAULTS[fault][0] not in found(made(fault, 3, setting))
    batch = made("shift", 3, Setting(sequences=4, length=48))
    copies = {name: value.repeat_interleave(64, dim=0) for name, value in batch.items()}
    assert facts_of_batch(Sampled(**copies))["num_tokens"] > 4096
    assert "shift" not in found(copies)


def test_the_engine_may_be_sure_of_all_its_tokens():
    zeros = torch.zeros(40, 32)
    assert found({"rollout_log_probs": zeros - 1e-6, "old_log_probs": zeros - 1e-6, "response_mask": zeros == 0}) == []


@pytest.mark.parametrize("value", [math.nan, -math.inf, 0.5])
def test_unusable_log_probs_come_first(value):
    batch = made("temperature 0.7", 1)
    batch["rollout_log_probs"][3, 2] = value
    assert found(batch)[0] == "unusable"
    batch["response_mask"][3, 2] = False
    assert "unusable" not in found(batch)


def test_log_probs_that_were_never_filled_are_unusable():
    batch = made(None, 1)
    batch["rollout_log_probs"][5] = 0.0
    batch["response_mask"][5] = True
    batch["old_log_probs"][5] = -1.0
    assert found(batch)[0] == "unusable"
    # The likeliest token is all that a nucleus may hold.
    batch["old_log_probs"][5] = -0.2
    assert "unusable" not in found(batch)
    without = Sampled(**batch | {"old_log_probs": None})
    assert [verdict.rule.name for verdict in judge(facts_of_batch(without))] == ["unusable"]


def with_far_tokens(seed, far_tokens):
    """24 healthy responses of 150 confident tokens; ``far_tokens`` of every second one are 1.5 nats off."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -0.02 * torch.rand(24, 150, generator=generator)
    old = (rollout + 0.0005 * torch.randn(24, 150, generator=generator)).clamp(max=0)
    old[::2, 70 : 70 + far_tokens] -= 1.5
    return {"rollout_log_probs": rollout, "old_log_probs": old, "response_mask": torch.ones(24, 150) > 0}


@pytest.mark.parametrize("seed", range(3))
def test_a_few_far_tokens_make_no_stale_cache(seed):
    """One far token of a confident position counted like fifty."""
    for far_tokens in (1, 3):
        assert found(with_far_tokens(seed, far_tokens)) == ["tails"]
    assert found(with_far_tokens(seed, 75))[0] == "stale_cache"


def test_the_advice_on_far_tokens_fits_a_batch_with_one_in_every_response():
    """An end token that the trainer does not expect: rejecting responses would leave nothing of the batch."""
    batch = with_far_tokens(0, 0)
    batch["old_log_probs"][:, -1] -= 6.0
    sampled = Sampled(**batch)
    (verdict,) = judge(facts_of_batch(sampled))
    assert verdict.rule.name == "tails"
    assert effect(Choice("trust_region_masking", ""), sampled).rejected_sequences == 1
    assert effect(Choice("decoupled_token_icepop", ""), sampled).eff_sample_size > 0.9
    first_advice, _, second_advice = verdict.rule.advice.partition("if few responses have such a token")
    assert "decoupled_token_icepop" in first_advice
    assert "trust_region_masking" in second_advice
    assert "another end token" in second_advice


def with_sampling(**sampling):
    return Sampled(**made(None, 2), sampling=SamplingParams(**sampling))


def test_the_record_says_how_was_sampled():
    """Raw log-probs at top-p look like the policy's: only the record tells."""
    assert judge(facts_of_batch(with_sampling())) == []
    for sampling in ({"top_p": 0.9}, {"top_k": 50}):
        (verdict,) = judge(facts_of_batch(with_sampling(**sampling)))
        assert verdict.rule.name == "truncated_sampling"
    (verdict,) = judge(facts_of_batch(with_sampling(temperature=0.6, log_probs_mode="raw")))
    assert verdict.rule.name == "log_prob_mode"
    assert judge(facts_of_batch(with_sampling(temperature=1.0, log_probs_mode="raw"))) == []
    assert judge(facts_of_batch(with_sampling(temperature=0.6))) == []
    # Without the trainer's log-probs that is all that can be said.
    facts = facts_of_batch(dataclasses.replace(with_sampling(top_p=0.9), old_log_probs=None))
    assert [verdict.rule.name for verdict in judge(facts)] == ["truncated_sampling"]
    assert {"precision", "shift", "temperature"} <= {rule.name for rule in not_looked_at(facts)}


def row(batch, **fields):
    """What a run logs of a batch."""
    return exported(batch, {"rollout_is": "token", **fields})


def from_rows(rows, settings=None):
    return list(verdicts(rows, settings))


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"training/rollout_probs_diff_mean": 0.004}, []),
        ({"training/rollout_probs_diff_mean": 0.03}, ["precision"]),
        ({"training/rollout_probs_diff_mean": 0.0, "training/rollout_probs_diff_valid": 0, "rollout_corr/kl": 0.0}, []),
        ({"train/token_mult_prob_error": 1.02, "train/gen_kl_error": 4e-4}, []),
        ({"train/gen_kl_error": 0.02, "train/token_mult_prob_error": 1.3}, ["precision"]),
        ({"train/gen_kl_error": 0.02, "train/avg_trajectory_age": 1.0}, ["staleness"]),
        ({"train/mismatch_k3_kl": 0.02}, ["precision"]),
        ({"mismatch/mismatch_k3_kl": 0.02}, ["precision"]),
        ({"train/train_rollout_logprob_abs_diff": 0.2}, ["precision"]),
        ({"rollout_corr/kl": -0.2}, ["precision"]),
        ({"rollout_corr/rollout_is_veto_fraction": 0.2}, ["veto"]),
        ({"mismatch/rollout_is_std": 1.2}, ["wide_weights"]),
        ({"mismatch/rollout_is_eff_sample_size": 0.2}, ["wide_weights"]),
        ({"mismatch/rollout_is_mean": 0.4}, ["mean_weight"]),
        ({"mismatch/rollout_is_mean": 2.4}, ["mean_weight"]),
        ({"mismatch/k3_kl": 4e-3, "mismatch/staleness_0_kl": 1e-3, "mismatch/staleness_3_kl": 8e-3}, ["staleness"]),
        ({"mismatch/k3_kl": 4e-3, "mismatch/staleness_0_kl": 1e-3, "mismatch/staleness_3_kl": 1e-3}, ["precision"]),
        ({"rollout_corr/k3_kl": 0.004, "rollout/staleness_mean": 2.0}, ["staleness"]),
        ({"rollout_corr/k3_kl": 0.001, "rollout/staleness_mean": 2.0}, []),
    ],
)
def test_one_step_of_any_program(metrics, expected):
    assert from_rows([{"step": 1, **metrics}]) == expected


def test_numbers_that_nobody_knows_are_not_told():
    """Metrics of a run do not say how far the tokens of each version are off."""
    (verdict,) = judge(Facts(k3_kl=0.074, staleness_mean=1.0))
    assert verdict.words == "mean staleness 1 steps; k3 0.074"
    (verdict,) = judge(facts_of_batch(Sampled(**made("staleness", 7))))
    assert verdict.words.startswith("tokens of older weights")


def growing_rows(length, chi2):
    """Metrics of a run whose responses and χ² of sequences grow by these factors a step."""
    common = {"rollout_corr/k3_kl": 1e-3}
    return [
        common | {"rollout/response_length": 100 * length**step, "rollout_corr/chi2_seq": 0.5 * chi2**step}
        for step in range(15)
    ]


def test_growing_responses():
    assert from_rows(growing_rows(1.05, 1.2)) == ["growing_length"]
    assert from_rows(growing_rows(1.0, 1.2)) == []
    assert from_rows(growing_rows(1.05, 1.0)) == []
    assert from_rows(growing_rows(1.05, 1.2)[:8]) == []


def test_policies_that_drift_apart():
    """k3 that grows 150-fold, and stays below what rounding to bfloat16 leaves, while the reward falls."""

    def steps(growth, fall):
        for step in range(1, 121):
            part = max(0.0, step - 60) / 60
            yield {
                "step": step,
                "rollout_corr/k3_kl": 1e-5 * growth**part,
                "reward/mean": 0.8 - fall * part + 0.01 * (step % 3),
            }

    (verdict,) = judge(facts_of_series(own_rows(steps(150, 0.5), "here")[0]))
    assert verdict.rule.name == "drift"
    assert 60 < verdict.numbers["drift_since"] < 75
    assert "since step" in verdict.words
    assert "reward 0.3" in verdict.words
    assert "effective sample size" not in verdict.words
    assert from_rows(steps(150, 0.0)) == []
    assert from_rows(steps(5, 0.5)) == []
    assert from_rows(list(steps(150, 0.5))[:29]) == []


@pytest.mark.parametrize("steps_a_batch", [1, 4])
def test_of_40_healthy_runs_at_most_two_have_a_verdict(steps_a_batch):
    """Rewards that repeat in the rows of a batch have no noise from row to row; batch to batch they have."""
    alarms = [seed for seed in range(40) if from_rows(with_steps(healthy_run(seed), steps_a_batch))]
    assert len(alarms) <= 2, alarms


@pytest.mark.parametrize("seed", range(10))
def test_healthy_runs_do_not_drift_and_made_drifts_are_found(seed):
    """benchmarks/doctor.py does the same with 1,000 runs; docs/doctor.md has its figures."""
    assert from_rows(healthy_run(seed)) == []
    rows, begin = drifting_run(seed, growth=500.0)
    if len(rows) < 100:
        return  # a few steps behind its beginning are not enough
    (verdict,) = (
        candidate for candidate in judge(facts_of_series(own_rows(rows, "here")[0])) if candidate.rule.name == "drift"
    )
    assert abs(verdict.numbers["drift_since"] - begin) < 0.3 * len(rows)


def test_drift_in_the_runs_of_the_study():
    """A temperature that rises every step is a drift, and an engine that is the trainer is none."""
    verdicts = {"none": set(), "temperature": set()}
    for run in read(ROOT / "docs" / "study.json"):
        if run.setting == BONUS.name and run.mismatch in verdicts and run.correction != "bypass":
            verdicts[run.mismatch].add("drift" in from_rows(study_rows(run)))
    assert verdicts == {"none": {False}, "temperature": {True}}


def test_products_over_long_responses():
    long = made(None, 4, Setting(sequences=32, length=128, vocab=64, noise="int8"))
    metrics = row(long, rollout_is="sequence", rollout_is_threshold=1000.0)
    assert from_rows([metrics]) == []
    metrics |= {"rollout_corr/rollout_is_eff_sample_size": 0.2}
    assert from_rows([metrics]) == ["long_products"]
    assert from_rows([metrics | {"rollout_corr/chi2_token": 2.0}]) == ["wide_weights"]


def test_a_threshold_that_cuts_half_of_the_batch():
    batch = made(None, 4)
    metrics = row(batch, rollout_rs="seq_mean_k1", rollout_rs_threshold="0.9999_1.0001")
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] > 0.5
    assert from_rows([metrics]) == ["threshold_cuts_half"]
    assert from_rows([row(batch, rollout_rs="seq_mean_k1", rollout_rs_threshold="0.9_1.1")]) == []
    masked = row(made("int4", 4), rollout_is_threshold="0.99_1.01")
    assert from_rows([masked]) == ["precision", "threshold_cuts_half"]


def test_gspo_beside_sequence_weights():
    metrics = row(made(None, 4))
    settings = {"policy-loss": "gspo", "rollout-is": "sequence", "rollout-is-apply": "true"}
    assert from_rows([metrics], settings) == ["gspo_with_sequence_weights"]
    for changes in ({"policy-loss": "ppo_clip"}, {"rollout-is": "geometric"}, {"rollout-is-apply": "false"}):
        assert from_rows([metrics], settings | changes) == []


def entropies(*levels):
    """Rows of a run whose entropy stays at each of these for 20 steps, with small token weights."""
    metrics = {"rollout_corr/k3_kl": 1e-4, "rollout_corr/rollout_is_applied_mean": 0.7}
    return [metrics | {"policy/entropy": level} for level in levels for _ in range(20)]


def test_an_entropy_bonus_beside_small_token_weights():
    settings = {"grpo-entropy-term-weight": "0.04", "rollout-is": "token", "rollout-is-apply": "true"}
    assert from_rows(entropies(2.0, 0.6, 1.2), settings) == ["entropy_bonus"]
    for change in (
        {"grpo-entropy-term-weight": "0.0"},
        {"grpo-entropy-term-weight": "none"},
        {"rollout-is": "sequence"},
        {"rollout-is-apply": "false"},
    ):
        assert from_rows(entropies(2.0, 0.6, 1.2), settings | change) == []
    assert from_rows(entropies(2.0, 0.6, 1.2)) == []
    for levels in ((2.0, 0.6, 1.0), (1.2, 1.2, 1.2), (2.0, 0.1, 0.25), (0.6,), (2.0, 0.0, 1.2)):
        assert from_rows(entropies(*levels), settings) == []
    full = [row | {"rollout_corr/rollout_is_applied_mean": 0.95} for row in entropies(2.0, 0.6, 1.2)]
    assert from_rows(full, settings) == []


def inclusion(shortest, longest, started, **ends):
    """Rows of ten batches with these metrics of the selection."""
    rates = {"inclusion_shortest": shortest, "inclusion_longest": longest, "started": started}
    row = {"rollout_corr/kl": 0.0} | {f"selection/{name}": value for name, value in (rates | ends).items()}
    return [row | {"step": step, "reward/mean": step} for step in range(1, 11)]


def test_long_responses_that_are_left_out_are_a_selection():
    ends = {"bad": 0, "replaced": 0, "overlong": 24, "rejected": 6}
    (verdict,) = judge(facts_of_series(own_rows(inclusion(0.95, 0.2, 128, **ends), "here")[0]))
    assert verdict.rule.name == "length_selection"
    assert "quarter of the responses 20% train, of the shortest 95%; of 128 started" in verdict.words
    assert "24 overlong and 6 rejected" in verdict.words
    # Short ones that are left out, equal shares, and shares of few responses.
    for rates in ((0.2, 0.95, 128), (0.9, 0.5, 4096), (0.02, 0.02, 128), (1, 1, 8), (0, 0, 8), (0.5, 0.2, 16)):
        assert from_rows(inclusion(*rates)) == []


@pytest.mark.parametrize("seed", range(10))
def test_no_selection_is_found_if_chance_alone_leaves_responses_out(seed):
    dice = random.Random(seed)
    for _ in range(20):
        quarter = dice.choice([1, 4, 16, 128])
        rate = dice.choice([0.02, 0.1, 0.5, 0.9])
        shares = [[sum(dice.random() < rate for _ in range(quarter)) / quarter for _ in "sl"] for _ in range(10)]
        batches = []
        for step, (shortest, longest) in enumerate(shares):
            batches.append(inclusion(shortest, longest, 4 * quarter)[0] | {"step": step, "reward/mean": step})
        assert from_rows(batches) == []


def signals(rewards, shares):
    for step, (reward, share) in enumerate(zip(rewards, shares, strict=True), start=1):
        metrics = {"rollout_corr/kl": 0.0, "reward/mean": reward, "reward/nonzero_advantages": share}
        yield {"step": step} | metrics


# A run of six steps of 16 responses that ended far below its start.
FALLEN = (0.375, 0.125, 0, 0.125, 0, 0)
ALIKE = (0.5, 0.5, 0, 0.5, 0, 0)


@pytest.mark.parametrize("factor", [1, 10])
def test_a_reward_that_falls_to_nothing_in_steps_without_signal_is_a_collapse(factor):
    rewards, shares = (tuple(value for value in values for _ in range(factor)) for values in (FALLEN, ALIKE))
    (verdict,) = judge(facts_of_series(own_rows(signals(rewards, shares), "here")[0]))
    assert verdict.rule.name == "collapse"
    assert "% of the last batches no response has an advantage" in verdict.words
    advice = verdict.rule.advice_in("megatron_rc")
    assert all(
        flag in advice for flag in ("--grpo-prompts-per-step", "--dynamic-sampling", "--lr-warmup-iters", "--lr")
    )
    # A fall with a signal, steps that are alike since all answers are right, tasks that were never solved, a short run.
    assert from_rows(signals(rewards, [0.5] * len(shares))) == []
    assert from_rows(signals([1 - reward for reward in rewards], shares)) == []
    assert from_rows(signals([0.0] * len(rewards), shares)) == []
    assert from_rows(list(signals(rewards, shares))[:5]) == []


def test_every_rule_is_complete_and_silent_without_numbers():
    assert judge(Facts()) == []
    assert not_looked_at(Facts()) == list(RULES)
    for rule in RULES:
        assert min(len(rule.sources), len(rule.advice), len(rule.needs)) > 0
        assert set(rule.unless) <= set(BY_NAME)
        rule.words.format_map(Facts())
