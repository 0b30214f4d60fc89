"""Forms in which users of other programs have their settings: overrides, dotted keys, W&B's files, resolved files."""

import pytest
import yaml

from megatron_rc.settings.config import RolloutCorrectionConfig

OVERRIDES = [
    "algorithm.adv_estimator=grpo",
    "algorithm.rollout_correction.rollout_is=token",
    "++algorithm.rollout_correction.rollout_is_threshold=0.5_5.0",
    "+algorithm.rollout_correction.rollout_rs=seq_mean_k3",
    "algorithm.rollout_correction.rollout_rs_threshold=0.01",
    "actor_rollout_ref.rollout.n=8",
    "~algorithm.rollout_correction.bypass_mode",
]
EXPECTED = RolloutCorrectionConfig(
    rollout_is="token",
    rollout_is_threshold="0.5_5.0",
    rollout_rs="seq_mean_k3",
    rollout_rs_threshold=0.01,
)


def test_overrides_of_hydra(tmp_path):
    assert RolloutCorrectionConfig.from_dict(OVERRIDES, "verl") == EXPECTED
    path = tmp_path / "overrides.yaml"
    path.write_text(yaml.safe_dump(OVERRIDES))
    assert RolloutCorrectionConfig.from_yaml(path, "verl") == EXPECTED


def test_dotted_keys():
    keys = {f"algorithm.rollout_correction.{name}": getattr(EXPECTED, name) for name in ("rollout_is", "rollout_rs")}
    keys |= {"algorithm": {"rollout_correction": {"rollout_is_threshold": "0.5_5.0", "rollout_rs_threshold": 0.01}}}
    assert RolloutCorrectionConfig.from_dict(keys, "verl") == EXPECTED
    with pytest.raises(ValueError, match=r"rollout_is has two values, 'token' and 'sequence'"):
        RolloutCorrectionConfig.from_dict({"a": {"rollout_is": "token"}, "a.rollout_is": "sequence"}, "verl")


def test_configs_of_wandb(tmp_path):
    """W&B writes each top-level setting as a mapping with its value."""
    correction = {"rollout_is": "token", "rollout_is_threshold": 3.0}
    content = {
        "wandb_version": 1,
        "_wandb": {"desc": None, "value": {"python_version": "3.12"}},
        "algorithm": {"desc": None, "value": {"gamma": 1.0, "rollout_correction": correction}},
        "trainer": {"desc": None, "value": {"nnodes": 1}},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    assert RolloutCorrectionConfig.from_yaml(path, "verl") == RolloutCorrectionConfig(**correction)
    flat = {
        "_wandb": {"value": {}},
        "use_vllm": {"value": True},
        "vllm_importance_sampling_mode": {"value": "token_mask"},
    }
    assert RolloutCorrectionConfig.from_dict(flat, "trl").rollout_is_mode == "mask"


@pytest.mark.parametrize(
    ("dialect", "content"),
    [
        ("nemo-rl", {"defaults": "../../grpo_math_1B.yaml", "loss_fn": {"use_importance_sampling_correction": True}}),
        ("verl", {"defaults": ["ppo_trainer", "_self_"], "algorithm": {"rollout_correction": {"rollout_is": "token"}}}),
    ],
)
def test_files_that_inherit_are_refused_by_name(dialect, content):
    with pytest.raises(ValueError, match=r"^defaults=.*resolved file"):
        RolloutCorrectionConfig.from_dict(content, dialect)


def test_todays_verl_file_is_not_octobers():
    """In silence there would be no correction: all settings of that release are flat in `algorithm`."""
    content = {"algorithm": {"gamma": 1.0, "rollout_correction": {"rollout_is": "token"}}}
    with pytest.raises(ValueError, match=r"unknown setting 'rollout_correction' of verl-2025-10.*dialect='verl'"):
        RolloutCorrectionConfig.from_dict(content, "verl-2025-10")


def test_an_unknown_setting_is_a_warning_if_the_ones_that_matter_are_there():
    section = {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_future": 1}
    with pytest.warns(UserWarning, match=r"'rollout_future' is no known setting of verl"):
        config = RolloutCorrectionConfig.from_dict({"algorithm": {"rollout_correction": section}}, "verl")
    assert config.rollout_is == "token"
    assert any("rollout_future" in note for note in config.notes)
    for wrong in ({"rollout_future": 1}, {"rollout_is": "token", "rollout_is_treshold": 2.0}):
        with pytest.raises(ValueError, match=r"unknown setting"):
            RolloutCorrectionConfig.from_dict({"rollout_correction": wrong}, "verl")


def test_slimes_second_function_masks():
    """``icepop_function`` of its loss.py: a weight outside of the bounds is 0; without it the weights are clamped."""
    flags = {"--use-tis": True, "--tis-clip-low": 0.5, "--tis-clip": 5.0}
    path = "slime.backends.megatron_utils.loss.icepop_function"
    config = RolloutCorrectionConfig.from_dict({**flags, "--custom-tis-function-path": path}, "slime")
    assert config.rollout_is_threshold == "0.5_5.0"
    assert config.is_mode == "mask"
    assert RolloutCorrectionConfig.from_dict(flags, "slime").is_mode == "clamp"
    with pytest.raises(ValueError, match=r"custom_tis_function_path='my\.weights' is not known"):
        RolloutCorrectionConfig.from_dict({**flags, "custom_tis_function_path": "my.weights"}, "slime")


def test_slimes_flags_beside_the_correction_are_notes():
    beside = {
        "--rollout-batch-size": 32,
        "--custom-config-path": "mis.yaml",
        "--get-mismatch-metrics": True,
        "--kl-loss-type": "low_var_kl",
        "--use-unbiased-kl": True,
    }
    config = RolloutCorrectionConfig.from_dict({"--use-tis": True, **beside}, "slime")
    assert config.rollout_is == "token"
    assert any("custom_config_path, get_mismatch_metrics" in note for note in config.notes)
    assert any("--kl-importance-weight" in note for note in config.notes)
    with pytest.raises(ValueError, match=r"unknown setting 'tis_cilp' of slime: did you mean tis_clip"):
        RolloutCorrectionConfig.from_dict({"use_tis": True, "tis_cilp": 3.0}, "slime")
