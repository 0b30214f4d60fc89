"""Prompts from the user's own files, and how the model is tried on problems that are held out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_rc.launch.run_config.options import option

EVAL_PROBLEMS, EVAL_SAMPLES, EVAL_ANSWERS = 96, 1, 8


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """Files of prompts, and what their rows hold where.

    ``rows_digest``: of all rows, the same number where they are; None: there are no files.
    ``order_digest``: of all that the order of the training prompts follows from, likewise.
    """

    prompt_data: tuple[str, ...] | None = option(
        "train on the prompts of files of JSON lines, or folders saved by the datasets library, in the place of a "
        "task; all with weights (0.7 a.jsonl 0.3 b.jsonl), or none",
        metavar="PATH",
    )
    eval_data: tuple[str, ...] | None = option("held-out prompts for --prompt-data, likewise", metavar="PATH")
    input_key: str = option("key of a row's prompt, which is a string or a list of messages", default="prompt")
    label_key: str | None = option(
        "key of what the reward compares a response with; if given, every row must have it; default: label"
    )
    overlong_prompts: Literal["drop", "error"] = option(
        "prompts that leave no room for --max-response-length are left out and counted, or end the run at its start",
        default="drop",
    )
    rows_digest: int | None
    order_digest: int | None


@dataclass(frozen=True, kw_only=True)
class EvaluationSection:
    """How often, on how many problems, and with how many responses.

    ``eval_temperature``: None: the most likely response.
    """

    eval_interval: int | None = option("optimizer steps between evaluations; default: none are made", positive=True)
    eval_problems: int = option(
        f"held-out problems of an evaluation; default: {EVAL_PROBLEMS}, with --eval-data all of it", positive=True
    )
    eval_samples: int = option(
        f"responses to each of them, for pass@1, pass@2, pass@4, ... up to this; default: {EVAL_SAMPLES}",
        positive=True,
    )
    eval_temperature: float | None = option(
        "of these responses; default: one alone is the most likely one, several have --rl-default-temperature",
        positive=True,
    )
    eval_answers: int = option(
        "the first problems of an evaluation whose graded answers are written to eval/ in the run's folder; "
        f"default: {EVAL_ANSWERS}",
        not_negative=True,
    )
