"""The critic's flags: what follows from the policy's, and the one sentence for each that cannot work."""

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


def test_where_the_loss_corrects_nothing_is_left_for_the_critic(tmp_path):
    assert check(tmp_path, GAE, "--bypass-mode", "--rollout-is=none").critic.correct_values == "none"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--critic-lr=0.1"], "--critic-lr 0.1 does nothing without a critic: give --advantage-estimator gae"),
        (["--value-clip=0.1"], "--value-clip 0.1 does nothing without a critic"),
        (["--critic-offload"], "--critic-offload does nothing without a critic"),
        (["--no-critic-offload"], "--no-critic-offload does nothing without a critic"),
        (["--num-critic-only-steps=2"], "--num-critic-only-steps 2 does nothing without a critic"),
        ([GAE, "--value-clip=0"], "--value-clip 0.0 must be positive"),
        ([GAE, "--critic-lr=nan"], "--critic-lr nan must be positive"),
        ([GAE, "--critic-min-lr=1", "--critic-lr-decay-style=linear"], "--critic-min-lr 1.0 is above --critic-lr 0.02"),
        ([GAE, "--critic-min-lr=1e-3"], "--critic-min-lr 0.001 does nothing with --critic-lr-decay-style constant"),
        ([GAE, "--critic-lr-warmup-iters=100"], "--critic-lr-warmup-iters 100 must be below --lr-decay-iters 100"),
        ([GAE, "--num-critic-only-steps=100"], "--num-critic-only-steps 100 must be below --train-iters 100"),
        ([GAE, "--num-critic-only-steps=3"], "--num-critic-only-steps 3 must be a multiple of the 2 optimizer steps"),
        ([GAE, "--critic-load-hf=nowhere"], "--critic-load-hf nowhere is no folder"),
        (
            [GAE, "--correct-values=mask", "--bypass-mode", "--rollout-is=none"],
            "--correct-values mask needs what the policy's loss alone knows with --bypass-mode",
        ),
        (
            [GAE, "--correct-values=weights", "--rollout-is=none"],
            "--correct-values weights does nothing without importance weights",
        ),
        ([GAE, "--correct-values=some"], "argument --correct-values: invalid choice"),
    ],
)
def test_what_cannot_work_is_one_sentence(tmp_path, words, message):
    with pytest.raises(ConfigurationError) as error:
        check(tmp_path, *words)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_optimizer_without_a_state_has_nothing_to_offload(tmp_path):
    words = ["--optimizer=sgd", "--sgd-momentum=0", "--optimizer-offload"]
    with pytest.raises(
        ConfigurationError, match="--optimizer-offload does nothing with --optimizer sgd, --sgd-momentum 0"
    ):
        check(tmp_path, *words)
    assert check(tmp_path, *words, "--bf16", "--rollout-dtype=bf16").training.optimizer_offload


def test_megatrons_offload_and_this_one_are_not_mixed(tmp_path):
    words = [*flags(tmp_path / "runs", GAE), "--no-cpu", "--transformer-impl=local", "--optimizer-cpu-offload"]
    with pytest.raises(ConfigurationError, match="--critic-offload moves the critic's optimizer, and --optimizer-cpu"):
        configure([*words, "--critic-offload"], 1, engine=False, elsewhere=True)
    with pytest.raises(ConfigurationError, match="--optimizer-offload moves the optimizer's state to the host"):
        configure([*words, "--optimizer-offload"], 1, engine=False, elsewhere=True)
    assert not configure(words, 1, engine=False, elsewhere=True)[0].critic.critic_offload
