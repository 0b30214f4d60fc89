"""Checks of the critic, and of optimizer states in host memory."""

from __future__ import annotations

from pathlib import Path

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.run_config import RunConfig


def check_critic(config: RunConfig) -> None:
    """Check the critic's learning rate, warm-up and correction, and that only one flag offloads an optimizer."""
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
    steps, each, last = critic.num_critic_only_steps, config.updates_per_rollout, config.training.train_iters
    warmup, decay = critic.critic_lr_warmup_iters, config.schedule.lr_decay_iters
    if critic.critic_min_lr > critic.critic_lr:
        raise ConfigurationError(f"--critic-min-lr {critic.critic_min_lr} is above --critic-lr {critic.critic_lr}")
    if warmup >= decay:
        raise ConfigurationError(f"--critic-lr-warmup-iters {warmup} must be below --lr-decay-iters {decay}")
    if steps >= last:
        raise ConfigurationError(
            f"--num-critic-only-steps {steps} must be below --train-iters {last}: the policy would never learn"
        )
    if steps % each:
        raise ConfigurationError(
            f"--num-critic-only-steps {steps} must be a multiple of the {each} optimizer steps of a rollout batch"
        )
    if critic.critic_load_hf is not None and not Path(critic.critic_load_hf).is_dir():
        raise ConfigurationError(
            f"--critic-load-hf {critic.critic_load_hf} is no folder: give the directory of a Hugging Face model"
        )
    wanted, correction = critic.correct_values, config.correction
    if wanted != "none" and correction.corrects_in_loss:
        raise ConfigurationError(
            f"--correct-values {wanted} needs a correction before the loss, but --bypass-mode and "
            "--proximal-interpolation make it in the policy's loss: use --correct-values none"
        )
    if wanted == "weights" and (correction.rollout_is is None or not correction.rollout_is_apply):
        raise ConfigurationError(
            "--correct-values weights does nothing without importance weights: use mask, or give --rollout-is"
        )
