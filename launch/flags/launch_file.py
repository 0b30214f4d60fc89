"""Launch files: YAML with one ``name: value`` a line; the name is a flag without its dashes.

Fields of the correction may be nested below ``rollout_correction:``, with underscores.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from megatron_rc.launch.errors import ConfigurationError, require
from megatron_rc.launch.flags.hints import unknown
from megatron_rc.launch.flags.parser import parser_for
from megatron_rc.launch.run_config.rollouts import JSON
from megatron_rc.settings.flags import is_correction_flag

_CORRECTION = "rollout_correction"
# Number of processes of the file's run, which a dry run takes unless flags say otherwise.
_PROCESSES = "world-size"
CONFIGS = Path(__file__).resolve().parent.parent.parent / "configs"


def find_config(name: str) -> Path:
    """Return the path of a launch file, from a path or the name of a file in the package (``count_up``)."""
    for path in (Path(name), CONFIGS / "launch" / f"{name}.yaml"):
        if path.is_file():
            return path
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
    content = _read_mapping(path)
    content.pop(_PROCESSES, None)
    nested = content.pop(_CORRECTION, {})
    if not isinstance(nested, dict):
        raise ConfigurationError(f"{path}: {_CORRECTION}: {nested!r} must be lines of `field: value` below it")

    below = f"{path}: below {_CORRECTION}"
    lines = [(str(path), key, value) for key, value in content.items()]
    lines += [(below, str(name_of_field).replace("_", "-"), value) for name_of_field, value in nested.items()]

    arguments: list[str] = []
    fields_of_correction: set[str] = set()
    for where, key, value in lines:
        action = _action_of(where, key, value)
        if is_correction_flag(action.dest):
            # A switch has a second name, such as no-bypass-mode.
            if action.dest in fields_of_correction:
                raise ConfigurationError(f"{where}: {key} is given twice: keep one")
            fields_of_correction.add(action.dest)
        elif where == below:
            raise ConfigurationError(f"{below}: {key} is no field of the correction: give it a line of its own")
        # Programs with nested settings write null to turn a field off. A switch is true or false.
        is_turned_off = where == below and value in ("null", "~") and action.nargs != 0
        arguments += words_of(where, key, "none" if is_turned_off else value)
    return arguments


def _action_of(where: str, key: str, value: Any) -> argparse.Action:
    """Return the parser's action of a key; ``where`` and ``value`` are for the error about an unknown key."""
    action = parser_for([f"--{key}"])._option_string_actions.get(f"--{key}")
    if action is None or key in ("config", "help"):
        remedy = f"; only {_CORRECTION} is nested" if isinstance(value, dict) else ""
        raise ConfigurationError(f"{where}: {unknown('key', key)}{remedy}")
    return action


def words_of(where: str, key: str, value: Any) -> list[str]:
    """Return a flag with its value as words; ``where`` names the file that it comes from, ``key`` has no dashes."""
    action = _action_of(where, key, value)
    if action.nargs == 0:
        if value not in ("true", "false"):
            raise ConfigurationError(f"{where}: {key}: {value!r} must be true or false")
        if value == "true":
            return [f"--{key}"]
        return [f"--no-{key}"] if f"--no-{key}" in action.option_strings else []
    if isinstance(value, dict) and action.metavar == JSON:
        try:
            value = json.dumps(value, default=str)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"{where}: {key}: {value!r} cannot be written as JSON ({error}): give texts as names, in quotes"
            ) from error
    takes_list = action.nargs == "+"
    if takes_list and isinstance(value, list) and value and all(isinstance(word, str) for word in value):
        return [f"--{key}", *value]
    if not isinstance(value, str) or value in ("", "null", "true", "false"):
        more = ", or a list of them" if takes_list else ""
        raise ConfigurationError(f"{where}: {key}: {value!r} must be one number or one string{more}")
    return [f"--{key}={value}"]


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

    content = _loaded(path, Loader)
    if not isinstance(content, dict):
        kind = "an empty file" if content is None or content == "" else type(content).__name__
        raise ConfigurationError(f"--config {path}: expected lines of `name: value`, got {kind}")
    # JSON objects, such as chat-template-kwargs, keep the types of their values. The correction's fields are flags.
    objects = [key for key, value in content.items() if isinstance(value, dict) and key != _CORRECTION]
    if objects:
        content |= {key: value for key, value in _loaded(path, yaml.SafeLoader).items() if key in objects}
    return content


def _loaded(path: Path, loader: Any) -> Any:
    """Return the content of a YAML file; the loader makes its values."""
    import yaml

    try:
        return yaml.load(path.read_text(encoding="utf-8"), loader)
    except ConfigurationError:
        raise
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"--config {path}: cannot be read as YAML ({reason})") from error
