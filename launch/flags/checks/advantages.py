"""Checks of the estimator of advantages, of the critic, and of optimizer states in host memory."""

from __future__ import annotations

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.run_config import RunConfig

# Estimators that give the only response to a prompt the advantage 0.
_OF_SEVERAL = ("grpo-passk", "grpo-passk-no-std", "rloo-vectorized")


def check_advantages(config: RunConfig) -> None:
    """Check that the estimator has the responses it needs, and that none of its settings cancels out."""
    wanted, rollouts, correction = config.advantages, config.rollouts, config.correction
    estimator = f"--advantage-estimator {wanted.advantage_estimator}"
    if wanted.advantage_estimator == "remax" and rollouts.load_rollouts:
        raise ConfigurationError(
            f"{estimator} asks the engine for the most likely response to each prompt, which --load-rollouts "
            f"{rollouts.load_rollouts} does not have: use another estimator"
        )
    if wanted.advantage_estimator in _OF_SEVERAL and rollouts.grpo_group_size == 1:
        raise ConfigurationError(
            f"{estimator} compares the responses to one prompt, and with --grpo-group-size 1 each would have the "
            "advantage 0: raise that, or use another estimator"
        )
    if rollouts.dynamic_sampling and rollouts.grpo_group_size == 1:
        raise ConfigurationError(
            f"--dynamic-sampling {rollouts.dynamic_sampling} would replace every prompt, because with "
            "--grpo-group-size 1 no two rewards differ: raise that, or drop it"
        )
    known_before = {
        "--advantage-scope accepted": wanted.advantage_scope == "accepted",
        "--advantage-baseline weighted": wanted.advantage_baseline == "weighted",
        estimator: wanted.needs_squares,
    }
    for flag, is_given in known_before.items():
        if is_given and correction.corrects_in_loss:
            mode = "--proximal-interpolation" if correction.proximal_interpolation else "--bypass-mode"
            raise ConfigurationError(
                f"{flag} needs log π_old and the correction before the loss, but {mode} finds both in the loss: drop "
                "one of the two"
            )
    if wanted.advantage_scope == "accepted" and not correction.rejects and correction.bad_log_probs == "error":
        raise ConfigurationError("--advantage-scope accepted does nothing without a rejection: give --rollout-rs")
    if wanted.advantage_baseline == "weighted" and rollouts.grpo_group_size == 1:
        raise ConfigurationError(
            "--advantage-baseline weighted does nothing with --grpo-group-size 1, where no response has a baseline: "
            "raise that, or drop it"
        )
    if wanted.advantage_baseline_weights == "correction" and not correction.applies_weights:
        raise ConfigurationError(
            "--advantage-baseline-weights correction needs importance weights: use ratio, or give --rollout-is"
        )
    _check_scaling(config)


def _check_scaling(config: RunConfig) -> None:
    wanted = config.advantages
    is_undone = {
        "grpo": config.rollouts.grpo_group_size > 1,
        "grpo-passk": True,
        # A mean that is subtracted at the last token reaches each token with another discount.
        "reinforce-pp": wanted.gamma == 1 or wanted.reward_scaling == "std",
        "reinforce-pp-baseline": True,
    }.get(wanted.advantage_estimator, False)
    if wanted.reward_scaling != "none" and is_undone and not (wanted.reward_clip or wanted.kl_in_reward):
        raise ConfigurationError(
            f"--reward-scaling {wanted.reward_scaling} does nothing with --advantage-estimator "
            f"{wanted.advantage_estimator}, which divides by a standard deviation afterwards: drop it, or add "
            "--reward-clip or --kl-in-reward"
        )


def check_critic(config: RunConfig) -> None:
    """Check the critic's correction, and that only one flag offloads an optimizer."""
    critic = config.critic
    offloads = {
        "--optimizer-offload": config.training.optimizer_offload,
        "--critic-offload": critic and critic.critic_offload,
    }
    for name, is_given in offloads.items():
        if is_given and config.megatron.given.get("optimizer_cpu_offload"):
            raise ConfigurationError(
                f"{name} moves the optimizer's state to the host and back, but --optimizer-cpu-offload keeps it there: "
                "drop one of them"
            )
    if critic is None:
        return
    wanted, correction = critic.correct_values, config.correction
    if wanted != "none" and correction.corrects_in_loss:
        raise ConfigurationError(
            f"--correct-values {wanted} needs a correction before the loss, but --bypass-mode and "
            "--proximal-interpolation make it in the policy's loss: use --correct-values none"
        )
    if wanted == "weights" and (correction.rollout_is is None or not correction.rollout_is_apply):
        raise ConfigurationError("--correct-values weights needs importance weights: use mask, or give --rollout-is")
