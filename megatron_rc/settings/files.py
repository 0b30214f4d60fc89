"""YAML files of fields by name, with numbers as they were written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SCIENTIFIC = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


def read_fields(path: Path) -> dict[str, Any]:
    """The fields of a file; ValueError, with path and remedy, if there is none, or it holds no text or no mapping."""
    import yaml

    text = _read_text(path)
    try:
        fields, written = yaml.safe_load(text), yaml.load(text, yaml.BaseLoader)
    # YAML raises ValueError for an impossible date, and RecursionError for too deep nesting.
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(fields, dict):
        got = "an empty file" if fields is None else type(fields).__name__
        raise ValueError(f"{path}: expected lines of `field: value`, got {got}")
    return _as_written(fields, written)


def _read_text(path: Path) -> str:
    remedy = "name a YAML file with lines of `field: value`"
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; {remedy}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text: {remedy}") from error


def _as_written(fields: dict[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """Undo YAML 1.1's reading of numbers, at any depth: 0.5_2 and 1:0.8 are pairs, not 0.52 and 60.8; 1e-4 is one."""
    for name, value in fields.items():
        text = written.get(name)
        if isinstance(value, dict) and isinstance(text, dict):
            _as_written(value, text)
        elif isinstance(value, (int, float)) and isinstance(text, str) and re.search("[_:]", text):
            fields[name] = text
        elif isinstance(value, str) and _SCIENTIFIC.fullmatch(value):
            fields[name] = float(value)
    return fields
