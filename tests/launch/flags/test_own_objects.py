"""Objectives and criteria of a user's module: named by a flag, then known by their own names."""

from unittest import mock

import pytest

from megatron_rc.advantages.estimators import GROUP_ESTIMATORS
from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.resolved_file import as_launch_file
from megatron_rc.loss.objectives import OBJECTIVES
from megatron_rc.settings.criteria import CRITERIA
from tests.support.recorded_training import flags, run_config

USER = "python:tests.support.user_objects"
RS = [f"--rollout-rs=token_k1,{USER}:SEQ_MIN", "--rollout-rs-threshold=0.5_2.5,0.01_100"]


@pytest.fixture(autouse=True)
def tables():
    """As they were."""
    with mock.patch.dict(OBJECTIVES), mock.patch.dict(CRITERIA), mock.patch.dict(GROUP_ESTIMATORS):
        yield


def test_an_objective_is_defined_by_the_flag_that_names_it(tmp_path):
    arguments = flags(tmp_path, f"--policy-loss={USER}:GOOD_ONLY")
    arguments = [word for word in arguments if "clamp-eps" not in word]
    for _ in range(2):  # the launcher reads the flags, and so do the ranks
        assert run_config(arguments).loss.algorithm == "own_good_only"
    bypass = ["--bypass-mode", f"--loss-type={USER}:GOOD_ONLY"]
    assert run_config([*arguments[:-1], *bypass]).correction.loss_type == "own_good_only"


def test_an_estimator_is_defined_by_the_flag_that_names_it(tmp_path):
    arguments = flags(tmp_path, f"--advantage-estimator={USER}:MAXRL")
    for _ in range(2):
        assert run_config(arguments).advantages.advantage_estimator == "own_maxrl"
    alone = ["--grpo-group-size=1", "--grpo-prompts-per-step=16"]
    with pytest.raises(ConfigurationError, match=r"--advantage-estimator own_maxrl .*--grpo-group-size 1"):
        run_config([*arguments, *alone])


def test_a_criterion_stands_in_the_list_beside_others_and_in_a_launch_file(tmp_path):
    config = run_config(flags(tmp_path, *RS))
    assert config.correction.rollout_rs == "token_k1,own_seq_min"
    assert "sequences whose smallest ρ_t" in config.correction.describe()
    path = tmp_path / "run.yaml"
    path.write_text(f"rollout-rs: {USER}:SEQ_MIN\nrollout-rs-threshold: 0.01_100\n")
    config = run_config([word for word in flags(tmp_path, f"--config={path}") if "rollout-rs" not in word])
    assert config.correction.rollout_rs == "own_seq_min"


@pytest.mark.parametrize(
    "words",
    [
        [*RS, f"--policy-loss={USER}:GOOD_ONLY", "--reward=python:tests.support.user_rewards:length"],
        [*RS, "--bypass-mode", f"--loss-type={USER}:GOOD_ONLY", f"--advantage-estimator={USER}:MAXRL"],
    ],
)
def test_the_file_that_a_run_leaves_names_them_too(tmp_path, words):
    words = [word for word in flags(tmp_path, *words) if "clamp-eps" not in word]
    config = run_config(words)
    path = tmp_path / "config.yaml"
    path.write_text(as_launch_file(config.flags))
    OBJECTIVES.pop("own_good_only")
    CRITERIA.pop("own_seq_min")
    GROUP_ESTIMATORS.pop("own_maxrl", None)
    again = run_config(["--cpu", f"--config={path}"])
    assert (again.loss.algorithm, again.correction) == ("own_good_only", config.correction)
    assert again.rewards == config.rewards
    assert again.advantages == config.advantages
    assert as_launch_file(again.flags) == as_launch_file(config.flags)


REFUSED = {
    f"--policy-loss={USER}:SEQ_MIN": r"^--policy-loss \S+ .*Criterion.*Objective",
    f"--rollout-rs={USER}:GOOD_ONLY": r"^--rollout-rs \S+ .*Objective.*Criterion",
    f"--rollout-rs={USER}:TAKEN": r"^--rollout-rs \S+: .*'token_k3'",
    f"--advantage-estimator={USER}:SEQ_MIN": r"^--advantage-estimator \S+ .*Criterion.*AdvantageEstimator",
    "--advantage-estimator=grop": r"--advantage-estimator: .*'grop' .*grpo, grpo-no-std, .*gae, remax",
    "--policy-loss=ppo": r"^--policy-loss: .*'ppo'.*ppo_clip, reinforce",
    f"--rollout-rs={USER}:SEQ_MIN --rollout-rs-threshold=-1": r"^--rollout-rs-threshold",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_work_is_one_sentence(tmp_path, words):
    with pytest.raises(ConfigurationError, match=REFUSED[words]):
        run_config(flags(tmp_path, *words.split()))
