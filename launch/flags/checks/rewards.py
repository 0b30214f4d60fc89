"""Checks of the rule that scores responses."""

from __future__ import annotations

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.python_specs import is_python_spec
from megatron_rc.launch.rewards.outcome import LARGEST
from megatron_rc.launch.rewards.pool import check_loads
from megatron_rc.launch.rewards.rewarder import source_of
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.tasks import Task


def check_rewards(config: RunConfig, task: Task, samples: bool) -> None:
    """Check that there is a rule, and that a user's own rule loads, in a process of its own.

    Args:
        config: settings.
        task: task, which may have a rule of its own.
        samples: this run samples and scores responses.
    """
    rewards = config.rewards
    if not abs(rewards.reward_on_error) <= LARGEST:
        raise ConfigurationError(f"--reward-on-error {rewards.reward_on_error} must be a finite float32 number")
    if rewards.overlong == "penalise" and config.rollouts.load_rollouts:
        raise ConfigurationError(
            f"--overlong penalise does nothing with --load-rollouts {config.rollouts.load_rollouts}, which has "
            "rewards: use --overlong mask or keep"
        )
    if not samples:
        return
    source = source_of(config)
    if rewards.reward is None and task.reward is None:
        raise ConfigurationError(
            f"{source.name} has no rule that scores responses: give --reward exact, math-verify or "
            "python:pkg.module:function"
        )
    source.check()
    if is_python_spec(rewards.reward or config.task.task):
        check_loads(source)
