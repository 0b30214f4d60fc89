"""What scores responses, and what is done with those that reach their longest length."""

from __future__ import annotations

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.python_specs import is_python_spec
from megatron_rc.launch.rewards.outcome import LARGEST
from megatron_rc.launch.rewards.pool import check_loads
from megatron_rc.launch.rewards.rewarder import source_of
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.tasks import Task


def check_rewards(config: RunConfig, task: Task, samples: bool) -> None:
    """Whether there is a rule, and a user's own can be loaded, which is tried in a process of its own.

    Args:
        config: the settings.
        task: that may have a rule of its own.
        samples: responses are sampled, and scored, in this run.
    """
    rewards = config.rewards
    if not abs(rewards.reward_on_error) <= LARGEST:
        raise ConfigurationError(
            f"--reward-on-error {rewards.reward_on_error} cannot be trained on: give a number that float32 holds"
        )
    _check_overlong(config)
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


def _check_overlong(config: RunConfig) -> None:
    buffer, longest = config.rewards.overlong_buffer, config.rollouts.max_response_length
    if config.rewards.overlong != "penalise":
        return
    if config.rollouts.load_rollouts:
        raise ConfigurationError(
            f"--overlong penalise changes rewards, and those of --load-rollouts {config.rollouts.load_rollouts} are "
            "recorded: use --overlong mask or keep"
        )
    if buffer is None:
        raise ConfigurationError("--overlong penalise needs --overlong-buffer N, the tokens over which it falls")
    if buffer > longest:
        raise ConfigurationError(f"--overlong-buffer {buffer} is more than --max-response-length {longest}: lower it")
