"""The correction's settings: what is accepted, what is refused, the flags beside them, and the words for them."""

import argparse
import copy
import math
import pickle
import re
import shlex

import pytest

from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.settings.config import FIELDS, RolloutCorrectionConfig, preset
from megatron_rc.settings.flags import (
    add_rollout_correction_args,
    policy_loss_config_from_args,
    rollout_correction_config_from_args,
)
from megatron_rc.settings.presets import PRESETS

UNTRUNCATED = math.exp(20)
MEASURED = {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_is_apply": False}


def from_flags(*words):
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    return rollout_correction_config_from_args(add_rollout_correction_args(parser).parse_args(words))


def from_line(line):
    return from_flags(*line.split())


def test_criteria_are_parsed_into_bounds_on_the_statistic():
    config = RolloutCorrectionConfig(
        rollout_rs="token_k1, seq_mean_k3,token_k1,seq_sum_k1", rollout_rs_threshold="0.5_3,0.1,2"
    )
    assert [(c.name, c.unit, [need.name for need in c.needs]) for c in config.criteria] == [
        ("token_k1", "token", ["log_ratio"]),
        ("seq_mean_k3", "sequence", ["sum_k3"]),
        ("seq_sum_k1", "sequence", ["log_ratio"]),
    ]
    assert [c.lower for c in config.criteria] == [math.log(0.5), -math.inf, math.log(0.5)]
    assert [c.upper for c in config.criteria] == [math.log(3), 0.1, math.log(2)]


def test_names_of_the_first_releases_and_lower_bounds_of_their_own():
    config = RolloutCorrectionConfig(
        rollout_rs="token,geometric,seq_max_k2",
        rollout_rs_threshold="2,1.5,0.3",
        rollout_rs_threshold_lower="0.1,0.9",
    )
    assert [c.name for c in config.criteria] == ["token_k1", "seq_mean_k1", "seq_max_k2"]
    assert [c.lower for c in config.criteria] == [math.log(0.1), math.log(0.9), -math.inf]


def test_criteria_that_look_further_than_the_sequence():
    config = RolloutCorrectionConfig(
        rollout_rs="opsm,group_any,token_k2,group_mean_k1", rollout_rs_threshold="0.01,3,0.5_2"
    )
    assert [(c.name, c.unit) for c in config.criteria] == [
        ("opsm", "sequence"),
        ("group_any", "prompt"),
        ("token_k2", "token"),
        ("group_mean_k1", "prompt"),
    ]
    assert [c.lower for c in config.criteria] == [-0.01, -math.inf, -math.inf, math.log(0.5)]
    assert config.needs_prompts
    assert config.rejects
    assert not preset("decoupled_token_is").rejects


@pytest.mark.parametrize(
    ("fields", "mode", "bounds"),
    [
        ({}, "truncate", (0.5, 2.0)),
        ({"rollout_is_threshold": 4}, "truncate", (0.25, 4.0)),
        ({"rollout_is_threshold": "0.5_5"}, "mask", (0.5, 5.0)),
        ({"rollout_is_threshold": "0.5_5", "rollout_is_mode": "clamp"}, "clamp", (0.5, 5.0)),
        ({"rollout_is_threshold": 4.0, "rollout_is_mode": "mask"}, "mask", (0.25, 4.0)),
        ({"rollout_is_mode": "clamp", "rollout_is_threshold_lower": 0.1}, "clamp", (0.1, 2.0)),
    ],
)
def test_the_bounds_of_the_weights(fields, mode, bounds):
    config = RolloutCorrectionConfig(**fields)
    assert (config.is_mode, config.is_bounds) == (mode, bounds)


def test_the_older_switch_of_the_objective():
    config = RolloutCorrectionConfig.from_dict({"use_policy_gradient": True, "bypass_mode": True})
    assert config == RolloutCorrectionConfig(bypass_mode=True, loss_type="reinforce")
    assert config.applies_weights
    assert "use_policy_gradient" not in config.to_dict()


def test_weights_that_are_only_measured_are_warned_of(caplog):
    config = RolloutCorrectionConfig(rollout_is="token", bypass_mode=True)
    assert not config.applies_weights
    assert "measured, not applied" in caplog.text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rollout_is": "tokens"}, "rollout_is='tokens' is unknown: use one of None, token, sequence, geometric"),
        ({"rollout_is_threshold": 0.0}, "rollout_is_threshold=0.0 must be a finite positive number"),
        ({"rollout_is_threshold": math.nan}, "rollout_is_threshold=nan must be"),
        ({"rollout_is_threshold": "2_1"}, "must lie below the upper one"),
        ({"rollout_is_threshold": "1_2_3"}, "must be a number or 'lo_hi'"),
        ({"rollout_is_threshold": True}, "rollout_is_threshold=True must be"),
        ({"rollout_is_threshold": "0.5_2", "rollout_is_mode": "truncate"}, "'truncate' does not use: give one number"),
        ({"rollout_is_threshold": "0.5_2", "rollout_is_threshold_lower": 0.1}, "has a lower bound already: drop"),
        ({"rollout_is_threshold_lower": 0.1}, "does nothing with rollout_is_mode='truncate'"),
        ({"rollout_is_mode": "clip"}, "rollout_is_mode='clip' is unknown: use one of None, truncate, clamp, mask"),
        ({"rollout_is": None, "rollout_is_threshold": 2.0}, "does nothing without rollout_is"),
        ({"rollout_is": None, "rollout_is_mode": "mask"}, "rollout_is_mode='mask' does nothing without rollout_is"),
        ({"rollout_is": None, "rollout_is_batch_normalize": True}, "does nothing without rollout_is: set rollout_is"),
        ({"rollout_is": None, "rollout_is_apply": False}, "rollout_is_apply=False does nothing without rollout_is"),
        ({"rollout_is_apply": None}, "rollout_is_apply=None must be true or false"),
        (
            {"rollout_is_apply": False, "rollout_is_batch_normalize": True},
            "rollout_is_batch_normalize=True does nothing with rollout_is_apply=False",
        ),
        ({"rollout_is_batch_normalize": "true"}, "rollout_is_batch_normalize='true' must be true or false"),
        ({"rollout_is_batch_normalize_scope": "accepted"}, "does nothing without rollout_is_batch_normalize"),
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 1}, "rollout_rs='token_k4' is unknown"),
        ({"rollout_rs": ["token_k1"], "rollout_rs_threshold": 1}, "must be a comma list of criteria"),
        ({"rollout_rs": "token_k1"}, "needs rollout_rs_threshold"),
        ({"rollout_rs_threshold": 2.0}, "does nothing without a criterion in rollout_rs"),
        ({"rollout_rs": "group_any", "rollout_rs_threshold": 2.0}, "does nothing without a criterion"),
        ({"rollout_rs": "group_any"}, "looks at what other criteria reject: name at least one more"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "2_0.5"}, "must lie below the upper one"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5"}, "must lie below the upper one"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "-1_2"}, "must be a finite positive number"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "a_2"}, "'a' is not a number: give digits, such as 2.0"),
        ({"rollout_rs": "token_k3", "rollout_rs_threshold": "0.5_2"}, "token_k3 takes one upper bound, in nats"),
        ({"rollout_rs": "token_k1,token_k2", "rollout_rs_threshold": "1,2,3"}, "3 bounds for 2 criteria"),
        ({"rollout_rs": "opsm", "rollout_rs_threshold": -0.1}, "opsm takes one number, 0 or more"),
        # float() would read 0_1 as 1.
        ({"rollout_rs": "opsm", "rollout_rs_threshold": "0_1"}, "'0_1' must be one number, not a pair"),
        (
            {"rollout_rs": "token_k1", "rollout_rs_threshold": 2, "rollout_rs_threshold_lower": "0_5"},
            "'0_5' must be one number, not a pair",
        ),
        (
            {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2", "rollout_rs_threshold_lower": 0.1},
            "has a lower bound for token_k1 already",
        ),
        (
            {"rollout_rs": "token_k3", "rollout_rs_threshold": 1, "rollout_rs_threshold_lower": 0.1},
            "only k1 criteria have a lower bound",
        ),
        ({"rollout_token_veto_threshold": 0}, "rollout_token_veto_threshold=0 must be a finite positive number"),
        ({"rejection_denominator": "all"}, "rejection_denominator='all' is unknown"),
        ({"bad_log_probs": "ignore"}, "bad_log_probs='ignore' is unknown"),
        ({"metric_prefix": 1}, "metric_prefix=1 must be a text"),
        ({"bypass_mode": "yes"}, "bypass_mode='yes' must be true or false"),
        ({"loss_type": "reinforce"}, "names the objective of bypass mode: set bypass_mode=True, or drop it"),
        ({"use_policy_gradient": True}, "names the objective of bypass mode"),
        (
            {"use_policy_gradient": False, "loss_type": "reinforce", "bypass_mode": True},
            "use_policy_gradient=False contradicts loss_type='reinforce'",
        ),
        ({"bypass_mode": True, "rollout_is_batch_normalize": True}, "applies no weights: drop it"),
        (
            {"bypass_mode": True, "rollout_rs": "group_mean_k3", "rollout_rs_threshold": 1},
            "rollout_rs=group_mean_k3 needs all responses of a prompt",
        ),
        ({"rolout_is": "token"}, "unknown field 'rolout_is' of the rollout correction: known are rollout_is, "),
        ({"notes": ("x",)}, "unknown field 'notes'"),
    ],
)
def test_what_cannot_work_is_refused(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        RolloutCorrectionConfig.from_dict(fields)


# Flags.


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
    assert parser.format_help().count("rollout-token-veto-threshold") == 2


def test_no_flags_are_the_defaults():
    assert from_flags() == RolloutCorrectionConfig()
    assert rollout_correction_config_from_args(argparse.Namespace()) == RolloutCorrectionConfig()
    assert rollout_correction_config_from_args(argparse.Namespace(rollout_is="token")).rollout_is == "token"


@pytest.mark.parametrize("name", PRESETS)
def test_presets_by_flag(name, request):
    path = request.config.rootpath / "configs" / "rollout_correction" / f"{name}.yaml"
    assert from_flags("--rollout-correction-preset", name) == preset(name)
    assert from_flags(f"--rollout-correction-preset={name}@2025-11") == preset(name, "2025-11")
    assert from_flags("--rollout-correction-config", str(path)) == preset(name)


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("--rollout-is none", {"rollout_is": None}),
        ("--rollout-is NULL", {"rollout_is": None}),
        ("--rollout-is-threshold 3", {"rollout_is_threshold": 3.0}),
        ("--rollout-is-threshold 0.5_3", {"rollout_is_threshold": "0.5_3"}),
        ("--rollout-is-threshold none", {}),
        (
            "--rollout-is token --rollout-is-mode clamp --rollout-is-threshold-lower 1e-2",
            {"rollout_is": "token", "rollout_is_mode": "clamp", "rollout_is_threshold_lower": 0.01},
        ),
        (
            "--rollout-is-batch-normalize --rollout-is-batch-normalize-scope accepted",
            {"rollout_is_batch_normalize": True, "rollout_is_batch_normalize_scope": "accepted"},
        ),
        (
            "--rollout-rs token_k1,opsm --rollout-rs-threshold 2,0.01 --rollout-rs-threshold-lower 0.25",
            {"rollout_rs": "token_k1,opsm", "rollout_rs_threshold": "2,0.01", "rollout_rs_threshold_lower": 0.25},
        ),
        (
            "--rollout-token-veto-threshold 1e-4 --rejection-denominator original --bad-log-probs reject_token",
            {
                "rollout_token_veto_threshold": 1e-4,
                "rejection_denominator": "original",
                "bad_log_probs": "reject_token",
            },
        ),
        ("--metric-prefix none", {"metric_prefix": "none"}),
        ("--bypass-mode --loss-type reinforce", {"bypass_mode": True, "loss_type": "reinforce"}),
        ("--no-bypass-mode --no-rollout-is-batch-normalize", {}),
        ("--no-rollout-is-apply", {"rollout_is_apply": False}),
        ("--rollout-is-apply", {}),
        ("--rollout-staleness-scale 1:1.5,4:2", {"rollout_staleness_scale": "1:1.5,4:2"}),
        ("--rollout-staleness-scale none --no-proximal-interpolation", {}),
        ("--proximal-interpolation", {"proximal_interpolation": True}),
    ],
)
def test_flags_are_fields(line, fields):
    assert from_line(line) == RolloutCorrectionConfig(**fields)


@pytest.mark.parametrize(
    ("base", "line", "fields"),
    [
        ("decoupled_token_is", "--rollout-is-threshold 5", {"rollout_is": "token", "rollout_is_threshold": 5.0}),
        ("decoupled_token_is", "--rollout-is none", {"rollout_is": None}),
        ("decoupled_token_is", "--rollout-is sequence", {"rollout_is": "sequence", "rollout_is_threshold": 2.0}),
        (
            "decoupled_token_is",
            "--rollout-rs token_k1 --rollout-rs-threshold 0.9_1.1",
            {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_rs": "token_k1"}
            | {"rollout_rs_threshold": "0.9_1.1"},
        ),
        ("decoupled_k3_rs", "--rollout-rs none", {"rollout_is": None}),
        (
            "decoupled_k3_rs",
            "--rollout-rs token_k1 --rollout-rs-threshold 2",
            {"rollout_is": None, "rollout_rs": "token_k1", "rollout_rs_threshold": 2.0},
        ),
        # The same criterion keeps its bound, and another bound keeps its criterion.
        (
            "decoupled_k3_rs",
            "--rollout-rs seq_mean_k3",
            {"rollout_is": None, "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01},
        ),
        (
            "decoupled_k3_rs",
            "--rollout-rs-threshold 0.5",
            {"rollout_is": None, "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.5},
        ),
        (
            "decoupled_geo_rs@2025-11",
            "--rollout-token-veto-threshold none",
            {"rollout_is": None, "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.001},
        ),
        ("bypass_pg_is", "--no-bypass-mode", {"rollout_is": "sequence", "rollout_is_threshold": 2.0}),
        ("bypass_pg_is", "--rollout-is none", {"rollout_is": None, "bypass_mode": True, "loss_type": "reinforce"}),
        (
            "bypass_pg_is",
            "--loss-type ppo_clip --rollout-is none",
            {"rollout_is": None, "bypass_mode": True, "loss_type": "ppo_clip"},
        ),
        ("disabled", "--bypass-mode", {**MEASURED, "bypass_mode": True}),
        ("disabled", "--rollout-is sequence", {**MEASURED, "rollout_is": "sequence"}),
        ("disabled", "--rollout-is-mode mask", {**MEASURED, "rollout_is_mode": "mask"}),
        ("disabled", "--rollout-is-apply", {"rollout_is": "token", "rollout_is_threshold": 2.0}),
        ("disabled", "--rollout-is none", {"rollout_is": None}),
        ("decoupled_token_is", "--no-rollout-is-apply", MEASURED),
        (
            "decoupled_token_icepop",
            "--rollout-is-threshold 4",
            {"rollout_is": "token", "rollout_is_threshold": 4.0, "rollout_is_mode": "mask"},
        ),
        (
            "decoupled_token_icepop",
            "--rollout-is-threshold 4 --rollout-is-mode truncate",
            {"rollout_is": "token", "rollout_is_threshold": 4.0, "rollout_is_mode": "truncate"},
        ),
        ("decoupled_token_icepop", "--rollout-is none", {"rollout_is": None}),
    ],
)
def test_flags_override_the_preset_and_its_leftovers_go(base, line, fields):
    assert from_line(f"--rollout-correction-preset {base} {line}") == RolloutCorrectionConfig(**fields)


def test_what_looks_at_versions_goes_with_what_it_needs(tmp_path):
    path = tmp_path / "correction.yaml"
    path.write_text("rollout_is: token\nrollout_staleness_scale: 1:1.5\nproximal_interpolation: true\n")
    base = f"--rollout-correction-config {path}"
    kept = {"rollout_staleness_scale": "1:1.5"}
    assert from_line(f"{base} --bypass-mode") == RolloutCorrectionConfig("token", **kept, bypass_mode=True)
    assert from_line(f"{base} --rollout-is none") == RolloutCorrectionConfig(None, proximal_interpolation=True)
    with pytest.raises(ValueError, match="--proximal-interpolation: proximal_interpolation=True contradicts"):
        from_line("--rollout-correction-preset bypass_ppo_clip --proximal-interpolation")
    with pytest.raises(ValueError, match="--rollout-staleness-scale: rollout_staleness_scale='1:2' does nothing"):
        from_line("--rollout-is none --rollout-staleness-scale 1:2")


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


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("--rollout-is-threshold 4", {"rollout_is_threshold": 4.0}),
        ("--rollout-is-threshold 0.3_4", {"rollout_is_threshold": "0.3_4", "rollout_is_threshold_lower": None}),
        ("--rollout-is-mode mask", {"rollout_is_mode": "mask"}),
        ("--rollout-is-mode truncate", {"rollout_is_mode": "truncate", "rollout_is_threshold_lower": None}),
        (
            "--no-rollout-is-batch-normalize",
            {"rollout_is_batch_normalize": False, "rollout_is_batch_normalize_scope": "all"},
        ),
        (
            "--bypass-mode",
            {"bypass_mode": True, "rollout_is_batch_normalize": False, "rollout_is_batch_normalize_scope": "all"},
        ),
        (
            "--no-rollout-is-apply",
            {
                "rollout_is_apply": False,
                "rollout_is_batch_normalize": False,
                "rollout_is_batch_normalize_scope": "all",
            },
        ),
        ("--rollout-rs-threshold 3", {"rollout_rs_threshold": 3.0}),
        ("--rollout-rs-threshold 0.5_2", {"rollout_rs_threshold": "0.5_2", "rollout_rs_threshold_lower": None}),
        ("--rollout-rs none", {"rollout_rs": None, "rollout_rs_threshold": None, "rollout_rs_threshold_lower": None}),
    ],
)
def test_flags_override_the_file_and_its_leftovers_go(tmp_path, line, changed):
    (tmp_path / "base.yaml").write_text(FILE)
    base = RolloutCorrectionConfig.from_yaml(tmp_path / "base.yaml")
    config = from_line(f"--rollout-correction-config {tmp_path / 'base.yaml'} {line}")
    assert config == RolloutCorrectionConfig(**{**base.to_dict(), **changed})


LAUNCH_FILE = "--rollout-correction-preset decoupled_token_is --rollout-rs token_k1 --rollout-rs-threshold 0.9_1.1"


def over_a_file(file, line):
    """The config of flags over those of a launch file."""
    parser = add_rollout_correction_args(argparse.ArgumentParser())
    return rollout_correction_config_from_args(parser.parse_args(line.split()), parser.parse_args(file.split()))


@pytest.mark.parametrize("name", [*PRESETS, "geo_rs@2025-11"])
def test_a_preset_by_flag_replaces_what_a_launch_file_says(name, tmp_path):
    wanted = preset(*name.split("@"))
    assert over_a_file(LAUNCH_FILE, f"--rollout-correction-preset {name}") == wanted
    assert over_a_file(f"{LAUNCH_FILE} --bad-log-probs reject_token", f"--rollout-correction-preset {name}") == wanted
    (tmp_path / "fields.yaml").write_text("rollout_is: sequence\n")
    by_file = over_a_file(LAUNCH_FILE, f"--rollout-correction-config {tmp_path}/fields.yaml")
    assert by_file == RolloutCorrectionConfig(rollout_is="sequence")


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("", {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_rs": "token_k1"}),
        # A criterion of the file goes, and with it its bounds.
        ("--rollout-rs none", {"rollout_is": "token", "rollout_is_threshold": 2.0}),
        ("--rollout-is none", {"rollout_is": None, "rollout_rs": "token_k1"}),
        (
            "--rollout-correction-preset disabled --rollout-rs token_k2 --rollout-rs-threshold 1",
            {**MEASURED, "rollout_rs": "token_k2", "rollout_rs_threshold": 1.0},
        ),
        ("--rl-inference-logprobs-is-correction", {"rollout_is": "token", "rollout_is_threshold": UNTRUNCATED}),
        ("--bypass-mode --rollout-is none", {"rollout_is": None, "bypass_mode": True, "rollout_rs": "token_k1"}),
    ],
)
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
        (LAUNCH_FILE, "--rollout-correction-preset disabled --rollout-is-batch-normalize", "rollout_is_apply=False"),
        (LAUNCH_FILE, "--rollout-correction-preset disabled --rollout-rs-threshold 2", "--rollout-rs-threshold: "),
        ("--loss-type reinforce", "--rollout-is token", "--loss-type: loss_type='reinforce' names the objective"),
        ("--rollout-rs-threshold 2", "", "--rollout-rs-threshold: rollout_rs_threshold=2.0 does nothing without"),
        ("--rl-inference-logprobs-is-correction", "--rollout-is sequence", "--rollout-is contradict: give one of them"),
    ],
)
def test_flags_over_a_launch_file_that_cannot_work_are_named(file, line, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        over_a_file(file, line)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--rollout-is batch", "--rollout-is: rollout_is='batch' is unknown"),
        ("--rollout-is-threshold -1", "--rollout-is-threshold: rollout_is_threshold=-1.0 must be"),
        ("--rollout-is-threshold two", "--rollout-is-threshold: rollout_is_threshold='two' is not a number"),
        ("--rollout-is none --rollout-is-threshold 2", "--rollout-is-threshold: rollout_is_threshold=2.0 does nothing"),
        (
            "--rollout-is none --no-rollout-is-apply",
            "--rollout-is-apply: rollout_is_apply=False does nothing without rollout_is",
        ),
        (
            "--no-rollout-is-apply --rollout-is-batch-normalize",
            "--rollout-is-batch-normalize: rollout_is_batch_normalize=True does nothing with rollout_is_apply=False",
        ),
        (
            "--rl-inference-logprobs-is-correction --no-rollout-is-apply",
            "--rl-inference-logprobs-is-correction and --rollout-is-apply contradict",
        ),
        (
            "--rollout-is none --rollout-is-batch-normalize",
            "--rollout-is-batch-normalize: rollout_is_batch_normalize=True",
        ),
        (
            "--rollout-is-threshold-lower 0.1",
            "--rollout-is-threshold-lower: rollout_is_threshold_lower=0.1 does nothing",
        ),
        ("--rollout-rs-threshold 2", "--rollout-rs-threshold: rollout_rs_threshold=2.0 does nothing without"),
        ("--rollout-rs token_k1", "--rollout-rs: rollout_rs='token_k1' needs rollout_rs_threshold"),
        (
            "--rollout-token-veto-threshold low",
            "--rollout-token-veto-threshold: rollout_token_veto_threshold='low' must",
        ),
        ("--loss-type reinforce", "--loss-type: loss_type='reinforce' names the objective of bypass mode"),
        (
            "--bypass-mode --rollout-is-batch-normalize",
            "--rollout-is-batch-normalize: rollout_is_batch_normalize=True does",
        ),
        ("--bad-log-probs none", "--bad-log-probs: bad_log_probs=None is unknown"),
        ("--rollout-correction-preset best", "--rollout-correction-preset best: preset='best' is unknown"),
        ("--rollout-correction-preset geo_rs@", "--rollout-correction-preset geo_rs@: release='' is unknown"),
        (
            "--rollout-correction-preset geo_rs@2024",
            "--rollout-correction-preset geo_rs@2024: release='2024' is unknown",
        ),
        # Another criterion does not inherit the bound of the preset's.
        ("--rollout-correction-preset geo_rs --rollout-rs token_k3", "--rollout-rs: rollout_rs='token_k3' needs"),
        (
            "--rollout-correction-preset decoupled_k3_rs --rollout-is-mode mask",
            "--rollout-is-mode: rollout_is_mode='mask' does",
        ),
        (
            "--rollout-correction-preset bypass_pg_is --no-bypass-mode --loss-type reinforce",
            "--loss-type: loss_type='reinforce' names the objective of bypass mode",
        ),
        (
            "--rollout-correction-preset decoupled_token_icepop --rollout-is-mode truncate",
            "--rollout-is-threshold: rollout_is_threshold='0.5_5.0' has a lower bound that",
        ),
        ("--rollout-correction-preset disabled --rollout-correction-config x.yaml", "contradict: give one of them"),
        (
            "--rollout-correction-config x/none.yaml",
            "--rollout-correction-config x/none.yaml: x/none.yaml cannot be read: No such",
        ),
        ("--rl-importance-sampling-truncation-coef 2", "does nothing without --rl-inference-logprobs-is-correction"),
        (
            "--rl-inference-logprobs-is-correction --rl-importance-sampling-truncation-coef -2",
            "--rl-importance-sampling-truncation-coef -2.0: rollout_is_threshold=-2.0 must be",
        ),
        *(
            (f"--rl-inference-logprobs-is-correction {flag} {value}", f"and {flag} contradict: give one of them")
            for flag, value in (
                ("--rollout-is", "token"),
                ("--rollout-is", "none"),
                ("--rollout-is-threshold", "2"),
                ("--rollout-correction-preset", "disabled"),
                ("--rollout-correction-config", "x.yaml"),
            )
        ),
    ],
)
def test_flags_that_cannot_work_are_named(line, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        from_line(line)


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("", {"rollout_is_threshold": UNTRUNCATED}),
        ("--rl-importance-sampling-truncation-coef 10", {"rollout_is_threshold": 10.0}),
        (
            "--rl-importance-sampling-truncation-coef 10 --rollout-rs token_k3 --rollout-rs-threshold 1",
            {"rollout_is_threshold": 10.0, "rollout_rs": "token_k3", "rollout_rs_threshold": 1.0},
        ),
        (
            "--rollout-is-batch-normalize",
            {"rollout_is_threshold": UNTRUNCATED, "rollout_is_batch_normalize": True},
        ),
    ],
)
def test_megatrons_own_switch(line, fields):
    config = from_line(f"--rl-inference-logprobs-is-correction {line}")
    assert config == RolloutCorrectionConfig(rollout_is="token", **fields)
    assert from_flags("--no-rl-inference-logprobs-is-correction") == RolloutCorrectionConfig()


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


def test_files_that_are_wrong_are_named(tmp_path):
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ValueError, match=r"config .*list.yaml: .*expected lines of `field: value`, got list"):
        from_flags("--rollout-correction-config", str(tmp_path / "list.yaml"))
    (tmp_path / "open.yaml").write_text("a: {\n")
    with pytest.raises(ValueError, match="is not YAML: while parsing"):
        from_flags("--rollout-correction-config", str(tmp_path / "open.yaml"))
    (tmp_path / "field.yaml").write_text("rollout: token\n")
    with pytest.raises(ValueError, match=r"--rollout-correction-config .*field.yaml: unknown field 'rollout'"):
        from_flags("--rollout-correction-config", str(tmp_path / "field.yaml"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file or directory; name a YAML file with lines of `field: value`"),
        ("directory", "cannot be read: Is a directory; name a YAML file"),
        (b"rollout_is: \xff\xfe", "is no text: name a YAML file with lines of `field: value`"),
        (b"", "expected lines of `field: value`, got an empty file"),
    ],
)
@pytest.mark.parametrize("by_flag", [False, True])
def test_a_path_that_is_no_file_of_fields_is_named(tmp_path, content, message, by_flag):
    path = tmp_path / "fields.yaml"
    if content == "directory":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}:? {re.escape(message)}"):
        from_flags("--rollout-correction-config", str(path)) if by_flag else RolloutCorrectionConfig.from_yaml(path)


@pytest.mark.parametrize("dialect", ["megatron_rc", "verl"])
@pytest.mark.parametrize("fields", [None, "rollout_is", [("rollout_is", "token")]])
def test_fields_that_are_no_mapping_are_refused(fields, dialect):
    with pytest.raises(ValueError, match=f"fields is a {type(fields).__name__}: pass a dict"):
        RolloutCorrectionConfig.from_dict(fields, dialect)


def test_weights_are_on_where_only_a_criterion_is_given():
    """As README says of the default."""
    assert RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold=2.0).rollout_is == "sequence"


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
    words = ("--rollout-correction-config", str(tmp_path / "verl.yaml"), "--rollout-correction-dialect", "verl")
    wanted = {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_rs": "token_k1"}
    config = from_flags(*words)
    # verl's bounds are on 1/ρ.
    assert config == RolloutCorrectionConfig(**wanted, rollout_rs_threshold="0.25_2.0")
    assert any("apply to 1/ρ" in record.message for record in caplog.records)
    changed = from_flags(*words, "--rollout-is", "sequence")
    assert changed == RolloutCorrectionConfig(**wanted | {"rollout_is": "sequence"}, rollout_rs_threshold="0.25_2.0")
    assert changed.notes == config.notes
    assert over_a_file(" ".join(words), "--rollout-correction-preset disabled") == preset("disabled")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "unknown field 'algorithm' .*; a file of another program needs --rollout-correction-dialect"),
        ("--rollout-correction-dialect nemo", "verl.yaml: dialect='nemo' is unknown: use one of verl"),
        ("--rollout-correction-dialect slime", "a name of verl .*; a file of another program needs --rollout-"),
    ],
)
def test_a_file_of_another_program_without_its_name_says_so(tmp_path, line, message):
    (tmp_path / "verl.yaml").write_text(VERL)
    with pytest.raises(ValueError, match=f"--rollout-correction-config .*{message}"):
        from_line(f"--rollout-correction-config {tmp_path}/verl.yaml {line}")
    with pytest.raises(ValueError, match="--rollout-correction-dialect verl does nothing without"):
        from_line("--rollout-correction-dialect verl")


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("rollout_rs_threshold: 0.5_2", {"rollout_rs_threshold": "0.5_2"}),
        ("rollout_rs_threshold: 1_2", {"rollout_rs_threshold": "1_2"}),
        ("rollout_rs_threshold: '0.5_2'", {"rollout_rs_threshold": "0.5_2"}),
        ("rollout_rs_threshold: 2\nrollout_token_veto_threshold: 1e-4", {"rollout_token_veto_threshold": 1e-4}),
        ("rollout_rs_threshold: 2\nrollout_is_threshold: 1.5e1\n", {"rollout_is_threshold": 15.0}),
        ("rollout_rs_threshold: 2\nrollout_is_threshold: ~\n", {"rollout_is_threshold": None}),
    ],
)
def test_numbers_in_a_file_are_what_they_look_like(tmp_path, text, fields):
    (tmp_path / "rs.yaml").write_text(f"rollout_rs: token_k1\n{text}\n")
    config = RolloutCorrectionConfig.from_yaml(tmp_path / "rs.yaml")
    assert {name: getattr(config, name) for name in fields} == fields


def test_the_objective_from_megatrons_flags():
    args = argparse.Namespace(grpo_clamp_eps_lower=0.1, grpo_clamp_eps_upper=0.3, grpo_kl_beta=0.0, ppo_dual_clip=3.0)
    expected = PolicyLossConfig(clip_low=0.1, clip_high=0.3, dual_clip=3.0, kl_coef=0.0)
    assert policy_loss_config_from_args(args) == expected
    args.grpo_entropy_term_weight, args.ppo_dual_clip = 0.01, None
    expected = PolicyLossConfig(clip_low=0.1, clip_high=0.3, kl_coef=0.0, entropy_coef=0.01)
    assert policy_loss_config_from_args(args) == expected
    assert policy_loss_config_from_args(argparse.Namespace()) == PolicyLossConfig()
    args = argparse.Namespace(
        policy_loss="gspo", loss_aggregation="token-sum", loss_scale_factor=9.0, kl_estimator="k2", grpo_kl_beta=0.1
    )
    assert policy_loss_config_from_args(args) == PolicyLossConfig(
        algorithm="gspo", aggregation="token-sum", loss_scale_factor=9.0, kl_estimator="k2", kl_coef=0.1
    )
    for name, value in (
        ("grpo_clamp_eps_lower", 1.1),
        ("ppo_dual_clip", 0.5),
        ("grpo_kl_beta", -1.0),
        ("policy_loss", "sapo"),
        ("loss_aggregation", "mean"),
        ("loss_scale_factor", 2.0),
        ("kl_estimator", "k4"),
    ):
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')}"):
            policy_loss_config_from_args(argparse.Namespace(**{name: value}))


# Words.

DESCRIBED = [
    *(preset(name) for name in PRESETS),
    RolloutCorrectionConfig(),
    RolloutCorrectionConfig(
        rollout_is="geometric",
        rollout_is_threshold=3,
        rollout_is_mode="clamp",
        rollout_is_threshold_lower=0.1,
        rollout_is_batch_normalize=True,
        rollout_is_batch_normalize_scope="accepted",
        rollout_rs="seq_sum_k1,group_any,opsm,group_mean_k2,seq_max_k3",
        rollout_rs_threshold="2,0.01,1,1",
        rollout_rs_threshold_lower=0.1,
        rollout_token_veto_threshold=1e-6,
        rejection_denominator="original",
        bad_log_probs="reject_sequence",
        metric_prefix="mis match's/",
    ),
    RolloutCorrectionConfig.from_dict({"use_tis": True, "tis_mode": "mask", "tis_batch_normalize": True}, "slime"),
]


@pytest.mark.parametrize("config", DESCRIBED, ids=range(len(DESCRIBED)))
def test_the_flags_of_a_description_make_the_same_config(config):
    lines = config.describe().splitlines()
    (flags,) = [line for line in lines if line.startswith("flags: ")]
    assert from_flags(*shlex.split(flags.removeprefix("flags: "))) == config
    assert lines[lines.index(flags) + 1 :] == [f"note: {note}" for note in config.notes]


@pytest.mark.parametrize("config", DESCRIBED, ids=range(len(DESCRIBED)))
def test_a_config_is_the_same_in_another_process(config):
    for other in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert other == config
        assert hash(other) == hash(config)
        assert (other.is_bounds, other.criteria, other.notes) == (config.is_bounds, config.criteria, config.notes)


def test_a_description_says_every_fact():
    assert DESCRIBED[-2].describe().splitlines()[:-1] == [
        "decoupled: π_old is computed, ρ = π_old / π_rollout, PPO's ratio is π_θ / π_old",
        "sequence weights w = (Π ρ_t)^(1/n), the geometric mean, clamped to [0.1, 3]",
        "the weights are divided by their mean over the accepted sequences of the global batch",
        "rejects sequences whose Π ρ_t is outside [0.1, 2] (seq_sum_k1)",
        "rejects all responses of a prompt of which one is rejected as a whole (group_any)",
        "rejects sequences with A < 0 whose mean of -log ρ is above 0.01 nats (opsm)",
        "rejects all responses of a prompt whose mean k2 = ½(log ρ)² over their tokens is above 1 nats (group_mean_k2)",
        "rejects sequences whose largest k3 = ρ - 1 - log ρ is above 1 nats (seq_max_k3)",
        "rejects sequences with a token whose ρ_t is below 1e-06 (veto)",
        "the loss is averaged over all trained tokens, rejected ones too",
        "a NaN, infinite or positive log-prob at a trained position: its sequence is rejected and counted",
        "metrics are named mis match's/…",
    ]


@pytest.mark.parametrize(
    ("config", "fact"),
    [
        (preset("disabled"), "token weights w_t = ρ_t, truncated at 2"),
        (preset("disabled"), "the weights are measured, not applied"),
        (preset("decoupled_k3_rs"), "no importance weights"),
        (preset("disabled"), "no rejection by divergence"),
        (preset("decoupled_token_is"), "token weights w_t = ρ_t, truncated at 2"),
        (preset("decoupled_token_icepop"), "token weights w_t = ρ_t, 0 outside [0.5, 5]"),
        (
            preset("decoupled_geo_rs"),
            "rejects sequences whose geometric mean ρ is outside [0.999, 1.001] (seq_mean_k1)",
        ),
        (preset("bypass_ppo_clip"), "bypass: π_old := π_rollout, ρ = π_θ / π_rollout; PPO clips ρ itself"),
        (
            preset("bypass_ppo_clip", "2025-11"),
            "the weights are measured, not applied: the ratio of the loss is the correction",
        ),
        (preset("pg_is"), "bypass: π_old := π_rollout, ρ = π_θ / π_rollout; REINFORCE, without clipping"),
        (DESCRIBED[-1], "token weights w_t = ρ_t, not truncated"),
        (DESCRIBED[-1], "the weights are divided by their mean over the valid tokens of the global batch"),
        (DESCRIBED[-1], "the loss is averaged over all trained tokens, rejected ones too"),
    ],
)
def test_facts_of_a_description(config, fact):
    assert fact in config.describe().splitlines()


def test_abbreviations_are_off():
    parser = add_rollout_correction_args(argparse.ArgumentParser())
    with pytest.raises(SystemExit):
        parser.parse_args(["--rollout-correction-pre", "disabled"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"grpo_clamp_eps_lower": 2.0}, "--grpo-clamp-eps-lower: clip_low=2.0 must lie in"),
        ({"policy_loss": "ppo"}, "--policy-loss: algorithm='ppo' is unknown: use one of ppo_clip, reinforce"),
        ({"ppo_dual_clip": 3.0, "policy_loss": "cispo"}, "--ppo-dual-clip: dual_clip=3.0 does nothing with"),
        ({"loss_aggregation": "mean"}, "--loss-aggregation: aggregation='mean' is unknown"),
        ({"loss_scale_factor": 0.0}, "--loss-scale-factor: loss_scale_factor=0.0"),
        ({"grpo_kl_beta": -1.0}, "--grpo-kl-beta: kl_coef=-1.0 must be"),
        ({"kl_estimator": "k9"}, "--kl-estimator: kl_estimator='k9' is unknown"),
        ({"grpo_entropy_term_weight": -1.0}, "--grpo-entropy-term-weight: entropy_coef=-1.0 must be"),
    ],
)
def test_an_objective_that_cannot_work_is_refused_by_its_flag(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        policy_loss_config_from_args(argparse.Namespace(**given))
