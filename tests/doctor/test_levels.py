"""Metrics of weights of every level: a healthy run is healthy, and a fault is the same fault."""

import functools
import json

import pytest
import torch

from megatron_rc.doctor.__main__ import main
from megatron_rc.doctor.facts import level_of, of_tokens
from megatron_rc.doctor.series import facts_of_series
from megatron_rc.doctor.tables import own_row, own_rows
from tests.doctor.test_faults import growing_rows
from tests.doctor.test_inputs import write_lines
from tests.support.exported_runs import LEVELS, exported, flags, healthy_rows, verdicts
from tests.support.made_faults import FAULTS, made

SEEN = {"fp8": "precision", "int4": "precision", "tails": "tails", "staleness": "staleness"}
SEEN |= {"top_p 0.8": "truncated_sampling", "top_p 0.9": "truncated_sampling"}


@functools.cache
def row(level, k3, length):
    """Metrics of 64 equally long responses, whose log-ratios are normal, with E[ρ] = 1 and this k3."""
    generator = torch.Generator().manual_seed(0)
    rollout = torch.full((64, length), -1.0)
    old = rollout + (2 * k3) ** 0.5 * torch.randn(64, length, generator=generator) - k3
    batch = {"rollout_log_probs": rollout, "old_log_probs": old, "response_mask": rollout < 0}
    return exported(batch, LEVELS[level])


@pytest.mark.parametrize("level", LEVELS)
def test_long_responses_of_a_healthy_engine_are_healthy(tmp_path, capsys, level):
    metrics = row(level, 0.00015, 2048)
    assert metrics["rollout_corr/k3_kl"] == pytest.approx(0.00015, rel=0.02)
    for settings in (flags(LEVELS[level]), None):
        assert verdicts([metrics] * 3, settings) == {}
    path = write_lines(tmp_path / "m.jsonl", [{"step": step, **metrics} for step in range(3)])
    assert main([str(path)]) == 0
    assert "nothing wrong" in capsys.readouterr().out


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_the_metrics_tell_their_level(level):
    metrics = own_row(row(level, 0.00015, 2048), "")
    token = own_row(row("token", 0.00015, 2048), "")
    assert level_of(of_tokens(metrics) | metrics) == level
    # Numbers of tokens are those of token weights, whatever the level.
    of = of_tokens(metrics)
    assert of["ratio_mean"] == pytest.approx(token["rollout_is_raw_mean"], abs=1e-7)
    assert of["ratio_std"] == pytest.approx(token["rollout_is_raw_std"], rel=1e-3)
    assert of["token_eff_sample_size"] == pytest.approx(token["rollout_is_raw_eff_sample_size"], rel=1e-6)


def test_the_level_comes_from_the_flag_then_the_settings_then_the_metrics():
    history, _, _ = own_rows([row("sequence", 0.00015, 2048)], "here")
    assert facts_of_series(history)["of_sequences"] == 1
    assert facts_of_series(history, {"rollout-is": "token"})["of_sequences"] == 0
    assert facts_of_series(history, {"rollout-is": "token"}, "sequence")["of_sequences"] == 1
    size = facts_of_series(history)["sequence_eff_sample_size"]
    assert size == row("sequence", 0.00015, 2048)["rollout_corr/rollout_is_raw_eff_sample_size"]


@pytest.mark.parametrize("level", ["sequence", "token", "none"])
def test_the_flag_says_the_level_of_exported_metrics(tmp_path, capsys, level):
    path = write_lines(tmp_path / "m.jsonl", growing_rows(1.05, 1.2))
    assert main([str(path), "--json", "--rollout-is", level]) == 0
    verdicts = json.loads(capsys.readouterr().out)["verdicts"]
    assert [verdict["name"] for verdict in verdicts] == ["growing_length"] * (level == "sequence")


def test_masked_token_weights_need_their_level(tmp_path, capsys):
    """TRL's token_mask writes the mean weight alone: 0.4 may be products over responses, or most tokens masked."""
    metrics = {"sampling/sampling_logp_difference/mean": 0.01, "sampling/importance_sampling_ratio/mean": 0.4}
    path = write_lines(tmp_path / "m.jsonl", [{"step": step, **metrics} for step in range(12)])
    assert main([str(path)]) == 0
    assert "if they are of another level, say so with the doctor's flag --rollout-is" in capsys.readouterr().out
    assert main([str(path), "--rollout-is", "token"]) == 1
    assert "(mean_weight)" in capsys.readouterr().out


def test_a_batch_has_no_level(tmp_path, capsys):
    path = write_lines(tmp_path / "b.jsonl", [{"rollout_log_probs": [-1.0], "old_log_probs": [-1.0]}])
    assert main([str(path), "--rollout-is", "token"]) == 2
    assert capsys.readouterr().err.startswith("--rollout-is token is for metrics")


def test_products_that_leave_little_of_a_healthy_batch_are_no_fault(tmp_path, capsys):
    """Weights of sequences are the wrong choice for 8,192 tokens; the policies are as near as bfloat16 leaves them."""
    metrics = row("sequence", 0.0005, 8192)
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] < 0.3
    path = write_lines(tmp_path / "m.jsonl", [{"step": 1, **metrics}])
    assert main([str(path)]) == 0
    printed = capsys.readouterr().out
    assert "nothing wrong" in printed
    assert "What other weights would improve" in printed
    assert "sequence weights that few responses carry (long_products)" in printed
    assert "--rollout-correction-preset decoupled_token_is" in printed


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("fault", FAULTS)
def test_metrics_of_every_level_tell_the_same_fault(fault, level):
    metrics = exported(made(fault, 7), LEVELS[level])
    for settings in (flags(LEVELS[level]), None):
        # Other faults are a distance, whose cause needs the tokens.
        assert next(iter(verdicts([metrics] * 3, settings))) == SEEN.get(fault, "precision")


# Runs of responses that grow, and of the largest k3.
@pytest.mark.parametrize("seed", [8, 11])
def test_healthy_runs_of_every_level_are_healthy(seed):
    """tests/long/test_doctor.py does the same with 200 runs; docs/doctor.md has its figures."""
    columns = zip(*healthy_rows(seed, LEVELS.values()), strict=True)
    for rows, fields in zip(columns, LEVELS.values(), strict=True):
        for settings in (flags(fields), None):
            assert set(verdicts(rows, settings).values()) <= {"weights"}
