"""Settings of prompt files and of evaluations."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from megatron_rc.launch.run_config.options import Section, option

EVAL_PROBLEMS = 96
# A word NAME=PATH; a path that has such a beginning itself is written as ./NAME=PATH.
_NAMED = re.compile(r"([A-Za-z0-9][\w.-]*)=(.+)", re.ASCII | re.DOTALL)


class EvalFile(NamedTuple):
    """A file of held-out prompts."""

    name: str  # name of its metrics, eval/<name>/…
    path: str


def eval_files(words: Sequence[str]) -> list[EvalFile]:
    """Return the files that ``--eval-data`` names, by PATH or NAME=PATH; the default name is the path's last part."""
    files = []
    for word in words:
        named = _NAMED.fullmatch(word)
        if named:
            files.append(EvalFile(named[1], named[2]))
        else:
            files.append(EvalFile(re.sub(r"[^\w.-]", "_", Path(word).stem, flags=re.ASCII), word))
    return files


@dataclass(frozen=True, kw_only=True)
class DataSection(Section):
    """Files of prompts, and the keys of their rows.

    ``rows_digest``: hash of all rows, independent of the files' paths; None without files.
    """

    prompt_data: tuple[str, ...] | None = option(
        "train on prompts from files instead of a task: JSON lines, .parquet, .csv, or folders of the datasets "
        "library; give a weight before each path (0.7 a.jsonl 0.3 b.jsonl), or before none",
        metavar="PATH",
    )
    eval_data: tuple[str, ...] | None = option(
        "held-out prompts, from files as for --prompt-data, without weights; several files, and those that are given "
        "as NAME=PATH, have metrics of their own, eval/NAME/...",
        metavar="[NAME=]PATH",
    )
    eval_input_key: tuple[str, ...] | None = option(
        "--input-key of --eval-data: KEY for all its files, NAME=KEY for one; default: --input-key",
        metavar="[NAME=]KEY",
    )
    eval_label_key: tuple[str, ...] | None = option(
        "--label-key of --eval-data: KEY for all its files, NAME=KEY for one; default: --label-key",
        metavar="[NAME=]KEY",
    )
    input_key: str = option(
        "key of a row's prompt, which is a string or a list of messages; extra_info.question leads into an object",
        default="prompt",
    )
    label_key: str | None = option(
        "key of the answer for the reward, such as reward_model.ground_truth; if given, every row must have it; "
        "default: label"
    )
    tools_key: str | None = option(
        "key of the tools that the chat template shows, a list of their schemas; if given, every row must have it, as "
        "null or an empty list where there are none"
    )
    overlong_prompts: Literal["drop", "error"] = option(
        "prompts longer than --seq-length minus --max-response-length: drop and count them, or end at the start",
        default="drop",
    )
    rows_digest: int | None

    @property
    def eval_names(self) -> tuple[str, ...]:
        """Names of the files of ``--eval-data`` that have metrics of their own; a single file needs a name for it."""
        files = self.eval_data or ()
        if len(files) == 1 and not _NAMED.fullmatch(files[0]):
            return ()
        return tuple(file.name for file in eval_files(files))


@dataclass(frozen=True, kw_only=True)
class EvaluationSection(Section):
    """Interval and size of evaluations; ``eval_temperature`` None takes the most likely response."""

    eval_interval: int | None = option("optimizer steps between evaluations; default: no evaluations")
    eval_problems: int = option(
        f"held-out problems of an evaluation, from several files by turns; default: {EVAL_PROBLEMS}, or all of "
        "--eval-data"
    )
    eval_samples: int = option(
        "responses to each problem, for pass@1, pass@2, pass@4, ... up to this number", default=1
    )
    eval_temperature: float | None = option(
        "temperature of evaluations; default: greedy, or --rl-default-temperature if --eval-samples is above 1"
    )
    eval_answers: int = option(
        "problems whose graded answers an evaluation writes to eval/ in the run's folder", default=8, not_negative=True
    )
