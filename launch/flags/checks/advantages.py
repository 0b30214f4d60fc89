"""Checks of the estimator of advantages, of the critic, and of optimizer states in host memory."""

from __future__ import annotations

from megatron_rc.launch.flags.checks.refuse import refuse
from megatron_rc.launch.run_config import RunConfig

# Estimators that give the only response to a prompt the advantage 0.
_OF_SEVERAL = ("grpo-passk", "grpo-passk-no-std", "rloo-vectorized")


def check_advantages(config: RunConfig) -> None:
    """Check that the estimator has the responses it needs, and that none of its settings cancels out."""
    wanted, rollouts = config.advantages, config.rollouts
    estimator, is_alone = wanted.advantage_estimator, rollouts.grpo_group_size == 1
    is_undone = {
        "grpo": not is_alone,
        "grpo-passk": True,
        # A mean that is subtracted at the last token reaches each token with another discount.
        "reinforce-pp": wanted.gamma == 1 or wanted.reward_scaling == "std",
        "reinforce-pp-baseline": True,
    }.get(estimator, False)
    wrong = {
        "{advantage_estimator} asks the engine for the most likely response to each prompt, which {load_rollouts} does "
        "not have: use another estimator": estimator == "remax" and rollouts.load_rollouts,
        "{advantage_estimator} compares the responses to one prompt, and with {grpo_group_size} each would have the "
        "advantage 0: raise that, or use another estimator": estimator in _OF_SEVERAL and is_alone,
        "{advantage_baseline} does nothing with {grpo_group_size}, where no response has a baseline: raise that, or "
        "drop it": wanted.advantage_baseline != "group" and is_alone,
        "{dynamic_sampling} would replace every prompt, because with {grpo_group_size} no two rewards differ: raise "
        "that, or drop it": rollouts.dynamic_sampling and is_alone,
        "{reward_scaling} does nothing with {advantage_estimator}, which divides by a standard deviation afterwards: "
        "drop it, or add --reward-clip or --kl-in-reward": (
            wanted.reward_scaling != "none" and is_undone and not (wanted.reward_clip or wanted.kl_in_reward)
        ),
    }
    refuse(config, wrong)
    _check_needs_of_correction(config)


def _check_needs_of_correction(config: RunConfig) -> None:
    """Check that log π_old, rejections and weights are known before the loss, if advantages are made from them."""
    wanted, correction = config.advantages, config.correction
    of_accepted, weighs = wanted.advantage_scope == "accepted", wanted.advantage_baseline != "group"
    in_loss = "--proximal-interpolation" if correction.proximal_interpolation else "--bypass-mode"
    wrong = {
        "{advantage_scope} needs a rejection before the loss, but {in_loss} rejects in the loss: use all, or "
        "drop that": of_accepted and correction.corrects_in_loss,
        "{advantage_scope} does nothing without a rejection: give --rollout-rs": (
            of_accepted and not correction.rejects and correction.bad_log_probs == "error"
        ),
        "{advantage_baseline} needs log π_old before the loss, which {in_loss} does without: use group, or drop "
        "that": weighs and correction.corrects_in_loss,
        "{advantage_estimator} needs log π_old before the loss, which {in_loss} does without: use another estimator, "
        "or drop that": wanted.needs_squares and correction.corrects_in_loss,
        "{advantage_baseline_weights} needs importance weights: use ratio, or give --rollout-is": (
            weighs and wanted.advantage_baseline_weights == "correction" and not correction.applies_weights
        ),
    }
    refuse(config, wrong, in_loss=in_loss)


def check_critic(config: RunConfig) -> None:
    """Check the critic's correction, and that only one flag offloads an optimizer."""
    critic, correction = config.critic, config.correction
    stays, corrects = config.megatron.given.get("optimizer_cpu_offload"), critic and critic.correct_values
    twice = " moves the optimizer's state to the host and back, but {optimizer_cpu_offload} keeps it there: drop one"
    wrong = {
        "{optimizer_offload}" + twice: config.training.optimizer_offload and stays,
        "{critic_offload}" + twice: critic and critic.critic_offload and stays,
        "{correct_values} needs a correction before the loss, but --bypass-mode and --proximal-interpolation make it "
        "in the policy's loss: use --correct-values none": (
            corrects and corrects != "none" and correction.corrects_in_loss
        ),
        "{correct_values} needs importance weights: use mask, or give --rollout-is": (
            corrects == "weights" and not correction.applies_weights
        ),
    }
    refuse(config, wrong)
