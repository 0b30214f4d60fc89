"""What the doctor says, proposes and ends with."""

import dataclasses
import functools
import json
import math
import runpy
import sys
from itertools import pairwise

import pytest
import yaml

from megatron_rc import RolloutCorrectionConfig
from megatron_rc.doctor.__main__ import main
from megatron_rc.doctor.advice import Choice, effect, geometric_bound, mean_log_ratios
from megatron_rc.doctor.inputs import Evidence
from megatron_rc.doctor.measure import facts_of_batch
from megatron_rc.doctor.programs import SETTINGS_OF, WORDS
from megatron_rc.doctor.report import as_json, examine, in_words
from megatron_rc.doctor.rules import RULES
from megatron_rc.doctor.sampled import Sampled
from tests.doctor.test_inputs import metrics_of, write_lines
from tests.settings.test_flags import from_line
from tests.support.made_faults import made


@functools.cache
def report_of(fault):
    sampled = Sampled(**made(fault, 5))
    return examine(Evidence("made", facts_of_batch(sampled), sampled))


@pytest.mark.parametrize(
    ("fault", "preset", "code"),
    [
        (None, "decoupled_token_is", 0),
        ("temperature 0.7", "disabled", 1),
        ("top_p 0.8", "disabled", 1),
        ("tails", "decoupled_token_icepop", 1),
        ("fp8", "decoupled_geo_rs_token_tis", 1),
        ("int4", "disabled", 1),
        ("staleness", "decoupled_geo_rs_token_tis", 1),
    ],
)
def test_proposal_and_exit_code(fault, preset, code):
    report = report_of(fault)
    assert report.choice.preset == preset
    assert report.code == code
    assert report.effects[0].choice is report.choice
    # Each correction once.
    configs = [candidate.choice.config() for candidate in report.effects]
    assert all(config not in configs[:index] for index, config in enumerate(configs))


def test_the_proposed_flags_are_the_proposed_correction():
    for fault in (None, "tails", "fp8"):
        choice = report_of(fault).choice
        assert from_line(choice.flags()) == choice.config()


def test_the_proposed_bound_keeps_95_percent_of_the_sequences():
    sampled = Sampled(**made("fp8", 5))
    lower, upper = map(float, geometric_bound(sampled).split("_"))
    means = mean_log_ratios(sampled).exp()
    accepted_share = float(((means >= lower) & (means <= upper)).double().mean())
    assert 0.95 <= accepted_share <= 0.97
    chosen = report_of("fp8").effects[0]
    assert math.isclose(1 - chosen.rejected_sequences, accepted_share, abs_tol=1e-9)


def test_effects_are_the_librarys_own_numbers():
    """Of 64 sequences the one whose ratio is e^0.5 a token is rejected by the geometric mean alone."""
    batch = made(None, 5)
    batch["old_log_probs"][0] = batch["rollout_log_probs"][0] - 0.5
    report = examine(Evidence("made", facts_of_batch(Sampled(**batch)), Sampled(**batch)))
    choice = dataclasses.replace(report.choice, preset="decoupled_geo_rs", arguments={"rs_threshold": "0.7_1.4"})
    measured = effect(choice, Sampled(**batch))
    assert math.isclose(measured.rejected_sequences, 1 / 64)
    tokens = batch["response_mask"].sum(dim=1)
    assert math.isclose(measured.rejected_tokens, int(tokens[0]) / int(tokens.sum()), rel_tol=1e-9)
    # One definition, in replay too: rejected tokens could have counted, and have weight 0.
    assert math.isclose(measured.eff_sample_size, 1 - measured.rejected_tokens, rel_tol=1e-9)


def test_the_text_says_what_is_wrong_why_and_what_to_do():
    text = in_words(report_of("temperature 0.7"))
    for phrase in (
        "How far apart",
        "1. another temperature (temperature)",
        "as if the engine's temperature were 0.7",
        "Do: score with the temperature",
        "--rollout-correction-preset disabled",
    ):
        assert phrase in text
    assert "nan" not in text
    assert "nothing wrong between engine and trainer" in in_words(report_of(None))


def test_without_the_trainers_log_probs_the_flag_is_named(tmp_path, capsys):
    lines = [{"rollout_log_probs": [-1.0, -2.0]}]
    assert main([str(write_lines(tmp_path / "b.jsonl", lines))]) == 3
    printed = capsys.readouterr().out
    assert "--save-log-probs" in printed
    assert "not known: the log-probs of the trainer are missing" in printed


def test_json_is_one_object_of_finite_numbers(tmp_path, capsys):
    path = write_lines(tmp_path / "metrics.jsonl", [{"step": 1, **metrics_of("int4")}])
    assert main([str(path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert report["exit_code"] == 1
    assert [verdict["name"] for verdict in report["verdicts"]] == ["precision"]
    assert report["proposal"]["preset"] == "disabled"
    assert report["facts"]["k3_kl"] == pytest.approx(metrics_of("int4")["rollout_corr/k3_kl"])
    assert "shift" in report["not_looked_at"]
    json.dumps(as_json(report_of("shift")), allow_nan=False)


def test_the_module_ends_with_the_code(tmp_path, monkeypatch, capsys):
    """As ``python -m`` runs it, without a second Python."""
    path = write_lines(tmp_path / "metrics.jsonl", [{"step": 1, **metrics_of("int4")}])
    monkeypatch.delitem(sys.modules, "megatron_rc.doctor.__main__")
    monkeypatch.setattr(sys, "argv", ["doctor", str(path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("megatron_rc.doctor", run_name="__main__")
    assert ended.value.code == 1
    assert capsys.readouterr().err == ""


LINES = {
    "verl": 'algorithm:\n  rollout_correction:\n    rollout_is: "token"\n    rollout_is_threshold: 1.5',
    "slime": "--use-tis --tis-clip 1.5",
    "nemo-rl": "loss_fn:\n  use_importance_sampling_correction: true\n",
    "megatron_rc": "--rollout-correction-preset decoupled_token_is --rollout-is-threshold 1.5",
}


def metrics_as(program):
    """Metrics of a healthy batch under each program's names."""
    metrics = metrics_of(None)
    if program == "slime":
        # The rules need no more of slime's names than these, and the quantile for the bound.
        names = {"train/mis_k3_kl": "rollout_corr/k3_kl", "train/mis_kl": "rollout_corr/kl"}
        return {name: metrics[ours] for name, ours in names.items()} | {"mismatch_log_ratio_p99": 0.01}
    if program == "nemo-rl":
        return {"train/gen_kl_error": 1e-4, "train/token_mult_prob_error": 1.01}
    return metrics | ({"actor/grad_norm": 1.0} if program == "verl" else {"rollout/response_length": 9.0})


@pytest.mark.parametrize("program", LINES)
def test_advice_is_in_the_words_of_the_program_that_wrote_the_input(tmp_path, capsys, program):
    path = write_lines(tmp_path / "m.jsonl", [{"step": 1, **metrics_as(program)}])
    assert main([str(path), "--json"]) == 0
    proposal = json.loads(capsys.readouterr().out)["proposal"]
    assert proposal["program"] == program
    expected_line = LINES[program]
    if program == "nemo-rl":  # which has no percentiles, so that the bound is another
        assert proposal["settings"].startswith(expected_line)
    else:
        assert proposal["settings"] == expected_line
    assert main([str(path)]) == 0
    assert proposal["settings"].splitlines()[0] in capsys.readouterr().out
    assert main([str(path), "--json", "--dialect", "verl"]) == 0
    assert "rollout_correction:" in json.loads(capsys.readouterr().out)["proposal"]["settings"]
    assert main([str(path), "--dialect", "verl2"]) == 2
    assert capsys.readouterr().err.startswith("--dialect='verl2' is unknown")


NOT_THE_SAME = {
    # slime divides by the tokens before rejection, NeMo-RL does not truncate the weights of what it keeps.
    ("slime", "decoupled_geo_rs_token_tis"): {"rejection_denominator"},
    ("nemo-rl", "decoupled_geo_rs_token_tis"): {"rejection_denominator", "rollout_is_threshold"},
}


@pytest.mark.parametrize(
    "choice",
    [
        Choice("disabled", ""),
        Choice("decoupled_token_is", "", {"threshold": 1.5}),
        Choice("decoupled_token_icepop", ""),
        Choice("decoupled_seq_is", "", {"threshold": 2.0}),
        Choice("decoupled_geo_rs_token_tis", "", {"is_threshold": 3.0, "rs_threshold": "0.8_1.25"}),
    ],
    ids=lambda choice: choice.preset,
)
@pytest.mark.parametrize("program", SETTINGS_OF)
def test_lines_of_other_programs_are_read_as_the_preset(program, choice):
    """By the reader of the program's settings; the only differences are those that a comment of the lines names."""
    lines = choice.settings(program)
    if lines[0].startswith("--"):
        arguments = lines[0].split()
        fields = {word: True for word in arguments if word.startswith("--")}
        for name, value in pairwise(arguments):
            if name.startswith("--") and not value.startswith("--"):
                fields[name] = value if name.endswith("path") else float(value)
    else:
        fields = yaml.safe_load("\n".join(lines))
        if program == "slime":
            # Without a setting of its own slime makes no correction, and there is nothing to read.
            fields = {"use_tis": fields is not None} | (fields or {})
    read = RolloutCorrectionConfig.from_dict(fields, program)
    expected = choice.config()
    names = ["rollout_is", *(["rollout_is_threshold"] if expected.rollout_is_apply else [])]
    if expected.criteria:
        names += ["rejection_denominator"]
    different = {name for name in names if getattr(read, name) != getattr(expected, name)}
    if choice.preset == "disabled":
        assert read.rollout_is is None
        return
    assert different == NOT_THE_SAME.get((program, choice.preset), set())
    for criterion, expected_criterion in zip(read.criteria, expected.criteria, strict=True):
        assert (criterion.lower, criterion.upper) == pytest.approx(
            (expected_criterion.lower, expected_criterion.upper), abs=1e-6
        )
    assert bool(different) == (lines[-1].startswith("#") and choice.preset == "decoupled_geo_rs_token_tis")


def test_advice_names_the_programs_own_settings(tmp_path, capsys):
    batch = made("temperature 0.7", 5)
    verl = {name: batch[name].tolist() for name in ("rollout_log_probs", "old_log_probs", "response_mask")}
    assert main([str(write_lines(tmp_path / "b.jsonl", [verl]))]) == 1
    printed = capsys.readouterr().out
    assert "actor_rollout_ref.rollout.temperature" in printed
    assert "--rl-default-temperature" not in printed
    for rule in RULES:
        assert all(rule.advice_in(dialect) for dialect in WORDS)
