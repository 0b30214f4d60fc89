"""The correction's settings: accepted and refused values, and files."""

import argparse
import copy
import math
import pickle
import re

import pytest
import torch

from megatron_rc import correct_rollouts
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.description import flag_of
from megatron_rc.settings.fields import FIELDS
from megatron_rc.settings.flags import rollout_correction_config_from_args
from tests.settings.test_description import DESCRIBED


def test_criteria_are_parsed_into_bounds_on_the_statistic():
    config = RolloutCorrectionConfig(
        rollout_rs="token_k1, seq_mean_k3,token_k1,seq_sum_k1", rollout_rs_threshold="0.5_3,0.1,2"
    )
    assert config.rollout_is == "sequence"  # also where only criteria are given
    assert [(c.name, c.unit, [need.name for need in c.needs], c.lower, c.upper) for c in config.criteria] == [
        ("token_k1", "token", ["log_ratio"], math.log(0.5), math.log(3)),
        ("seq_mean_k3", "sequence", ["sum_k3"], -math.inf, 0.1),
        ("seq_sum_k1", "sequence", ["log_ratio"], math.log(0.5), math.log(2)),
    ]
    config = RolloutCorrectionConfig(
        rollout_rs="opsm,group_any,token,geometric,seq_max_k2",  # with names of the first releases
        rollout_rs_threshold="0.01,2,1.5,0.3",
        rollout_rs_threshold_lower="0.1,0.9",
    )
    assert [(c.name, c.unit, c.lower) for c in config.criteria] == [
        ("opsm", "sequence", -0.01),
        ("group_any", "prompt", -math.inf),
        ("token_k1", "token", math.log(0.1)),
        ("seq_mean_k1", "sequence", math.log(0.9)),
        ("seq_max_k2", "sequence", -math.inf),
    ]
    assert config.needs_prompts
    assert config.rejects
    assert not RolloutCorrectionConfig.decoupled_token_is().rejects


@pytest.mark.parametrize(
    ("fields", "mode", "bounds"),
    [
        ({}, "truncate", (0.5, 2.0)),
        ({"rollout_is_threshold": "0.5_5"}, "mask", (0.5, 5.0)),
        ({"rollout_is_threshold": "0.5_5", "rollout_is_mode": "clamp"}, "clamp", (0.5, 5.0)),
        ({"rollout_is_threshold": 4.0, "rollout_is_mode": "mask"}, "mask", (0.25, 4.0)),
        ({"rollout_is_mode": "clamp", "rollout_is_threshold_lower": 0.1}, "clamp", (0.1, 2.0)),
    ],
)
def test_the_bounds_of_the_weights(fields, mode, bounds):
    config = RolloutCorrectionConfig(**fields)
    assert (config.is_mode, config.is_bounds) == (mode, bounds)


@pytest.mark.parametrize(
    "fields",
    [
        {"rollout_is": None, "rollout_rs": "token_k1", "rollout_rs_threshold": "1.0_1.0"},
        {"rollout_is": None, "rollout_rs": "token_k1", "rollout_rs_threshold": 1.0},
        {"rollout_is": None, "rollout_rs": "token_k1", "rollout_rs_threshold": 1.0, "rollout_rs_threshold_lower": 1.0},
        {"rollout_is": "token", "rollout_is_threshold": "1.0_1.0"},
        {"rollout_is": "token", "rollout_is_threshold": 1.0, "rollout_is_mode": "mask"},
    ],
    ids=str,
)
def test_equal_bounds_take_equal_log_probs_alone(fields):
    """As in verl and NeMo-RL."""
    rollout = torch.tensor([[-1.0, -1.0, -1.0, -1.0]])
    old = torch.tensor([[-1.0, -1.001, -0.999, -1.0]])
    result = correct_rollouts(old, rollout, torch.ones(1, 4, dtype=torch.bool), RolloutCorrectionConfig(**fields))
    is_used = result.mask if result.weights is None else result.weights > 0
    assert is_used.tolist() == [[True, False, False, True]]
    assert all(map(math.isfinite, result.metrics().values()))
    assert result.distributions()


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
        ({"rollout_is_threshold": 0.0}, "rollout_is_threshold=0.0 must be a finite positive number"),
        ({"rollout_is_threshold": "2_1"}, "must not lie above the upper one"),
        ({"rollout_is_threshold_lower": 0.1}, "does nothing with rollout_is_mode='truncate'"),
        ({"rollout_is": None, "rollout_is_threshold": 2.0}, "does nothing without rollout_is"),
        ({"rollout_is_apply": False, "rollout_is_batch_normalize": True}, "does nothing with rollout_is_apply=False"),
        ({"rollout_is_batch_normalize_scope": "accepted"}, "does nothing without rollout_is_batch_normalize"),
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 1}, "rollout_rs='token_k4' is unknown"),
        ({"rollout_rs": "group_any"}, "'group_any' tests the rejection by other criteria"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5"}, "must not lie above the upper one"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "a_2"}, "'a' is not a number: give digits, such as 2.0"),
        ({"rollout_rs": "token_k3", "rollout_rs_threshold": "0.5_2"}, "token_k3 takes one upper bound, in nats"),
        ({"rollout_rs": "token_k1,token_k2", "rollout_rs_threshold": "1,2,3"}, "3 bounds for 2 criteria"),
        ({"rollout_rs": "opsm", "rollout_rs_threshold": -0.1}, "opsm takes one number, 0 or more"),
        # float() would read 0_1 as 1.
        ({"rollout_rs": "opsm", "rollout_rs_threshold": "0_1"}, "'0_1' must be one number, not a pair"),
        (
            {"rollout_rs": "token_k3", "rollout_rs_threshold": 1, "rollout_rs_threshold_lower": 0.1},
            "only k1 criteria have a lower bound",
        ),
        ({"use_policy_gradient": False, "loss_type": "reinforce", "bypass_mode": True}, "contradicts loss_type="),
        ({"bypass_mode": True, "rollout_is_batch_normalize": True}, "applies no weights: drop it"),
        ({"bypass_mode": True, "rollout_rs": "group_mean_k3", "rollout_rs_threshold": 1}, "rollout_rs=group_mean_k3"),
        ({"rolout_is": "token"}, "unknown field 'rolout_is' of the rollout correction: known are rollout_is, "),
    ],
)
def test_what_cannot_work_is_refused(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        RolloutCorrectionConfig.from_dict(fields)


@pytest.mark.parametrize("value", [b"two", math.nan, [1]], ids=str)
@pytest.mark.parametrize("name", [*FIELDS, "use_policy_gradient"])
def test_what_no_field_takes_is_named(name, value):
    fields = {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}
    fields |= {"rollout_is_mode": "clamp"} if name == "rollout_is_threshold_lower" else {}
    with pytest.raises(ValueError, match=re.escape(name)) as raised:
        RolloutCorrectionConfig(**fields | {name: value})
    assert str(raised.value).startswith((f"{name}={value!r} ", f"{name}={str(value)!r} "))
    if name in FIELDS:
        with pytest.raises(ValueError, match=f"^{flag_of(name)}: {name}="):
            rollout_correction_config_from_args(argparse.Namespace(**fields | {name: value}))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"rollout_is: \xff\xfe", "is no text: name a YAML file with lines of `field: value`"),
        (b"", "expected lines of `field: value`, got an empty file"),
        (b"- 1\n", "expected lines of `field: value`, got list"),
        (b"a: {\n", "is not YAML"),
    ],
)
def test_a_path_that_is_no_file_of_fields_is_named(tmp_path, content, message):
    path = tmp_path / "fields.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}:? {re.escape(message)}"):
        RolloutCorrectionConfig.from_yaml(path)


def test_numbers_in_a_file_are_what_they_look_like(tmp_path):
    text = "rollout_rs: token_k1\nrollout_rs_threshold: 0.5_2\nrollout_is_threshold: 1.5e1\n"
    (tmp_path / "rs.yaml").write_text(f"{text}rollout_token_veto_threshold: 1e-4\n")
    config = RolloutCorrectionConfig.from_yaml(tmp_path / "rs.yaml")
    assert (config.rollout_rs_threshold, config.rollout_is_threshold) == ("0.5_2", 15.0)
    assert config.rollout_token_veto_threshold == 1e-4
    nested = "algorithm:\n  rollout_correction:\n    rollout_is: token\n    rollout_is_threshold: 0.5_2\n"
    (tmp_path / "verl.yaml").write_text(nested)
    assert RolloutCorrectionConfig.from_yaml(tmp_path / "verl.yaml", "verl").is_bounds == (0.5, 2.0)


@pytest.mark.parametrize("config", DESCRIBED, ids=range(len(DESCRIBED)))
def test_a_config_is_the_same_in_another_process(config):
    for copied in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert copied == config
        assert hash(copied) == hash(config)
        assert (copied.is_bounds, copied.criteria, copied.notes) == (config.is_bounds, config.criteria, config.notes)
