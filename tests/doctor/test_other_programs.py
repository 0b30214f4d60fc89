"""Metrics and records of other programs, under the names that their code writes; each verdict against the truth."""

import csv
import json
import math

import pytest
import torch

from megatron_rc.doctor.__main__ import main
from megatron_rc.doctor.inputs import read_evidence
from megatron_rc.doctor.measure import facts_of_batch
from megatron_rc.doctor.report import as_json, examine
from megatron_rc.doctor.rules import judge
from megatron_rc.doctor.sampled import Sampled
from tests.doctor.test_inputs import write_lines
from tests.support.made_faults import made, pick
from tests.support.tables import table


def report_of(path):
    return as_json(examine(read_evidence(path)))


def write_csv(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def steps(number, **metrics):
    return [{"step": step, **metrics} for step in range(1, number + 1)]


# -- Metrics of twelve equal steps.
#
# slime: model.py writes train/<name of loss.py>, mis.py puts mis_ before the names of its metrics. The shares below and
# above its bounds are added. ``tis`` is the mean of exp(old - rollout) before any bound, ``tis_clipfrac`` counts both.
# NeMo-RL: loss_functions.py; sampling_importance_ratio is the mean of the weights behind all bounds, and no mean ρ. The
# first row has the numbers of NeMo-RL#2269, whose weights left no gradient. Its IcePop gives most tokens weight 0.
# TRL: its default masks products over responses. A mean of 0.3 is the wrong level beside a near engine, and no fault.
# prime-rl: train.py writes <tensor>/mean of each tensor. verl: the Pearson correlation of verl-omni#254.
METRICS = """
train/mis_k3_kl: 5, train/mis_rs_catastrophic_seq_fraction: 0.9, train/train_rollout_logprob_abs_diff: 0.05
    | 1 | precision veto | rollout_is_veto_fraction: 0.9
train/mis_k3_kl: 0.0001, train/mis_rs_mask_fraction_low: 0.3, train/mis_rs_mask_fraction_high: 0.4
    | 1 | threshold_cuts_half | rollout_rs_masked_fraction: 0.7
train/tis: 0.99, train/tis_clipfrac: 0.6, train/train_rollout_logprob_abs_diff: 0.01
    | 1 | threshold_cuts_half | ratio_mean: 0.99
train/gen_kl_error: 0.0027, train/token_mult_prob_error: 1.024, train/sampling_importance_ratio: 0.0596
    | 1 | precision mean_weight | rollout_is_mean: 0.0596, ratio_mean: null
train/gen_kl_error: 0.001, train/token_mult_prob_error: 1.024, train/sampling_importance_ratio: 0.0596
    | 1 | long_products mean_weight | rollout_is_mean: 0.0596, ratio_mean: null
train/gen_kl_error: 0.001, train/sampling_importance_ratio: 0.35, train/is_oob_ratio: 0.65
    | 1 | threshold_cuts_half | rollout_is_mean: 0.35
sampling/sampling_logp_difference/mean: 0.01, sampling/importance_sampling_ratio/mean: 0.3
    | 0 | long_products | rollout_is_mean: 0.3
mismatch_kl/all/mean: 0.0005, mismatch_kl/all/max: 9.0, is_masked/mean: 0.01 | 0 | - | k3_kl: 0.0005
mismatch_kl/all/mean: 0.3, mismatch_kl/all/max: 9.0, is_masked/mean: 0.01 | 1 | precision | k3_kl: 0.3
rollout_corr/k3_kl: 0.02, training/off_policy/trajectory_staleness/mean: 4.0
    | 1 | staleness | staleness_mean: 4
rollout_corr/k3_kl: 0.0002, rollout_corr/rollout_is_mean: 0.35, rollout_corr/rollout_is_oob_ratio: 0.65
    | 1 | threshold_cuts_half | rollout_is_mean: 0.35
rollout_corr/k3_kl: 3.2, training/rollout_actor_probs_pearson_corr: 0.13, training/rollout_probs_diff_mean: 0.4
    | 1 | other_policy | k3_kl: 3.2
"""


@table("{metrics} code verdicts {facts}", METRICS)
def test_metrics_of_other_programs(tmp_path, metrics, code, verdicts, facts):
    report = report_of(write_csv(tmp_path / "metrics.csv", steps(12, **metrics)))
    assert report["exit_code"] == int(code)
    assert [verdict["name"] for verdict in report["verdicts"]] == verdicts.split()
    assert {name: report["facts"].get(name) for name in facts} == pytest.approx(facts)


# -- Records and files of other programs.


def test_slimes_dumps_are_records(tmp_path):
    """--save-debug-train-data has both log-probs, --save-debug-rollout-data the engine's."""
    batch = made("fp8", 5)
    counts = batch["response_mask"].sum(1).tolist()

    def rows(name):
        return [values[:count].clone() for values, count in zip(batch[name], counts, strict=True)]

    train = {
        "log_probs": rows("old_log_probs"),
        "rollout_log_probs": rows("rollout_log_probs"),
        "loss_masks": [torch.ones(count) for count in counts],
        "tokens": [torch.arange(count + 3) for count in counts],
        "response_lengths": counts,
    }
    torch.save({"rollout_id": 3, "rollout_data": train}, tmp_path / "train.pt")
    evidence = read_evidence(tmp_path / "train.pt")
    assert evidence.facts["num_tokens"] == sum(counts)
    assert [verdict.rule.name for verdict in judge(evidence.facts)] == ["precision"]
    samples = [
        {"rollout_log_probs": values.tolist(), "loss_mask": None, "reward": 1.0, "response_length": len(values)}
        for values in train["rollout_log_probs"]
    ]
    torch.save({"rollout_id": 3, "samples": samples}, tmp_path / "rollout.pt")
    assert examine(read_evidence(tmp_path / "rollout.pt")).code == 3


# -- TRL: grpo_trainer.py; transformers writes log_history into trainer_state.json.


@pytest.mark.parametrize(("difference", "code"), [(0.002, 0), (0.4, 1)])
def test_trls_trainer_state(tmp_path, difference, code):
    log = steps(
        20,
        **{
            "reward": 0.5,
            "completions/mean_length": 80.0,
            "sampling/sampling_logp_difference/mean": difference,
            "sampling/sampling_logp_difference/max": 3.0,
            "sampling/importance_sampling_ratio/mean": 0.98,
        },
    )
    state = {"epoch": 1.0, "global_step": 20, "log_history": [*log, {"step": 20, "train_runtime": 12.0}]}
    folder = tmp_path / "checkpoint-20"
    folder.mkdir()
    (folder / "trainer_state.json").write_text(json.dumps(state, indent=2))
    for path in (folder, folder / "trainer_state.json"):
        report = report_of(path)
        assert report["exit_code"] == code
        assert report["facts"]["rollout_is_mean"] == pytest.approx(0.98)
        assert "20 steps" in report["input"]
    assert examine(read_evidence(folder)).evidence.program == "trl"


def test_tensorboards_folder(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "board")) as writer:
        for step in range(20):
            writer.add_scalar("train/sampling/sampling_logp_difference/mean", 0.4, step)
    report = report_of(tmp_path / "board")
    assert [verdict["name"] for verdict in report["verdicts"]] == ["precision"]
    (file,) = (tmp_path / "board").iterdir()
    assert report_of(file)["exit_code"] == 1


# -- prime-rl: token_export.py writes a line of lists for each response.


def test_token_exports_of_prime_rl_are_responses(tmp_path):
    """40 tokens that are 10 nats apart, then 12 equal ones: no history of 52 steps with a KL of 0."""
    far = {"inference_logprobs": [-1.0] * 40, "trainer_logprobs": [-11.0] * 40, "mismatch_kl": [9.0] * 40}
    near = {"inference_logprobs": [-1.0] * 12, "trainer_logprobs": [-1.0] * 12, "mismatch_kl": [0.0] * 12}
    lines = [
        {
            "step": 1,
            "rank": 0,
            "token_ids": [5] * len(response["mismatch_kl"]),
            "loss_mask": [True] * len(response["mismatch_kl"]),
        }
        | response
        for response in (far, near)
    ]
    path = write_lines(tmp_path / "rank_0.jsonl", lines)
    report = report_of(path)
    assert report["facts"]["num_tokens"] == 52
    assert report["facts"]["kl"] == pytest.approx(10 * 40 / 52)
    assert report["exit_code"] == 1


@pytest.mark.parametrize(
    "lines",
    [
        [{"mismatch_kl": [9.0] * 40}, {"mismatch_kl": [0.0] * 12}],
        [{"token_ids": [1, 2], "rollout_corr/k3_kl": [0.1, 0.2]}],
    ],
)
def test_lists_of_tokens_are_no_steps(tmp_path, capsys, lines):
    assert main([str(write_lines(tmp_path / "m.jsonl", lines))]) == 2
    assert "has a number for each token" in capsys.readouterr().err


# -- Other inputs and other weights, of any program.


def noisy(noise, seed=0, sharpness=3.0):
    """Tokens of an engine, and a trainer whose logits have noise of this share of their spread."""
    generator = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(64, 64, 256, generator=generator)
    trainer = logits + noise * sharpness * torch.randn(64, 64, 256, generator=generator)
    engine = logits.log_softmax(-1)
    tokens = torch.distributions.Categorical(logits=engine).sample()
    old = pick(trainer.log_softmax(-1), tokens)
    return Sampled(pick(engine, tokens), torch.ones(64, 64, dtype=torch.bool), old)


@pytest.mark.parametrize(
    ("noise", "expected"), [(0.3, "precision"), (0.6, "precision"), (1, "other_policy"), (5, "other_policy")]
)
@pytest.mark.parametrize("seed", range(3))
def test_weights_that_were_never_synced_are_no_temperature(noise, expected, seed):
    torch.manual_seed(seed)
    verdicts = [verdict.rule.name for verdict in judge(facts_of_batch(noisy(noise, seed)))]
    assert verdicts[0] == expected
    assert "temperature" not in verdicts


# -- The end of a run, and single batches.


def k3_of(values):
    return [{"step": step, "rollout_corr/k3_kl": k3} for step, k3 in enumerate(values, start=1)]


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ([5e-4] * 14 + [1.5] * 4, 1),  # slime#1695: a jump after a resume
        ([5e-4] * 17 + [400.0], 1),
        ([5e-4] * 17 + [math.inf], 1),
        ([5e-4] * 6 + [400.0] + [5e-4] * 30, 0),
        ([5e-4] * 30 + [400.0, 5e-4, 400.0] + [5e-4] * 3, 1),  # two of the last ten
        ([5e-4, 400.0, 5e-4, 5e-4, 5e-4] * 6 + [5e-4] * 10, 1),  # a tenth of all
        ([5e-4] * 10 + [2.0, 2.0] + [5e-4] * 5, 1),  # two of the last ten, in a run of few different numbers
        ([5e-4, 1e-3] * 20, 0),
    ],
    ids=["last four", "last", "infinite", "one earlier", "two of ten", "a tenth", "a pair", "healthy"],
)
def test_a_limit_that_is_passed_at_the_end(tmp_path, values, code):
    path = write_lines(tmp_path / "m.jsonl", k3_of(values))
    report = report_of(path)
    assert report["exit_code"] == code
    assert [verdict["name"] for verdict in report["verdicts"]] == ["jump"] * code
    if "400" in str(values) and code == 0:
        (note,) = report["notes"]
        assert "step 7" in note
        assert "400" in note


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [
        ([5e-4] * 94 + [0.5] * 6, [5e-4] * 30, 0),  # the resumed run is sound
        ([5e-4] * 100, [5e-4] * 6 + [0.5, 5e-4, 0.5, 5e-4], 1),
    ],
)
def test_a_resumed_run_that_repeats_steps_is_judged_by_its_last_batches(tmp_path, before, after, code):
    rows = [*k3_of(before), *(row | {"step": row["step"] + 50} for row in k3_of(after))]
    report = report_of(write_lines(tmp_path / "m.jsonl", rows))
    assert report["exit_code"] == code
    assert [verdict["name"] for verdict in report["verdicts"]] == ["jump"] * code


def test_the_rows_of_one_batch_are_one_value(tmp_path):
    """A single batch of four optimizer steps is a single batch, not four of the last ten."""
    rows = [
        {"step": 4 * batch + step, "rollout_corr/k3_kl": 9.0 if batch == 3 else 5e-4, "reward/mean": 0.01 * batch}
        for batch in range(15)
        for step in range(4)
    ]
    assert report_of(write_lines(tmp_path / "m.jsonl", rows))["exit_code"] == 0
    rows = [row | {"rollout_corr/k3_kl": 9.0} if row["step"] >= 56 else row for row in rows]
    assert report_of(write_lines(tmp_path / "m.jsonl", rows))["exit_code"] == 1


# -- Proposals.


def test_two_different_policies_get_no_weights():
    """k3 of 7 nats, and responses whose sequence weights leave one of them."""
    generator = torch.Generator().manual_seed(0)
    rollout = torch.full((32, 64), -2.0)
    far = Sampled(rollout, rollout < 0, rollout - 7 * torch.rand(32, 64, generator=generator) - 4)
    report = examine(as_evidence(far))
    assert report.choice.preset == "disabled"
    log_ratio = 0.1 * torch.randn(64, 8192, generator=generator) - 0.005
    rollout = torch.full_like(log_ratio, -3.0)
    long = Sampled(rollout, rollout < 0, rollout + log_ratio)
    report = examine(as_evidence(long))
    assert report.choice.config().rollout_is == "token"
    assert report.effects[0].eff_sample_size > 0.5
    (by_sequence,) = (candidate for candidate in report.effects if candidate.choice.preset == "decoupled_seq_is")
    assert by_sequence.eff_sample_size < 0.1


def as_evidence(sampled):
    from megatron_rc.doctor.inputs import Evidence

    return Evidence("made", facts_of_batch(sampled), sampled)


def test_the_proposed_bound_is_below_the_runs_own(tmp_path):
    """The advice is to lower it: the run had 2.0."""
    metrics = {
        "rollout_corr/k3_kl": 0.05,
        "rollout_corr/chi2_token": 2.0,
        "rollout_corr/rollout_is_std": 1.3,
        "rollout_corr/log_ratio_p99": 1.5,
    }
    write_lines(tmp_path / "metrics.jsonl", steps(12, **metrics))
    (tmp_path / "config.yaml").write_text("rollout-is: token\nrollout-is-threshold: 2.0\n")
    report = report_of(tmp_path)
    assert "wide_weights" in [verdict["name"] for verdict in report["verdicts"]]
    assert report["proposal"]["arguments"] == {"threshold": 1.5}
