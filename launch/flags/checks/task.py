"""The task, whose prompts and responses fit the model."""

from __future__ import annotations

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.tasks import Task


def check_room(length: int, response: int) -> None:
    """Whether a response leaves room for a prompt at all."""
    if response >= length:
        raise ConfigurationError(
            f"--max-response-length {response} leaves no room for a prompt in --seq-length {length}"
        )


def check_prompts(config: RunConfig, task: Task) -> None:
    """Whether the first rollout batch's prompts leave room for a response."""
    length, response = config.training.seq_length, config.rollouts.max_response_length
    check_room(length, response)
    problems = task.problems(0, config.rollouts.grpo_prompts_per_step)
    longest = max(len(task.text.encode(problem)) for problem in problems)
    if longest > length - response:
        raise ConfigurationError(
            f"--seq-length {length} is too short for --task {config.task.task}: a prompt of {longest} tokens and a "
            f"response of up to {response} do not fit"
        )


def _in_flags(config: RunConfig) -> str:
    """Where the number of steps between two sets of weights comes from."""
    rollouts, training = config.rollouts, config.training
    if rollouts.rollout_staleness:
        return f"--rollout-staleness {rollouts.rollout_staleness}"
    return (
        f"--grpo-prompts-per-step {rollouts.grpo_prompts_per_step} · --grpo-group-size {rollouts.grpo_group_size} · "
        f"--grpo-iterations {rollouts.grpo_iterations} / --global-batch-size {training.global_batch_size}"
    )


def check_evaluation(config: RunConfig, task: Task) -> None:
    """Whether there is an engine, and enough problems, at the steps where held-out problems are tried."""
    interval, number, recorded = (
        config.evaluation.eval_interval,
        config.evaluation.eval_problems,
        config.rollouts.load_rollouts,
    )
    if interval is None:
        return
    if recorded:
        raise ConfigurationError(
            f"--eval-interval {interval} needs an engine, which --load-rollouts {recorded} has not: drop one of them"
        )
    unit = config.rollouts.rollout_staleness or config.updates_per_rollout
    if interval % unit:
        raise ConfigurationError(
            f"--eval-interval {interval} must be a multiple of the {unit} optimizer steps after which the engine gets "
            f"new weights ({_in_flags(config)})"
        )
    if number < config.data_parallel_size:
        raise ConfigurationError(
            f"--eval-problems {number} leaves some of the {config.data_parallel_size} data-parallel ranks without one: "
            "give more"
        )
    longest = max(len(task.text.encode(problem)) for problem in task.problems(0, number, held_out=True))
    length = config.training.seq_length
    if longest > length - config.rollouts.max_response_length:
        raise ConfigurationError(f"--seq-length {length} is too short for a held-out prompt of {longest} tokens")
