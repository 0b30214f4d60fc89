"""Graded answers of a run, and notes about its checkpoints, records and errors, for its page."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rc.doctor.tables import object_of
from megatron_rc.launch.checkpoint_folders import iterations
from megatron_rc.launch.rollouts.evaluation import FOLDER
from megatron_rc.launch.training.reporting.config_yaml import Settings

ANSWERS, LONGEST = 40, 2000


def answers_of(folder: Path) -> dict[str, Any] | None:
    """Graded answers of the newest evaluation that has any: ``file``, ``files`` and ``rows``; None without any.

    Texts are cut to 2,000 characters, with a note.
    """
    files = sorted((folder / FOLDER).glob("step-*.jsonl"))
    for file in reversed(files):
        with file.open(encoding="utf-8", errors="replace") as lines:
            objects = [found for _, line in zip(range(ANSWERS), lines, strict=False) if (found := object_of(line))]
        if objects:
            return {"file": f"{FOLDER}/{file.name}", "files": len(files), "rows": list(map(_answer, objects))}
    return None


def notes_of(folder: Path, settings: Settings) -> list[str]:
    """Sentences about the run's checkpoints, its records, and its files of errors."""
    problems = (
        (folder / "reward-errors.jsonl", "Responses that could not be scored are in"),
        (folder / "bad", "Rollout batches or responses that could not be used are in"),
    )
    return [
        *_checkpoints(settings),
        *_records(folder, settings),
        *(f"{words} {path}." for path, words in problems if path.exists()),
    ]


def _answer(found: Mapping[str, Any]) -> dict[str, Any]:
    reward = found.get("reward")
    return {
        "prompt": _cut(_prompt(found.get("prompt"))),
        "response": _cut(str(found.get("response", ""))),
        "label": _cut("" if found.get("label") is None else str(found["label"])),
        "reward": float(f"{reward:.5g}") if isinstance(reward, int | float) and abs(reward) < 1e300 else None,
        "error": _cut(str(found.get("error") or "")),
    }


def _prompt(prompt: Any) -> str:
    """Text of a prompt; a conversation becomes one line per message."""
    if not isinstance(prompt, list):
        return str(prompt)
    return "\n".join(
        f"{one.get('role')}: {one.get('content')}" if isinstance(one, dict) else str(one) for one in prompt
    )


def _cut(text: str) -> str:
    more = len(text) - LONGEST
    return text if more <= 0 else f"{text[:LONGEST]} … {more} more characters"


def _checkpoints(settings: Settings) -> list[str]:
    save = settings.get("save")
    if save is None:
        return ["No checkpoint was written: the run had no --save."]
    found = iterations(settings.home / save)
    if not found:
        return [f"{save} holds no checkpoint."]
    steps = ", ".join(map(str, found[-12:]))
    older = f" and {len(found) - 12} older ones" if len(found) > 12 else ""
    return [f"Checkpoints in {save}: of step {steps}{older}."]


def _records(folder: Path, settings: Settings) -> list[str]:
    records = settings.get("save-rollouts")
    if records is None:
        return []
    if settings.get("save-log-probs") != "true":
        return [f"Rollouts are recorded in {records}, without log-probs of the trainer (--save-log-probs)."]
    batches, page = (shlex.quote(str(path)) for path in (settings.home / records, folder / "replay.html"))
    command = f"python -m megatron_rc.replay {batches} --preset decoupled_token_is --html {page}"
    return [f"Replay the recorded rollouts under another correction: {command}"]
