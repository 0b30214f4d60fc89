"""Settings of prompt files and of evaluations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_rc.launch.run_config.options import option

EVAL_PROBLEMS = 96


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """Files of prompts, and the keys of their rows.

    ``rows_digest``: hash of all rows, independent of the files' paths; None without files. ``order_digest``: hash of
    everything that the order of the training prompts depends on; None without files.
    """

    prompt_data: tuple[str, ...] | None = option(
        "train on prompts from JSON-lines files or folders of the datasets library, instead of a task; give a weight "
        "before each path (0.7 a.jsonl 0.3 b.jsonl), or before none",
        metavar="PATH",
    )
    eval_data: tuple[str, ...] | None = option(
        "held-out prompts, from files as for --prompt-data, without weights",
        needs="prompt_data eval_interval",
        metavar="PATH",
    )
    input_key: str = option(
        "key of a row's prompt, which is a string or a list of messages", default="prompt", needs="prompt_data"
    )
    label_key: str | None = option(
        "key of the answer for the reward; if given, every row must have it; default: label", needs="prompt_data"
    )
    tools_key: str | None = option(
        "key of the tools that the chat template shows, a list of their schemas; if given, every row must have it, as "
        "null or an empty list where there are none",
        needs="prompt_data apply_chat_template",
    )
    overlong_prompts: Literal["drop", "error"] = option(
        "prompts longer than --seq-length minus --max-response-length: drop and count them, or end at the start",
        default="drop",
        needs="prompt_data",
    )
    rows_digest: int | None
    order_digest: int | None


@dataclass(frozen=True, kw_only=True)
class EvaluationSection:
    """Interval and size of evaluations; ``eval_temperature`` None takes the most likely response."""

    eval_interval: int | None = option(
        "optimizer steps between evaluations; default: no evaluations", needs="!load_rollouts"
    )
    eval_problems: int = option(
        f"held-out problems of an evaluation; default: {EVAL_PROBLEMS}, or all of --eval-data", needs="eval_interval"
    )
    eval_samples: int = option(
        "responses to each problem, for pass@1, pass@2, pass@4, ... up to this number", default=1, needs="eval_interval"
    )
    eval_temperature: float | None = option(
        "temperature of evaluations; default: greedy, or --rl-default-temperature if --eval-samples is above 1",
        needs="eval_interval",
    )
    eval_answers: int = option(
        "problems whose graded answers an evaluation writes to eval/ in the run's folder",
        default=8,
        needs="eval_interval",
        not_negative=True,
    )
