"""Checks of prompts, of evaluations, and of the rule that scores responses."""

from __future__ import annotations

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.python_specs import is_python_spec
from megatron_rc.launch.rewards.outcome import LARGEST
from megatron_rc.launch.rewards.pool import check_loads
from megatron_rc.launch.rewards.rewarder import source_of
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.tasks import Task


def check_room(length: int, response: int) -> None:
    """Raise ConfigurationError if a response leaves no room for a prompt."""
    if response >= length:
        raise ConfigurationError(
            f"--max-response-length {response} leaves no room for a prompt in --seq-length {length}"
        )


def check_prompts(config: RunConfig, task: Task) -> None:
    """Check that the first rollout batch's prompts leave room for a response."""
    length, response = config.training.seq_length, config.rollouts.max_response_length
    check_room(length, response)
    problems = task.problems(0, config.rollouts.grpo_prompts_per_step)
    longest = max(len(task.text.encode(problem)) for problem in problems)
    if longest > length - response:
        raise ConfigurationError(
            f"--seq-length {length} is too short for --task {config.task.task}: it does not hold a prompt of {longest} "
            f"tokens and a response of up to {response}"
        )


def check_evaluation(config: RunConfig, task: Task) -> None:
    """Check the number of held-out problems, and the length of their prompts."""
    number, length = config.evaluation.eval_problems, config.training.seq_length
    if config.evaluation.eval_interval is None:
        return
    if number < config.data_parallel_size:
        raise ConfigurationError(
            f"--eval-problems {number} is less than the {config.data_parallel_size} data-parallel ranks: give more"
        )
    longest = max(len(task.text.encode(problem)) for problem in task.problems(0, number, held_out=True))
    if longest > length - config.rollouts.max_response_length:
        raise ConfigurationError(f"--seq-length {length} is too short for a held-out prompt of {longest} tokens")


def check_rewards(config: RunConfig, task: Task, samples: bool) -> None:
    """Check that there is a rule, and that a user's own rule loads, in a process of its own."""
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
