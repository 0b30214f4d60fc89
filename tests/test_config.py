"""The correction's settings: what is accepted, what is refused, and the flags beside them."""

import argparse
import math

import pytest

from megatron_rc import RolloutCorrectionConfig
from megatron_rc.arguments import add_rollout_correction_args, rollout_correction_config_from_args
from megatron_rc.config import PRESETS, preset

CORRECTION_FILES = "configs/rollout_correction"


def from_flags(*words):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    return rollout_correction_config_from_args(add_rollout_correction_args(parser).parse_args(words))


def test_criteria_are_parsed_into_bounds_on_the_statistic():
    config = RolloutCorrectionConfig(
        rollout_rs="token_k1, seq_mean_k3,token_k1,seq_sum_k1", rollout_rs_threshold="0.5_3,0.1,2"
    )
    assert [(c.name, c.aggregation, c.divergence) for c in config.criteria] == [
        ("token_k1", "token", "k1"),
        ("seq_mean_k3", "seq_mean", "k3"),
        ("seq_sum_k1", "seq_sum", "k1"),
    ]
    assert [c.lower for c in config.criteria] == [math.log(0.5), -math.inf, math.log(0.5)]
    assert [c.upper for c in config.criteria] == [math.log(3), 0.1, math.log(2)]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_a_round_trip(name):
    config = preset(name)
    assert RolloutCorrectionConfig.from_dict(config.to_dict()) == config
    assert from_flags("--rollout-correction-preset", name) == config


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_has_a_file(name, request):
    path = request.config.rootpath / CORRECTION_FILES / f"{name}.yaml"
    assert RolloutCorrectionConfig.from_yaml(path) == preset(name)
    assert from_flags("--rollout-correction-config", str(path)) == preset(name)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rollout_is": "tokens"}, "rollout_is='tokens' is unknown: use one of None, token, sequence, geometric"),
        ({"rollout_is_threshold": 0.0}, "rollout_is_threshold=0.0 must be a finite positive number"),
        ({"rollout_is_threshold": math.nan}, "rollout_is_threshold=nan must be"),
        ({"rollout_is_threshold": "2"}, "rollout_is_threshold='2' must be"),
        ({"rollout_is": None, "rollout_is_threshold": 2.0}, "does nothing without rollout_is"),
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 1}, "rollout_rs='token_k4' is unknown"),
        ({"rollout_rs": "token_k1"}, "needs rollout_rs_threshold"),
        ({"rollout_rs_threshold": 2.0}, "does nothing without rollout_rs"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "2_0.5"}, "must lie below the upper one"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5"}, "must lie below the upper one"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "-1_2"}, "must be a finite positive number"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "a_2"}, "'a' is not a number"),
        ({"rollout_rs": "token_k3", "rollout_rs_threshold": "0.5_2"}, "token_k3 takes one bound"),
        ({"rollout_rs": "token_k1,token_k2", "rollout_rs_threshold": "1,2,3"}, "3 bounds for 2 criteria"),
        ({"rejection_denominator": "all"}, "rejection_denominator='all' is unknown"),
        ({"rolout_is": "token"}, "unknown field 'rolout_is'"),
    ],
)
def test_what_cannot_work_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        RolloutCorrectionConfig.from_dict(fields)


def test_flags_override_the_preset():
    config = from_flags("--rollout-correction-preset", "decoupled_token_is", "--rollout-is-threshold", "5")
    assert (config.rollout_is, config.is_threshold) == ("token", 5)


def test_a_preset_and_a_file_contradict():
    with pytest.raises(ValueError, match="contradict: give one"):
        from_flags("--rollout-correction-preset", "disabled", "--rollout-correction-config", "x.yaml")


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        from_flags("--rollout-correction-config", str(tmp_path / "none.yaml"))
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ValueError, match="expected lines of `field: value`, got list"):
        from_flags("--rollout-correction-config", str(tmp_path / "list.yaml"))


def test_a_parser_that_has_an_option_keeps_its_own():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollout-is", default="token")
    args = add_rollout_correction_args(parser).parse_args([])
    assert rollout_correction_config_from_args(args).rollout_is == "token"


def test_a_pair_of_bounds_in_a_file_is_not_a_number_with_an_underscore(tmp_path):
    (tmp_path / "rs.yaml").write_text("rollout_is: null\nrollout_rs: token_k1\nrollout_rs_threshold: 0.5_2\n")
    (criterion,) = RolloutCorrectionConfig.from_yaml(tmp_path / "rs.yaml").criteria
    assert (criterion.lower, criterion.upper) == (math.log(0.5), math.log(2))
