"""Prompts from the user's own files, and what the model is tried on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_rc.launch.run_config.options import option

EVAL_PROBLEMS = 96


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """Files of prompts, and what their rows hold where."""

    prompt_data: tuple[str, ...] | None = option(
        "train on the prompts of these files of JSON lines, or folders saved by the datasets library, each after its "
        "weight or all without: 0.7 a.jsonl 0.3 b.jsonl; instead of --task",
        metavar="[WEIGHT] PATH",
    )
    eval_data: tuple[str, ...] | None = option(
        "held-out prompts for --prompt-data, files likewise, without weights", metavar="PATH"
    )
    input_key: str = option("holds the prompt: a string, or a list of messages", default="prompt")
    label_key: str | None = option(
        "holds what the reward compares a response with; given, every row must have it; default: label"
    )
    overlong_prompts: Literal["drop", "error"] = option(
        "what becomes of prompts that leave no room for a response", default="drop"
    )


@dataclass(frozen=True, kw_only=True)
class EvaluationSection:
    """How often held-out problems are tried, and how."""

    eval_interval: int | None = option("optimizer steps between evaluations; default: none are made", positive=True)
    eval_problems: int = option(
        f"held-out problems of an evaluation; default: {EVAL_PROBLEMS}, all of --eval-data", positive=True
    )
