"""Settings of the critic that follow from the policy's."""

import pytest

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.configure import configure
from tests.support.recorded_training import flags, run_config

GAE = "--advantage-estimator=gae"


def check(tmp_path, *more):
    """The settings of a tiny run that corrects nothing but what ``more`` says."""
    words = [word for word in flags(tmp_path / "runs") if not word.startswith("--rollout-")]
    return run_config([*words, *more], engine=False)


def test_what_follows_from_the_policys_flags(tmp_path):
    assert check(tmp_path).critic is None
    critic = check(tmp_path, GAE, "--min-lr=1e-3").critic
    assert (critic.critic_lr, critic.critic_min_lr, critic.correct_values) == (0.02, 1e-3, "mask")
    assert (critic.num_critic_only_steps, critic.value_clip, critic.critic_load_hf) == (0, None, None)
    small = check(tmp_path, GAE, "--min-lr=1e-3", "--critic-lr=1e-4").critic
    assert (small.critic_lr, small.critic_min_lr) == (1e-4, 1e-4)
    assert check(tmp_path, GAE, "--bypass-mode", "--rollout-is=none").critic.correct_values == "none"
    # An optimizer with float32 weights has a state to offload.
    words = ["--optimizer=sgd", "--sgd-momentum=0", "--optimizer-offload", "--bf16", "--rollout-dtype=bf16"]
    assert check(tmp_path, *words).training.optimizer_offload


def test_megatrons_offload_and_this_one_are_not_mixed(tmp_path):
    words = [*flags(tmp_path / "runs", GAE), "--no-cpu", "--transformer-impl=local", "--optimizer-cpu-offload"]
    for name in ("--critic-offload", "--optimizer-offload"):
        with pytest.raises(ConfigurationError, match=f"{name} .*--optimizer-cpu-offload"):
            configure([*words, name], 1, engine=False, elsewhere=True)
    assert not configure(words, 1, engine=False, elsewhere=True)[0].critic.critic_offload
