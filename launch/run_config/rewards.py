"""Settings of rewards and of responses that reach the longest length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_rc.launch.run_config.options import option


@dataclass(frozen=True, kw_only=True)
class RewardSection:
    """Rule that scores responses, its processes, and responses without an end."""

    reward: str | None = option(
        "rule that scores responses: exact, math-verify or python:pkg.module:function; default: the task's own rule",
        needs="!load_rollouts",
        metavar="RULE",
    )
    reward_workers: int | None = option(
        "scoring processes of each data-parallel replica; default: cores of the machine per rank, at most 8",
        needs="!load_rollouts",
        positive=True,
    )
    reward_timeout: float = option(
        "seconds that scoring one response may take", default=10.0, needs="!load_rollouts", positive=True
    )
    reward_errors: Literal["continue", "stop"] = option(
        "a response that cannot be scored: give it --reward-on-error, or end the run",
        default="continue",
        needs="!load_rollouts",
    )
    reward_on_error: float = option(
        "reward of a response that cannot be scored", default=0.0, needs="!load_rollouts reward_errors=continue"
    )
    overlong: Literal["keep", "mask", "penalise"] = option(
        "a response that reaches --max-response-length without its end: train on it, leave it out, or subtract a "
        "penalty that grows over the last --overlong-buffer tokens",
        default="keep",
    )
    overlong_buffer: int | None = option(
        "tokens before --max-response-length over which the penalty grows",
        needs="overlong=penalise",
        positive=True,
        most="max_response_length",
    )
    overlong_penalty_factor: float = option(
        "penalty at --max-response-length", default=1.0, needs="overlong=penalise", positive=True
    )
