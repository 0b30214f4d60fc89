"""A recorded batch is corrected by the formula, and drawn."""

import dataclasses
import runpy
import sys

import pytest
import torch

from megatron_rc import load_rollouts, save_rollouts, write_jsonl
from tests.support.paths import ROOT

PATH = str(ROOT / "examples" / "recorded_batch.py")


@pytest.fixture
def run(monkeypatch, capsys):
    """(output, error output, exit code) of the command."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["recorded_batch.py", *map(str, arguments)])
        try:
            runpy.run_path(PATH, run_name="__main__")
        except SystemExit as end:
            return capsys.readouterr().err.splitlines()[-1], end.code
        return capsys.readouterr().out, 0

    return call


@pytest.fixture
def made(tmp_path, run):
    assert run("--make", tmp_path / "records") == ("", 0)
    (file,) = (tmp_path / "records").iterdir()
    return file


def test_metrics_are_those_of_the_formula(tmp_path, run, made):
    shown, _ = run(made, "--out", tmp_path / "weights.png")
    metrics = {name: float(value) for name, value in map(str.split, shown.splitlines())}
    batch = load_rollouts(made)
    mask = batch.response_mask
    log_ratio = (batch.old_log_probs - batch.rollout_log_probs).double()
    k3 = torch.where(mask, log_ratio.exp() - 1 - log_ratio, 0).sum(1) / mask.sum(1)
    rejected = k3 > 0.01
    assert rejected[56:].all()
    assert not rejected[:56].all()
    expected = {
        "kl": -log_ratio[mask].mean(),
        "rollout_is_mean": log_ratio.exp().clamp(max=2)[mask].mean(),
        "rollout_rs_masked_fraction": mask[rejected].sum() / mask.sum(),
        "num_tokens": mask.sum(),
    }
    for name, value in expected.items():
        assert metrics[f"rollout_corr/{name}"] == pytest.approx(float(value), rel=1e-4)
    assert (tmp_path / "weights.png").read_bytes().startswith(b"\x89PNG")


def test_files_and_rows_of_any_origin_are_one_batch(tmp_path, run, made):
    once, _ = run(made)
    batch = load_rollouts(made)
    write_jsonl([dataclasses.replace(batch, sample_ids=batch.sample_ids + 100)], tmp_path / "rows.jsonl")
    both, _ = run(made, tmp_path / "rows.jsonl")
    numbers = [float(text.split("rollout_corr/num_tokens ")[1].split()[0]) for text in (once, both)]
    assert numbers[1] == 2 * numbers[0]


def test_bounds_of_token_weights_alone_are_drawn(tmp_path, run, made):
    """Bounds of sequence weights are on products of the ratios in the picture."""
    presets = {"decoupled_token_icepop": 2, "decoupled_geo_rs": 0}
    for preset, lines in presets.items():
        shown, _ = run(made, "--rollout-correction-preset", preset, "--out", tmp_path / "a.svg")
        assert ("rollout_is_mean" in shown) == (preset != "decoupled_geo_rs")
        assert (tmp_path / "a.svg").read_text().count("stroke-dasharray") == lines


def test_what_cannot_be_corrected_is_one_sentence(tmp_path, run, made):
    batch = load_rollouts(made)
    save_rollouts(dataclasses.replace(batch, old_log_probs=None), tmp_path / "engine.safetensors")
    infinite = batch.old_log_probs.masked_fill(torch.arange(72) == 20, -torch.inf)
    save_rollouts(dataclasses.replace(batch, old_log_probs=infinite), tmp_path / "infinite.safetensors")
    (tmp_path / "empty.jsonl").touch()
    for arguments, message in {
        (): "name files of recorded rollouts, or --make DIR",
        (tmp_path / "none.safetensors",): "none.safetensors is missing",
        (tmp_path / "engine.safetensors",): "engine.safetensors has no old_log_probs",
        (tmp_path / "infinite.safetensors",): "position 20 is infinite",
        (tmp_path / "empty.jsonl",): "empty.jsonl has no responses",
        (made, "--rollout-correction-preset", "pg_is"): "--rollout-correction-preset pg_is: use a decoupled preset",
        (made, "--out", tmp_path / "nowhere" / "a.png"): "No such file or directory",
    }.items():
        shown, code = run(*arguments)
        assert (message in shown, code) == (True, 2), shown
