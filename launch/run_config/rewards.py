"""What scores responses, and what becomes of those that reach their longest length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_rc.launch.run_config.options import option


@dataclass(frozen=True, kw_only=True)
class RewardSection:
    """The rule, the processes it runs in, and responses without an end."""

    reward: str | None = option(
        "scores responses: exact, math-verify or python:pkg.module:function; default: the task's own rule",
        metavar="RULE",
    )
    reward_workers: int | None = option(
        "processes that score, for each data-parallel replica; default: the cores of the machine by its ranks, up to 8",
        positive=True,
    )
    reward_timeout: float = option("seconds to score one response", default=10.0, positive=True)
    reward_errors: Literal["continue", "stop"] = option(
        "a response that cannot be scored gets --reward-on-error, or ends the run", default="continue"
    )
    reward_on_error: float = option("reward of a response that cannot be scored", default=0.0)
    overlong: Literal["keep", "mask", "penalise"] = option(
        "a response that reaches --max-response-length without its end trains as any other, not at all, or with a "
        "reward that falls over the last --overlong-buffer tokens",
        default="keep",
    )
    overlong_buffer: int | None = option("tokens before the longest length over which the reward falls", positive=True)
    overlong_penalty_factor: float = option("what is taken off at the longest length", default=1.0, positive=True)
