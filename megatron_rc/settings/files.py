"""YAML files of settings by name, with numbers as they were written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SCIENTIFIC = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


def read_fields(path: Path) -> dict[str, Any] | list[str]:
    """Return the settings of a YAML file by name; settings inside of sections stay there.

    A file of Hydra's overrides (``.hydra/overrides.yaml``) is a list of texts.

    Raises:
        ValueError: with the path, if the file cannot be read, is no YAML, or holds no mapping.
    """
    import yaml

    text = _read_text(path)
    try:
        fields = yaml.safe_load(text)
        texts = yaml.load(text, yaml.BaseLoader)
    # YAML raises ValueError for an impossible date, and RecursionError for too deep nesting.
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error

    if isinstance(fields, list) and fields and all(isinstance(override, str) for override in fields):
        return fields
    if not isinstance(fields, dict):
        content = "an empty file" if fields is None else type(fields).__name__
        raise ValueError(f"{path}: expected lines of `field: value`, got {content}")
    return _as_written(fields, texts)


def _read_text(path: Path) -> str:
    remedy = "name a YAML file with lines of `field: value`"
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; {remedy}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text: {remedy}") from error


def _as_written(fields: dict[str, Any], texts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without YAML 1.1's odd numbers, at any depth.

    YAML 1.1 reads the pairs 0.5_2 and 1:0.8 as the numbers 0.52 and 60.8, and the number 1e-4 as a text.

    Args:
        fields: the settings as YAML reads them.
        texts: the same settings with every value as it is written.
    """
    result: dict[str, Any] = {}
    for name, value in fields.items():
        text = texts.get(name)
        if isinstance(value, dict) and isinstance(text, dict):
            result[name] = _as_written(value, text)
        elif isinstance(value, (int, float)) and isinstance(text, str) and re.search("[_:]", text):
            result[name] = text
        elif isinstance(value, str) and _SCIENTIFIC.fullmatch(value):
            result[name] = float(value)
        else:
            result[name] = value
    return result
