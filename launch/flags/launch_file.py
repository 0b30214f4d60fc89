"""Launch files: YAML with one ``name: value`` a line; the name is a flag without its dashes.

Fields of the correction may be nested below ``rollout_correction:``, with underscores.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rc.launch.errors import ConfigurationError, require
from megatron_rc.launch.flags.hints import unknown
from megatron_rc.launch.flags.parser import parser_for, words_of
from megatron_rc.launch.run_config.rollouts import JSON
from megatron_rc.settings.flags import is_correction_flag

_CORRECTION = "rollout_correction"
# Number of processes of the file's run, which a dry run takes unless flags say otherwise.
_PROCESSES = "world-size"
CONFIGS = Path(__file__).resolve().parent.parent.parent / "configs"


@dataclass(frozen=True)
class _Line:
    """A setting of a launch file."""

    where: str  # the file, and the key that the line is nested below
    key: str  # name of the flag without dashes
    value: Any  # text, a list of texts, or a mapping
    is_nested: bool


def find_config(name: str) -> Path:
    """Return the path of a launch file, from a path or the name of a file in the package (``count_up``)."""
    for path in (Path(name), CONFIGS / "launch" / f"{name}.yaml"):
        if path.is_file():
            return path
    if Path(name).is_dir():
        raise ConfigurationError(f"--config {name} is a folder: name a file in it")
    names = ", ".join(sorted(path.stem for path in (CONFIGS / "launch").glob("*.yaml")))
    raise ConfigurationError(f"--config {name}: no such file; give a path, or one of the names {names}")


def processes_of_file(name: str) -> int | None:
    """Return the number of processes of a launch file's run; None if the file does not say."""
    path = find_config(name)
    number = _read_mapping(path).get(_PROCESSES)
    if number is None:
        return None
    if not isinstance(number, str) or not number.isdecimal() or not int(number):
        raise ConfigurationError(f"{path}: {_PROCESSES}: {number!r} must be a positive number of processes")
    return int(number)


def read_launch_file(name: str) -> list[str]:
    """Return the settings of a launch file as flags with their values."""
    path = find_config(name)
    lines = list(_lines(path))
    options = parser_for([f"--{line.key}" for line in lines])._option_string_actions
    arguments: list[str] = []
    keys_of_correction: set[str] = set()
    for line in lines:
        action = options.get(f"--{line.key}")
        if action is None or line.key in ("config", "help"):
            raise ConfigurationError(f"{line.where}: {_why_unknown(line)}")
        value = line.value
        if is_correction_flag(action.dest):
            if action.dest in keys_of_correction:
                raise ConfigurationError(f"{line.where}: {line.key} is given twice: keep one")
            keys_of_correction.add(action.dest)
        elif line.is_nested:
            raise ConfigurationError(
                f"{line.where}: {line.key} is no field of the correction: give it a line of its own"
            )
        # Programs with nested settings write null to turn a field off.
        if line.is_nested and value in ("null", "~") and action.nargs != 0:
            value = "none"
        if isinstance(value, dict) and action.metavar == JSON:
            value = _as_json(path, line.key)
        arguments += words_of(line.where, line.key, value)
    return arguments


def _why_unknown(line: _Line) -> str:
    if isinstance(line.value, dict):
        return f"unknown key {line.key!r}: only {_CORRECTION} is nested; give other flags a line of their own"
    return unknown("key", line.key)


def _lines(path: Path) -> Iterator[_Line]:
    """Yield the settings of a file; the correction's may be nested."""
    content = _read_mapping(path)
    content.pop(_PROCESSES, None)
    nested = content.pop(_CORRECTION, {})
    if not isinstance(nested, dict):
        raise ConfigurationError(f"{path}: {_CORRECTION}: {nested!r} must be lines of `field: value` below it")
    for key, value in content.items():
        yield _Line(str(path), key, value, is_nested=False)
    for key, value in nested.items():
        yield _Line(f"{path}: below {_CORRECTION}", str(key).replace("_", "-"), value, is_nested=True)


def _as_json(path: Path, key: str) -> str:
    """Return a nested entry of a file as JSON, read again because :func:`_read_mapping` keeps its values as texts."""
    import yaml

    return json.dumps(yaml.safe_load(path.read_text(encoding="utf-8"))[key], default=str)


def _read_mapping(path: Path) -> dict[str, Any]:
    require("yaml", "--config", "launch")
    import yaml

    class Loader(yaml.BaseLoader):
        """Loader that keeps values as text, because the flags know their types, and refuses a repeated key."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value]
            for key in keys:
                if keys.count(key) > 1:
                    raise ConfigurationError(f"{path}: the key {key!r} is given twice; keep one")
            return super().construct_mapping(node, deep)

    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except ConfigurationError:
        raise
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"--config {path}: cannot be read as YAML ({reason})") from error
    if not isinstance(content, dict):
        kind = "an empty file" if content is None or content == "" else type(content).__name__
        raise ConfigurationError(f"--config {path}: expected lines of `name: value`, got {kind}")
    return {str(key): value for key, value in content.items()}
