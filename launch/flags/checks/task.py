"""Checks of prompts, of evaluations, and of the rule that scores responses."""

from __future__ import annotations

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.checks.refuse import refuse
from megatron_rc.launch.python_specs import is_python_spec
from megatron_rc.launch.rewards.outcome import LARGEST
from megatron_rc.launch.rewards.pool import check_loads
from megatron_rc.launch.rewards.rewarder import reply_source, source_of
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
    check_room(config.training.seq_length, config.rollouts.max_response_length)
    longest, is_too_long = _longest(config, task, config.rollouts.grpo_prompts_per_step)
    too_short = "{seq_length} is too short for --task {task}: it does not hold a prompt of {longest} tokens and a "
    words = too_short + "response of up to {response}"
    refuse(
        config,
        {words: is_too_long},
        task=config.task.task,
        longest=longest,
        response=config.rollouts.max_response_length,
    )


def check_evaluation(config: RunConfig, task: Task) -> None:
    """Check the number of held-out problems, and the length of their prompts."""
    number, dp = config.evaluation.eval_problems, config.data_parallel_size
    if config.evaluation.eval_interval is None:
        return
    refuse(config, {"{eval_problems} is less than the {dp} data-parallel ranks: give more": number < dp}, dp=dp)
    longest, is_too_long = _longest(config, task, number, held_out=True)
    refuse(
        config, {"{seq_length} is too short for a held-out prompt of {longest} tokens": is_too_long}, longest=longest
    )


def _longest(config: RunConfig, task: Task, number: int, *, held_out: bool = False) -> tuple[int, bool]:
    """Tokens of the longest of the first prompts, and whether they leave too little room for a response."""
    longest = max(len(task.text.encode(problem)) for problem in task.problems(0, number, held_out=held_out))
    return longest, longest > config.training.seq_length - config.rollouts.max_response_length


def check_rewards(config: RunConfig, task: Task, samples: bool) -> None:
    """Check that there is a rule, and that a user's own rule loads, in a process of its own."""
    rewards = config.rewards
    wrong = {
        "{reward_on_error} must be a finite float32 number": not abs(rewards.reward_on_error) <= LARGEST,
        "{overlong} does nothing with {load_rollouts}, which has rewards: use --overlong mask or keep": (
            rewards.overlong == "penalise" and config.rollouts.load_rollouts
        ),
        "{overlong} does not know {max_turns}: its penalty is of responses of one turn; use --overlong mask or keep": (
            rewards.overlong == "penalise" and config.rollouts.max_turns > 1
        ),
    }
    refuse(config, wrong)
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
    if config.rollouts.max_turns > 1:
        check_loads(reply_source(config))
