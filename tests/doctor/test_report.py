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
from megatron_rc.doctor.advice import effect, geometric_bound, mean_log_ratios
from megatron_rc.doctor.inputs import Evidence
from megatron_rc.doctor.measure import facts_of_batch
from megatron_rc.doctor.other_words import OWN, WORDS, settings_lines
from megatron_rc.doctor.ranges import RANGES
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
        ("int4", "decoupled_geo_rs_token_tis", 1),
        ("staleness", "decoupled_geo_rs_token_tis", 1),
    ],
)
def test_proposal_and_exit_code(fault, preset, code):
    report = report_of(fault)
    assert report.choice.preset == preset
    assert report.code == code
    assert report.effects[0].choice is report.choice
    # Each correction once.
    configs = [one.choice.config() for one in report.effects]
    assert all(config not in configs[:index] for index, config in enumerate(configs))


def test_the_proposed_flags_are_the_proposed_correction():
    for fault in (None, "tails", "int4"):
        choice = report_of(fault).choice
        assert from_line(choice.flags()) == choice.config()


def test_the_proposed_bound_keeps_95_percent_of_the_sequences():
    sampled = Sampled(**made("int4", 5))
    lower, upper = map(float, geometric_bound(sampled).split("_"))
    means = mean_log_ratios(sampled).exp()
    kept = float(((means >= lower) & (means <= upper)).double().mean())
    assert 0.95 <= kept <= 0.97
    chosen = report_of("int4").effects[0]
    assert math.isclose(1 - chosen.rejected_sequences, kept, abs_tol=1e-9)


def test_effects_are_the_librarys_own_numbers():
    """Of 64 sequences the one whose ratio is e^0.5 a token is rejected by the geometric mean alone."""
    batch = made(None, 5)
    batch["old_log_probs"][0] = batch["rollout_log_probs"][0] - 0.5
    report = examine(Evidence("made", facts_of_batch(Sampled(**batch)), Sampled(**batch)))
    choice = dataclasses.replace(report.choice, preset="decoupled_geo_rs", arguments={"rs_threshold": "0.7_1.4"})
    found = effect(choice, Sampled(**batch))
    assert math.isclose(found.rejected_sequences, 1 / 64)
    tokens = batch["response_mask"].sum(dim=1)
    assert math.isclose(found.rejected_tokens, int(tokens[0]) / int(tokens.sum()), rel_tol=1e-9)
    assert found.eff_sample_size == 1


def test_text_says_what_why_and_what_to_do():
    text = in_words(report_of("temperature 0.7"))
    for words in (
        "How far apart",
        "1. another temperature (temperature)",
        "as if the engine's temperature were 0.7",
        "Do: score with the temperature",
        "--rollout-correction-preset disabled",
        "Outside of published ranges",
    ):
        assert words in text
    assert "nan" not in text
    assert "nothing wrong" in in_words(report_of(None))


def test_without_the_trainers_log_probs_the_flag_is_named(tmp_path, capsys):
    lines = [{"rollout_log_probs": [-1.0, -2.0]}]
    assert main([str(write_lines(tmp_path / "b.jsonl", lines))]) == 3
    printed = capsys.readouterr().out
    assert "--save-log-probs" in printed
    assert "not known: the log-probs of the trainer are missing" in printed


def test_json_is_one_object_of_finite_numbers(tmp_path, capsys):
    path = write_lines(tmp_path / "metrics.jsonl", [{"step": 1, **metrics_of("int4")}])
    assert main([str(path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["exit_code"] == 1
    assert [verdict["name"] for verdict in found["verdicts"]] == ["precision"]
    assert found["proposal"]["preset"] == "decoupled_token_is"
    assert found["facts"]["k3_kl"] == pytest.approx(metrics_of("int4")["rollout_corr/k3_kl"])
    assert "shift" in found["not_looked_at"]
    json.dumps(as_json(report_of("shift")), allow_nan=False)
    complaints = found["outside_of_published_ranges"]
    assert any(words.startswith("kl is ") and "-0.1 to 0.1" in words for words in complaints)
    assert as_json(report_of(None))["outside_of_published_ranges"] == []
    assert len({one.fact for one in RANGES}) == len(RANGES)


def test_the_module_ends_with_the_code(tmp_path, monkeypatch, capsys):
    """As ``python -m`` runs it, without a second Python."""
    path = write_lines(tmp_path / "metrics.jsonl", [{"step": 1, **metrics_of("int4")}])
    monkeypatch.delitem(sys.modules, "megatron_rc.doctor.__main__")
    monkeypatch.setattr(sys, "argv", ["doctor", str(path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("megatron_rc.doctor", run_name="__main__")
    assert ended.value.code == 1
    assert capsys.readouterr().err == ""


SETTINGS_OF = {
    "verl": 'algorithm:\n  rollout_correction:\n    rollout_is: "token"\n    rollout_is_threshold: 1.5',
    "slime": "--use-tis --tis-clip 1.5",
    "nemo-rl": "loss_fn:\n  use_importance_sampling_correction: true\n",
    "megatron_rc": "--rollout-correction-preset decoupled_token_is --rollout-is-threshold 1.5",
}


def metrics_as(program):
    """Metrics of a healthy batch under each program's names."""
    metrics = metrics_of(None)
    if program == "slime":
        return {f"train/{name.replace('rollout_corr/', 'mismatch_')}": value for name, value in metrics.items()}
    if program == "nemo-rl":
        return {"train/gen_kl_error": 1e-4, "train/token_mult_prob_error": 1.01}
    return metrics | ({"actor/grad_norm": 1.0} if program == "verl" else {"rollout/response_length": 9.0})


@pytest.mark.parametrize("program", SETTINGS_OF)
def test_advice_is_in_the_words_of_the_program_that_wrote_the_input(tmp_path, capsys, program):
    path = write_lines(tmp_path / "m.jsonl", [{"step": 1, **metrics_as(program)}])
    assert main([str(path), "--json"]) == 0
    proposal = json.loads(capsys.readouterr().out)["proposal"]
    assert proposal["dialect"] == program
    wanted = SETTINGS_OF[program]
    if program == "nemo-rl":  # which has no percentiles, so that the bound is another
        assert proposal["settings"].startswith(wanted)
    else:
        assert proposal["settings"] == wanted
    assert main([str(path)]) == 0
    assert proposal["settings"].splitlines()[0] in capsys.readouterr().out
    assert main([str(path), "--json", "--dialect", "verl"]) == 0
    assert "rollout_correction:" in json.loads(capsys.readouterr().out)["proposal"]["settings"]
    assert main([str(path), "--dialect", "verl2"]) == 2
    assert capsys.readouterr().err.startswith("--dialect='verl2' is unknown")


@pytest.mark.parametrize("dialect", sorted(set(WORDS) - {OWN}))
@pytest.mark.parametrize("fault", [None, "tails", "int4", "temperature 0.7"])
def test_proposed_settings_are_read_by_their_program(dialect, fault):
    """As they are copied; what the program has no words for stands in comments."""
    choice = report_of(fault).choice
    lines = settings_lines(choice.config(), dialect)
    if all(line.startswith("#") for line in lines):
        assert choice.settings(dialect) == [choice.flags(), *lines]
        return
    if lines[0].startswith("--"):
        words = lines[0].split()
        fields = {word: True for word in words if word.startswith("--")}
        fields |= {name: float(value) for name, value in pairwise(words) if not value.startswith("--")}
    else:
        fields = yaml.safe_load("\n".join(lines)) or {}
    fields = {} if fields == "no --use-tis" else fields
    found = RolloutCorrectionConfig.from_dict(fields, dialect)
    lost = [line for line in lines if "cannot say" in line]
    assert found.rollout_is == (choice.config().rollout_is if choice.config().rollout_is_apply else None)
    assert bool(found.criteria) == bool(choice.config().criteria) or any("rollout_rs" in line for line in lost)
    if fault is None:
        assert not lost


def test_advice_names_the_programs_own_settings(tmp_path, capsys):
    batch = made("temperature 0.7", 5)
    verl = {name: batch[name].tolist() for name in ("rollout_log_probs", "old_log_probs", "response_mask")}
    assert main([str(write_lines(tmp_path / "b.jsonl", [verl]))]) == 1
    printed = capsys.readouterr().out
    assert "actor_rollout_ref.rollout.temperature" in printed
    assert "--rl-default-temperature" not in printed
    for rule in RULES:
        assert all(rule.advice_in(dialect) for dialect in WORDS)
