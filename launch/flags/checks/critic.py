"""Checks of the critic, and of optimizer states in host memory."""

from __future__ import annotations

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.run_config import RunConfig


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
        raise ConfigurationError(
            "--correct-values weights does nothing without importance weights: use mask, or give --rollout-is"
        )
