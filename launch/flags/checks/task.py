"""Checks of prompts, of evaluations, and of the rule that scores responses."""

from __future__ import annotations

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.python_specs import is_python_spec
from megatron_rc.launch.rewards.outcome import LARGEST
from megatron_rc.launch.rewards.pool import check_loads
from megatron_rc.launch.rewards.rewarder import reply_source, source_of
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.tasks import Task
from megatron_rc.launch.tasks.labels import BUILT_IN, label_flaw, remedy_for
from megatron_rc.launch.tasks.prompt_data.source import PromptData


def check_room(length: int, response: int) -> None:
    """Raise ConfigurationError if a response leaves no room for a prompt."""
    if response >= length:
        raise ConfigurationError(
            f"--max-response-length {response} leaves no room for a prompt in --seq-length {length}"
        )


def check_prompts(config: RunConfig, task: Task) -> None:
    """Check the number of held-out problems, and that the first prompts leave room for a response."""
    length = config.training.seq_length
    response = config.rollouts.max_response_length
    dp = config.data_parallel_size
    evaluation = config.evaluation
    check_room(length, response)
    numbers = {"prompt": config.rollouts.grpo_prompts_per_step}
    if evaluation.eval_interval is not None:
        files = len(config.data.eval_names)
        if evaluation.eval_problems < dp:
            raise ConfigurationError(
                f"{config.typed('eval_problems')} is less than the {dp} data-parallel ranks: give more"
            )
        if evaluation.eval_problems < files:
            raise ConfigurationError(
                f"{config.typed('eval_problems')} is less than the {files} files of --eval-data: give at least one "
                "problem for each"
            )
        numbers["held-out prompt"] = evaluation.eval_problems
    for kind, number in numbers.items():
        problems = task.problems(0, number, held_out=kind == "held-out prompt")
        longest = max(len(task.text.encode(problem)) for problem in problems)
        if longest > length - response:
            raise ConfigurationError(
                f"{config.typed('seq_length')} is too short for --task {config.task.task}: it does not hold a {kind} "
                f"of {longest} tokens and a response of up to {response}"
            )


def _check_labels(config: RunConfig, task: Task, rule: str) -> None:
    """Check that a built-in rule can compare the labels of a task's first problems; files check each of their rows."""
    for number, problem in enumerate(task.problems(0, config.rollouts.grpo_prompts_per_step)):
        flaw = label_flaw(problem.label, rule)
        if flaw is not None:
            raise ConfigurationError(
                f"--task {config.task.task}: the label of problem {number} is {flaw}, and --reward {rule} compares "
                f"texts and numbers, or a list of them: {remedy_for(problem.label)}"
            )


def check_rewards(config: RunConfig, task: Task, samples: bool) -> None:
    """Check that there is a rule, and that a user's own rule loads, in a process of its own."""
    rewards = config.rewards
    if abs(rewards.reward_on_error) > LARGEST:
        raise ConfigurationError(f"{config.typed('reward_on_error')} must be a finite float32 number")
    if rewards.overlong == "penalise":
        _check_penalty(config)
    if not samples:
        return
    source = source_of(config)
    if rewards.reward is None and task.reward is None:
        raise ConfigurationError(
            f"{source.name} has no rule that scores responses: give --reward exact, math-verify or "
            "python:pkg.module:function"
        )
    source.check()
    if rewards.reward in BUILT_IN and not isinstance(task, PromptData):
        _check_labels(config, task, rewards.reward)
    if is_python_spec(rewards.reward or config.task.task):
        check_loads(source)
    if config.rollouts.max_turns > 1:
        check_loads(reply_source(config))


def _check_penalty(config: RunConfig) -> None:
    if config.rollouts.load_rollouts:
        raise ConfigurationError(
            f"--overlong penalise does nothing with {config.typed('load_rollouts')}, which has rewards: use --overlong "
            "mask or keep"
        )
    if config.rollouts.max_turns > 1:
        raise ConfigurationError(
            f"--overlong penalise does not know {config.typed('max_turns')}: its penalty is of responses of one turn; "
            "use --overlong mask or keep"
        )
    if (config.rewards.overlong_buffer or 0) > config.rollouts.max_response_length:
        raise ConfigurationError(
            f"{config.typed('overlong_buffer')} must be at most {config.typed('max_response_length')}"
        )
