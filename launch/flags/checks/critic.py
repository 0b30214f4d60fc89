"""The critic: when it learns, how fast, and which of the correction its loss can have."""

from __future__ import annotations

from pathlib import Path

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.critic import CriticSection


def check_critic(config: RunConfig) -> None:
    """Whether the critic's settings go together, and with the run's."""
    critic = config.critic
    if config.training.optimizer_offload and config.megatron.given.get("optimizer_cpu_offload"):
        raise ConfigurationError(
            "--optimizer-offload moves the optimizer's state to the host and back, and --optimizer-cpu-offload leaves "
            "it there: drop one of them"
        )
    if critic is None:
        return
    _check_rates(critic, config.schedule.lr_decay_iters)
    _check_warm_up(critic, config)
    _check_correction(critic, config)
    if critic.critic_offload and config.megatron.given.get("optimizer_cpu_offload"):
        raise ConfigurationError(
            "--critic-offload moves the critic's optimizer, and --optimizer-cpu-offload leaves it in host memory: "
            "drop one of them"
        )
    folder = critic.critic_load_hf
    if folder is not None and not Path(folder).is_dir():
        raise ConfigurationError(f"--critic-load-hf {folder} is no folder: give the directory of a Hugging Face model")


def _check_rates(critic: CriticSection, decay: int) -> None:
    if critic.critic_min_lr > critic.critic_lr:
        raise ConfigurationError(f"--critic-min-lr {critic.critic_min_lr} is above --critic-lr {critic.critic_lr}")
    if critic.critic_lr_warmup_iters >= decay:
        raise ConfigurationError(
            f"--critic-lr-warmup-iters {critic.critic_lr_warmup_iters} must be below --lr-decay-iters {decay}"
        )


def _check_warm_up(critic: CriticSection, config: RunConfig) -> None:
    steps, each = critic.num_critic_only_steps, config.updates_per_rollout
    if steps >= config.training.train_iters:
        raise ConfigurationError(
            f"--num-critic-only-steps {steps} must be below --train-iters {config.training.train_iters}: the policy "
            "would never learn"
        )
    if steps % each:
        raise ConfigurationError(
            f"--num-critic-only-steps {steps} must be a multiple of the {each} optimizer steps of a rollout batch"
        )


def _check_correction(critic: CriticSection, config: RunConfig) -> None:
    wanted, correction = critic.correct_values, config.correction
    if wanted != "none" and correction.corrects_in_loss:
        raise ConfigurationError(
            f"--correct-values {wanted} needs what the policy's loss alone knows with --bypass-mode or "
            "--proximal-interpolation: use --correct-values none, or correct before the loss"
        )
    if wanted == "weights" and (correction.rollout_is is None or not correction.rollout_is_apply):
        raise ConfigurationError(
            "--correct-values weights does nothing without importance weights: use mask, or give --rollout-is"
        )
