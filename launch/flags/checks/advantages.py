"""Estimators of advantages, and what they need of the correction, the rollouts and the model."""

from __future__ import annotations

from megatron_rc.launch.errors import ConfigurationError, flag
from megatron_rc.launch.run_config import RunConfig

# They give 0 to the only response to a prompt.
OF_SEVERAL = ("grpo-passk", "grpo-passk-no-std", "rloo-vectorized")


def check_advantages(config: RunConfig) -> None:
    """Whether the estimator can be had, and none of its settings comes to nothing."""
    wanted = config.advantages
    for name in ("gamma", "gae_lambda"):
        value = getattr(wanted, name)
        if value > 1:
            raise ConfigurationError(f"{flag(name)} {value} must lie between 0 and 1")
    if wanted.advantage_estimator == "remax" and config.rollouts.load_rollouts:
        raise ConfigurationError(
            "--advantage-estimator remax asks the engine for the most likely response to each prompt, and "
            f"--load-rollouts {config.rollouts.load_rollouts} has none: use another estimator"
        )
    if wanted.advantage_estimator in OF_SEVERAL and config.rollouts.grpo_group_size == 1:
        raise ConfigurationError(
            f"--advantage-estimator {wanted.advantage_estimator} compares the responses to one prompt, and with "
            "--grpo-group-size 1 each would have the advantage 0: raise that, or use another estimator"
        )
    if wanted.advantage_scope == "accepted":
        _check_scope(config)
    _check_scaling(config)
    if config.rollouts.dynamic_sampling and config.rollouts.grpo_group_size == 1:
        raise ConfigurationError(
            f"--dynamic-sampling {config.rollouts.dynamic_sampling} would replace every prompt: with "
            "--grpo-group-size 1 no two rewards can differ; raise that, or drop it"
        )


def _check_scope(config: RunConfig) -> None:
    correction = config.correction
    if correction.corrects_in_loss:
        raise ConfigurationError(
            "--advantage-scope accepted needs to know what is rejected before the loss, which "
            f"{'--proximal-interpolation' if correction.proximal_interpolation else '--bypass-mode'} decides in it: "
            "use all, or drop that"
        )
    if not correction.rejects and correction.bad_log_probs == "error":
        raise ConfigurationError(
            "--advantage-scope accepted does nothing where nothing is rejected: give --rollout-rs, or drop it"
        )


def _check_scaling(config: RunConfig) -> None:
    wanted = config.advantages
    is_undone = {
        "grpo": config.rollouts.grpo_group_size > 1,
        "grpo-passk": True,
        # A mean that is taken off the reward at the end is taken off each token with another discount.
        "reinforce-pp": wanted.gamma == 1 or wanted.reward_scaling == "std",
        "reinforce-pp-baseline": True,
    }.get(wanted.advantage_estimator, False)
    if wanted.reward_scaling != "none" and is_undone and not (wanted.reward_clip or wanted.kl_in_reward):
        raise ConfigurationError(
            f"--reward-scaling {wanted.reward_scaling} does nothing with --advantage-estimator "
            f"{wanted.advantage_estimator}, which divides by a standard deviation afterwards: drop it, or add "
            "--reward-clip or --kl-in-reward"
        )
