"""Checks of prompts and of evaluations."""

from __future__ import annotations

from megatron_rc.launch.errors import ConfigurationError
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
