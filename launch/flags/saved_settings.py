"""The settings of the run that wrote a checkpoint, as they were resolved, beside its weights."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from megatron_rc.launch.errors import one_line
from megatron_rc.launch.run_config import RunConfig, sections_of

SETTINGS = "settings.json"


def settings_text(config: RunConfig) -> str:
    """Return the text of a checkpoint's ``settings.json``: every section of the run's settings by name."""
    sections = {name: getattr(config, name) for name, _, _ in sections_of(RunConfig)}
    settings = {name: None if section is None else dataclasses.asdict(section) for name, section in sections.items()}
    return json.dumps(settings, indent=1) + "\n"


def checkpoint_settings(folder: Path) -> dict[str, dict[str, Any] | None]:
    """Return the sections of the run that wrote the checkpoint in this folder; None for an absent section.

    Raises:
        ValueError: it was written without settings, or they cannot be read.
    """
    path = folder / SETTINGS
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing: the checkpoint says nothing of its model") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({one_line(error)})") from error
    if not isinstance(settings, dict) or not all(
        value is None or isinstance(value, dict) for value in settings.values()
    ):
        raise ValueError(f"{path} cannot be read (expected one object for each section)")
    return settings


def settings_beside(folder: Path) -> dict[str, Any]:
    """Return the sections beside one checkpoint; empty if the file is missing or damaged."""
    try:
        return checkpoint_settings(folder)
    except ValueError:
        return {}
