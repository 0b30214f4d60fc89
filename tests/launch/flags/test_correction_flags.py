"""The correction that flags make of the launch file ``count_up``, which has a preset and a criterion of its own."""

import dataclasses
import re

import pytest

from megatron_rc.launch.__main__ import main
from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.ranks import Outcome
from megatron_rc.settings.config import RolloutCorrectionConfig, preset
from megatron_rc.settings.presets import PRESETS
from tests.support.paths import ROOT
from tests.support.recorded_training import flags, run_config

WEIGHTS = {"rollout_is": "token", "rollout_is_threshold": 2.0}
FILE = {**WEIGHTS, "rollout_rs": "token_k1", "rollout_rs_threshold": "0.9_1.1"}


# docs/launching.md's rows about the correction: the config of each, and what its description must say.
ROWS = {
    "--rollout-correction-preset disabled": (preset("disabled"), "the weights are measured, not applied"),
    "--rollout-correction-preset bypass_ppo_clip": (preset("bypass_ppo_clip"), "no importance weights"),
    "--rollout-correction-preset bypass_ppo_clip --loss-type cppo": (
        dataclasses.replace(preset("bypass_ppo_clip"), loss_type="cppo"),
        "no importance weights",
    ),
    "--proximal-interpolation": (
        RolloutCorrectionConfig(**FILE, proximal_interpolation=True),
        "rejects tokens whose ρ_t is outside [0.9, 1.1] (token_k1)",
    ),
}


def checked_alone(tmp_path, *words):
    """A run that no launch file says anything of."""
    return run_config(flags(tmp_path, *words))


def checked(tmp_path, *words):
    """A run of ``count_up`` with these flags."""
    return run_config(["--config=count_up", f"--runs-dir={tmp_path}", *words], 4)


def test_the_rows_are_the_launching_pages():
    text = (ROOT / "docs" / "launching.md").read_text(encoding="utf-8")
    table = text.partition("| try | flags |")[2].partition("\n\n")[0]
    about = re.findall(r"`(--(?:rollout-correction|rollout-is|rollout-rs|bypass|proximal)[^`]*)`", table)
    assert sorted(about) == sorted(ROWS)


@pytest.mark.parametrize("words", ROWS)
def test_a_row_of_the_launching_page_means_what_it_says(tmp_path, words):
    config, fact = ROWS[words]
    found = checked(tmp_path, *words.split()).correction
    assert found == config
    assert fact in found.describe().splitlines()


@pytest.mark.parametrize("name", [*PRESETS, "decoupled_geo_rs@2025-11"])
def test_a_preset_by_flag_is_that_preset(tmp_path, name):
    assert checked(tmp_path, "--rollout-correction-preset", name).correction == preset(*name.split("@"))


def test_a_file_of_fields_by_flag_is_that_file(tmp_path):
    (tmp_path / "fields.yaml").write_text("rollout_is: sequence\nrejection_denominator: original\n")
    config = checked(tmp_path, f"--rollout-correction-config={tmp_path}/fields.yaml").correction
    assert config == RolloutCorrectionConfig(rejection_denominator="original")


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("", FILE),
        ("--policy-loss cispo --rollout-rs none", WEIGHTS),
        ("--rollout-is none", {**FILE, "rollout_is": None, "rollout_is_threshold": None}),
        ("--no-rollout-is-apply", {**FILE, "rollout_is_apply": False}),
        ("--rollout-rs-threshold 0.5_2", {**FILE, "rollout_rs_threshold": "0.5_2"}),
        (
            "--rollout-correction-preset disabled --rollout-is-apply --bad-log-probs reject_token",
            {**WEIGHTS, "bad_log_probs": "reject_token"},
        ),
    ],
)
def test_flags_override_the_launch_files_correction(tmp_path, words, fields):
    config = checked(tmp_path, *words.split())
    assert config.correction == RolloutCorrectionConfig(**fields)
    assert config.loss.algorithm == ("cispo" if "cispo" in words else "ppo_clip")


IN_THE_LOSS = [
    ("--rollout-correction-preset=bypass_pg_is", "--rollout-is-batch-normalize"),
    ("--rollout-is-batch-normalize", "--proximal-interpolation", "--rollout-staleness=4"),
]


@pytest.mark.parametrize("words", IN_THE_LOSS, ids=["bypass", "proximal"])
def test_penalties_that_were_not_given_are_none_beside_batch_normalisation_in_the_loss(tmp_path, words, caplog):
    """Given ones are refused there; elsewhere they have Megatron's defaults."""
    config = checked_alone(tmp_path, *words)
    assert (config.loss.kl_coef, config.loss.entropy_coef) == (0.0, 0.0)
    (message,) = [record.message for record in caplog.records]
    assert all(part in message for part in ("--grpo-kl-beta", "0.001", "--rollout-is-batch-normalize"))
    for given in ("--grpo-kl-beta=0.001", "--grpo-entropy-term-weight=0.04"):
        with pytest.raises(ConfigurationError, match="rollout_is_batch_normalize=True"):
            checked_alone(tmp_path, *words, given)
    for others in ((), ("--rollout-is-batch-normalize",), ("--rollout-correction-preset=bypass_pg_is",)):
        config = checked_alone(tmp_path, *others)
        assert (config.loss.kl_coef, config.loss.entropy_coef) == (0.001, 0.0)


def test_that_line_is_written_by_rank_0_alone(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("megatron_rc.launch.__main__.run_ranks", lambda words: Outcome(0))
    with pytest.raises(SystemExit):
        main(flags(tmp_path, *IN_THE_LOSS[0]))
    assert not caplog.records


def test_a_launch_file_says_the_same_as_flags(tmp_path):
    (tmp_path / "verl.yaml").write_text("rollout_correction:\n  rollout_is: token\n  rollout_is_threshold: 3.0\n")
    count_up = (ROOT / "configs" / "launch" / "count_up.yaml").read_text(encoding="utf-8")
    others = [line for line in count_up.splitlines() if not line.startswith(("rollout-correction", "rollout-rs"))]
    own = ["rollout-correction-dialect: verl", "rollout-is-apply: false"]
    own.append(f"rollout-correction-config: {tmp_path}/verl.yaml")
    (tmp_path / "run.yaml").write_text("\n".join([*others, *own]))
    words, weights = (
        [f"--config={tmp_path}/run.yaml", f"--runs-dir={tmp_path}"],
        {**WEIGHTS, "rollout_is_threshold": 3.0},
    )
    assert run_config(words, 4).correction == RolloutCorrectionConfig(**weights, rollout_is_apply=False)
    assert run_config([*words, "--rollout-is-apply"], 4).correction == RolloutCorrectionConfig(**weights)
