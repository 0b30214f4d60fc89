"""Flags of the correction and of the objective: alone, over presets, files and launch files."""

import argparse
import dataclasses
import re

import pytest

from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.description import flag_of
from megatron_rc.settings.fields import FIELDS
from megatron_rc.settings.flags import (
    LOSS_FLAGS,
    add_rollout_correction_args,
    policy_loss_config_from_args,
    rollout_correction_config_from_args,
)
from tests.support.tables import table


def from_flags(*arguments):
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    return rollout_correction_config_from_args(add_rollout_correction_args(parser).parse_args(arguments))


def from_line(line):
    return from_flags(*line.split())


def test_there_is_a_flag_for_each_field_and_each_is_explained():
    parser = add_rollout_correction_args(argparse.ArgumentParser(allow_abbrev=False))
    actions = {text: action for action in parser._actions for text in action.option_strings}
    for field in FIELDS:
        action = actions[f"--{field.replace('_', '-')}"]
        assert action.help
        assert (action.dest, action.default) == (field, None)
    assert {"--rollout-correction-preset", "--rollout-correction-config"} < set(actions)
    assert {"--no-bypass-mode", "--no-rollout-is-batch-normalize"} < set(actions)
    assert "--no-loss-type" not in actions
    with pytest.raises(SystemExit):  # abbreviations are off
        parser.parse_args(["--rollout-correction-pre", "disabled"])


def test_no_flags_are_the_defaults():
    assert from_flags() == RolloutCorrectionConfig()
    assert rollout_correction_config_from_args(argparse.Namespace()) == RolloutCorrectionConfig()
    assert rollout_correction_config_from_args(argparse.Namespace(rollout_is="token")).rollout_is == "token"


FIELDS_OF_FLAGS = """
--rollout-is none | rollout_is: null
--rollout-is-threshold 3 | rollout_is_threshold: 3.0
--rollout-is-threshold 0.5_3 | rollout_is_threshold: '0.5_3'
--metric-prefix none | metric_prefix: none
--rollout-staleness-scale 1:1.5,4:2 | rollout_staleness_scale: '1:1.5,4:2'
--rl-inference-logprobs-is-correction | rollout_is: token, rollout_is_threshold: UNTRUNCATED
--rl-inference-logprobs-is-correction --rl-importance-sampling-truncation-coef 10
    --rollout-rs token_k3 --rollout-rs-threshold 1
    | rollout_is: token, rollout_is_threshold: 10.0, rollout_rs: token_k3, rollout_rs_threshold: 1.0
"""


@table("line {fields}", FIELDS_OF_FLAGS)
def test_flags_are_fields(line, fields):
    assert from_line(line) == RolloutCorrectionConfig(**fields)


OVER_A_PRESET = """
decoupled_token_is | --rollout-is-threshold 5 | rollout_is: token, rollout_is_threshold: 5.0
decoupled_token_is | --rollout-is none | rollout_is: null
decoupled_k3_rs | --rollout-rs token_k1 --rollout-rs-threshold 2
    | rollout_is: null, rollout_rs: token_k1, rollout_rs_threshold: 2.0
geo_rs | --rollout-token-veto-threshold none
    | rollout_is: null, rollout_rs: seq_mean_k1, rollout_rs_threshold: 0.999_1.001
disabled | --bypass-mode | rollout_is: token, rollout_is_threshold: 2.0, rollout_is_apply: false, bypass_mode: true
decoupled_token_is | --no-rollout-is-apply | rollout_is: token, rollout_is_threshold: 2.0, rollout_is_apply: false
decoupled_token_icepop | --rollout-is-threshold 4 | rollout_is: token, rollout_is_threshold: 4.0, rollout_is_mode: mask
decoupled_token_icepop | --rollout-is-threshold 4 --rollout-is-mode truncate
    | rollout_is: token, rollout_is_threshold: 4.0, rollout_is_mode: truncate
"""


@table("base line {fields}", OVER_A_PRESET)
def test_flags_override_the_preset_and_its_leftovers_go(base, line, fields):
    assert from_line(f"--rollout-correction-preset {base} {line}") == RolloutCorrectionConfig(**fields)


def test_what_looks_at_versions_goes_with_what_it_needs(tmp_path):
    path = tmp_path / "correction.yaml"
    path.write_text("rollout_is: token\nrollout_staleness_scale: 1:1.5\nproximal_interpolation: true\n")
    base = f"--rollout-correction-config {path}"
    remaining = {"rollout_staleness_scale": "1:1.5"}
    assert from_line(f"{base} --bypass-mode") == RolloutCorrectionConfig("token", **remaining, bypass_mode=True)
    assert from_line(f"{base} --rollout-is none") == RolloutCorrectionConfig(None, proximal_interpolation=True)


FILE = """rollout_is: token
rollout_is_threshold: 3.0
rollout_is_mode: clamp
rollout_is_threshold_lower: 0.1
rollout_is_batch_normalize: true
rollout_is_batch_normalize_scope: accepted
rollout_rs: token_k1,seq_sum_k1
rollout_rs_threshold: 2
rollout_rs_threshold_lower: 0.1,0.2
"""


OVER_A_FILE = """
--rollout-is-threshold 0.3_4 | rollout_is_threshold: '0.3_4', rollout_is_threshold_lower: null
--rollout-is-mode truncate | rollout_is_mode: truncate, rollout_is_threshold_lower: null
--no-rollout-is-batch-normalize | rollout_is_batch_normalize: false, rollout_is_batch_normalize_scope: all
--bypass-mode | bypass_mode: true, rollout_is_batch_normalize: false, rollout_is_batch_normalize_scope: all
--no-rollout-is-apply
    | rollout_is_apply: false, rollout_is_batch_normalize: false, rollout_is_batch_normalize_scope: all
--rollout-rs-threshold 0.5_2 | rollout_rs_threshold: '0.5_2', rollout_rs_threshold_lower: null
--rollout-rs none | rollout_rs: null, rollout_rs_threshold: null, rollout_rs_threshold_lower: null
"""


@table("line {changed}", OVER_A_FILE)
def test_flags_override_the_file_and_its_leftovers_go(tmp_path, line, changed):
    (tmp_path / "base.yaml").write_text(FILE)
    base = RolloutCorrectionConfig.from_yaml(tmp_path / "base.yaml")
    config = from_line(f"--rollout-correction-config {tmp_path / 'base.yaml'} {line}")
    assert config == RolloutCorrectionConfig(**{**base.to_dict(), **changed})


LAUNCH_FILE = "--rollout-correction-preset decoupled_token_is --rollout-rs token_k1 --rollout-rs-threshold 0.9_1.1"


def over_a_file(file, line):
    """The config of flags over a launch file's flags."""
    parser = add_rollout_correction_args(argparse.ArgumentParser())
    return rollout_correction_config_from_args(parser.parse_args(line.split()), parser.parse_args(file.split()))


OVER_A_LAUNCH_FILE = """
- | rollout_is: token, rollout_is_threshold: 2.0, rollout_rs: token_k1
--rollout-rs none | rollout_is: token, rollout_is_threshold: 2.0
--rollout-correction-preset decoupled_seq_is | rollout_is: sequence, rollout_is_threshold: 2.0
--rollout-correction-preset disabled --rollout-rs token_k2 --rollout-rs-threshold 1
    | rollout_is: token, rollout_is_threshold: 2.0, rollout_is_apply: false, rollout_rs: token_k2,
    rollout_rs_threshold: 1.0
--rl-inference-logprobs-is-correction | rollout_is: token, rollout_is_threshold: UNTRUNCATED
--bypass-mode --rollout-is none | rollout_is: null, bypass_mode: true, rollout_rs: token_k1
"""


@table("line {fields}", OVER_A_LAUNCH_FILE)
def test_flags_override_a_launch_file_and_its_leftovers_go(line, fields):
    if fields.get("rollout_rs") == "token_k1":
        fields = {**fields, "rollout_rs_threshold": "0.9_1.1"}
    assert over_a_file(LAUNCH_FILE, line) == RolloutCorrectionConfig(**fields)


def test_flags_complete_what_a_launch_file_begins():
    config = over_a_file("--rollout-rs token_k1 --loss-type reinforce", "--bypass-mode --rollout-rs-threshold 2")
    assert config == RolloutCorrectionConfig(
        rollout_rs="token_k1", rollout_rs_threshold=2.0, bypass_mode=True, loss_type="reinforce"
    )
    switch = "--rl-inference-logprobs-is-correction"
    config = over_a_file(switch, "--rl-importance-sampling-truncation-coef 3")
    assert config == RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=3.0)
    assert over_a_file(switch, f"--no-{switch[2:]}") == RolloutCorrectionConfig()


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        (LAUNCH_FILE, "--rollout-correction-preset disabled --rollout-rs-threshold 2", "--rollout-rs-threshold: "),
        ("--loss-type reinforce", "--rollout-is token", "--loss-type: loss_type='reinforce' names the objective"),
        ("--rollout-rs-threshold 2", "", "--rollout-rs-threshold: rollout_rs_threshold=2.0 does nothing without"),
    ],
)
def test_flags_over_a_launch_file_that_cannot_work_are_named(file, line, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        over_a_file(file, line)


REFUSED = """
--rollout-is batch | --rollout-is: rollout_is='batch' is unknown
--bad-log-probs none | --bad-log-probs: bad_log_probs=None is unknown
--rollout-correction-preset best | --rollout-correction-preset best: preset='best' is unknown
--rollout-correction-preset tis | preset='tis' is unknown: did you mean 'token_tis'?
--rollout-correction-preset seq-mis | preset='seq-mis' is unknown: did you mean 'seq_mis'?
--rollout-correction-preset geo_rs --rollout-rs token_k3 | --rollout-rs: rollout_rs='token_k3' needs
--rollout-correction-preset decoupled_token_icepop --rollout-is-mode truncate
    | --rollout-is-threshold: rollout_is_threshold='0.5_5.0' has a lower bound that
--rollout-correction-preset disabled --rollout-correction-config x.yaml | contradict: give one of them
--rollout-correction-config x/none.yaml | --rollout-correction-config x/none.yaml: x/none.yaml cannot be read: No such
--rollout-correction-config configs/rollout_correction/token_is.yaml | give --rollout-correction-preset token_is
--rl-importance-sampling-truncation-coef 2 | does nothing without --rl-inference-logprobs-is-correction
--rl-inference-logprobs-is-correction --rl-importance-sampling-truncation-coef -2
    | --rl-importance-sampling-truncation-coef -2.0: rollout_is_threshold=-2.0 must be
--rl-inference-logprobs-is-correction --rollout-is none | and --rollout-is contradict: give one of them
"""


@table("line message", REFUSED)
def test_flags_that_cannot_work_are_named(line, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        from_line(line)


def test_a_parser_that_has_an_option_keeps_its_own():
    """Megatron-LM's parser has its two options already, with False and None for "not given"."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollout-is", default="token", help="its own")
    parser.add_argument("--rl-inference-logprobs-is-correction", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--rl-importance-sampling-truncation-coef", type=float, default=None)
    assert add_rollout_correction_args(parser) is parser
    assert rollout_correction_config_from_args(parser.parse_args([])).rollout_is == "token"
    assert "its own" in parser.format_help()
    assert add_rollout_correction_args(parser) is parser, "a second call finds everything there"


VERL = """algorithm:
  gamma: 1.0
  rollout_correction:
    rollout_is: token
    rollout_rs: token_k1
    rollout_rs_threshold: 0.5_4
"""


def test_a_file_of_another_program_by_flag(tmp_path, caplog):
    caplog.set_level("INFO", "megatron_rc")
    (tmp_path / "verl.yaml").write_text(VERL)
    arguments = ("--rollout-correction-config", str(tmp_path / "verl.yaml"), "--rollout-correction-dialect", "verl")
    fields = {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_rs": "token_k1"}
    config = from_flags(*arguments)
    # verl's bounds are on 1/ρ.
    assert config == RolloutCorrectionConfig(**fields, rollout_rs_threshold="0.25_2.0")
    assert any("apply to 1/ρ" in record.message for record in caplog.records)
    changed = from_flags(*arguments, "--rollout-is", "sequence")
    assert changed == RolloutCorrectionConfig(**fields | {"rollout_is": "sequence"}, rollout_rs_threshold="0.25_2.0")
    assert changed.notes == config.notes
    assert (
        over_a_file(" ".join(arguments), "--rollout-correction-preset disabled") == RolloutCorrectionConfig.disabled()
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "unknown field 'algorithm' .*; a file of another program needs --rollout-correction-dialect"),
        ("--rollout-correction-dialect nemo", "verl.yaml: dialect='nemo' is unknown: use one of verl"),
        ("--rollout-correction-dialect slime", "a name of verl: read .* with dialect='verl'; a file of another"),
    ],
)
def test_a_file_of_another_program_without_its_name_says_so(tmp_path, line, message):
    (tmp_path / "verl.yaml").write_text(VERL)
    with pytest.raises(ValueError, match=f"--rollout-correction-config .*{message}"):
        from_line(f"--rollout-correction-config {tmp_path}/verl.yaml {line}")
    with pytest.raises(ValueError, match="--rollout-correction-dialect verl does nothing without"):
        from_line("--rollout-correction-dialect verl")


def test_the_objective_has_flags_and_they_are_read():
    """Megatron-LM's own defaults stay for its flags."""
    arguments = "--policy-loss gspo --grpo-clamp-eps-lower 0.1 --ppo-dual-clip 3 --loss-aggregation token-sum".split()
    arguments += "--loss-scale-factor 9 --kl-estimator k3+ --grpo-kl-beta 0.1 --grpo-entropy-term-weight 0.2".split()
    arguments += ["--kl-importance-weight"]
    alone = add_rollout_correction_args(argparse.ArgumentParser())
    assert policy_loss_config_from_args(alone.parse_args([])) == PolicyLossConfig()
    assert policy_loss_config_from_args(argparse.Namespace()) == PolicyLossConfig()
    some = argparse.Namespace(grpo_clamp_eps_lower=0.1, grpo_kl_beta=0.0, ppo_dual_clip=None)
    assert policy_loss_config_from_args(some) == PolicyLossConfig(clip_low=0.1, kl_coef=0.0)
    expected = PolicyLossConfig("gspo", 0.1, 0.2, 3.0, "token-sum", 9.0, 0.1, "k3+", 0.2, kl_importance_weight=True)
    assert policy_loss_config_from_args(alone.parse_args(arguments)) == expected
    megatrons = argparse.ArgumentParser()
    megatrons.add_argument("--grpo-clamp-eps-upper", type=float, default=0.01)
    read_beside_megatrons = policy_loss_config_from_args(add_rollout_correction_args(megatrons).parse_args(arguments))
    assert read_beside_megatrons == dataclasses.replace(expected, clip_high=0.01)
    assert {flag_of(name) for name in LOSS_FLAGS.values()} <= set(alone._option_string_actions)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"grpo_clamp_eps_lower": 2.0}, "--grpo-clamp-eps-lower: clip_low=2.0 must lie in"),
        ({"policy_loss": "ppo"}, "--policy-loss: algorithm='ppo' is unknown: use one of ppo_clip, reinforce"),
        ({"ppo_dual_clip": 3.0, "policy_loss": "cispo"}, "--ppo-dual-clip: dual_clip=3.0 does nothing with"),
        ({"loss_scale_factor": 2.0}, "--loss-scale-factor"),
    ],
)
def test_an_objective_that_cannot_work_is_refused_by_its_flag(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        policy_loss_config_from_args(argparse.Namespace(**given))
