"""The settings of the run that wrote a checkpoint, as they were resolved, beside its weights."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from megatron_rc.launch.errors import one_line
from megatron_rc.launch.run_config import RunConfig, sections_of
from megatron_rc.launch.training.checkpoints.folders import TRACKER, iteration_folder, latest_iteration

SETTINGS = "settings.json"


def settings_text(config: RunConfig) -> str:
    """Return the text of a checkpoint's ``settings.json``: every section of the run's settings by name."""
    sections = {name: getattr(config, name) for name, _, _ in sections_of(RunConfig)}
    known = {name: None if section is None else dataclasses.asdict(section) for name, section in sections.items()}
    return json.dumps(known, indent=1) + "\n"


def settings_beside(folder: Path) -> dict[str, Any]:
    """Return the sections beside one checkpoint; empty if the file is missing or damaged."""
    try:
        return _sections(folder / SETTINGS)
    except (OSError, ValueError, RecursionError):
        return {}


def checkpoint_settings(load: str | Path, iteration: int | None = None) -> dict[str, dict[str, Any] | None]:
    """Return the sections of the run that wrote a checkpoint, field by field; None for an absent section.

    ``load`` is the folder of all checkpoints, ``iteration`` the number of the checkpoint; None: the newest.

    Raises:
        ValueError: there is no such checkpoint, or it was written without settings, or they cannot be read.
    """
    number = latest_iteration(load) if iteration is None else iteration
    if number is None:
        raise ValueError(f"{load} holds no checkpoint ({TRACKER} is missing): name another folder")
    path = iteration_folder(load, number) / SETTINGS
    try:
        return _sections(path)
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing: checkpoint {number} says nothing of its model") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({one_line(error)})") from error


def _sections(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or not all(value is None or isinstance(value, dict) for value in found.values()):
        raise ValueError("expected one object for each section")
    return found
