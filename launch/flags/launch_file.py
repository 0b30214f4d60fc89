"""Flags from launch files and Hugging Face directories.

A launch file (``--config FILE``) is YAML with one ``name: value`` a line; the name is a flag without its dashes. Fields
of the correction may be nested below ``rollout_correction:``, with underscores.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_rc.launch.errors import ConfigurationError, require
from megatron_rc.launch.flags.hints import unknown
from megatron_rc.launch.flags.parser import long_options
from megatron_rc.launch.run_config.rollouts import JSON
from megatron_rc.launch.weights.architecture import read_architecture
from megatron_rc.settings.flags import is_correction_flag

_CORRECTION = "rollout_correction"
# Number of processes of the file's run, which a dry run takes unless flags say otherwise.
_PROCESSES = "world-size"
CONFIGS = Path(__file__).resolve().parent.parent.parent / "configs"


def find_config(name: str) -> Path:
    """Path of a launch file, from a path or the name of a file in the package (``count_up``)."""
    for path in (Path(name), CONFIGS / "launch" / f"{name}.yaml"):
        if path.is_file():
            return path
    if Path(name).is_dir():
        raise ConfigurationError(f"--config {name} is a folder: name a file in it")
    brought = ", ".join(sorted(path.stem for path in (CONFIGS / "launch").glob("*.yaml")))
    raise ConfigurationError(f"--config {name}: no such file; give a path, or one of the names {brought}")


def words_of_file(parser: argparse.ArgumentParser, name: str) -> list[str]:
    """Read a launch file as flags."""
    path, options, found = find_config(name), long_options(parser), dict[str, list[str]]()
    for where, key, value in _lines(path):
        is_nested = where != str(path)
        if key not in options or key in ("config", "help"):
            nested_key = f"unknown key {key!r}: only {_CORRECTION} is nested; give other flags a line of their own"
            raise ConfigurationError(
                f"{where}: {nested_key if isinstance(value, dict) else unknown('key', key, parser)}"
            )
        field = options[key].dest
        if is_nested and not is_correction_flag(field):
            raise ConfigurationError(f"{where}: {key} is no field of the correction: give it a line of its own")
        if is_correction_flag(field) and field in found:
            raise ConfigurationError(f"{where}: {key} is given twice: keep one")
        # Programs with nested settings write null to turn a field off.
        value = "none" if is_nested and value in ("null", "~") and options[key].nargs != 0 else value
        if isinstance(value, dict) and options[key].metavar == JSON:
            value = _as_json(path, key)
        found[field] = found.get(field, []) + _as_flag(where, key, value, options[key])
    return [word for words in found.values() for word in words]


def _lines(path: Path) -> Iterator[tuple[str, str, Any]]:
    """Yield place, name and value of each flag in a file; the correction's flags may be nested."""
    content = _read_mapping(path)
    content.pop(_PROCESSES, None)
    nested = content.pop(_CORRECTION, {})
    if not isinstance(nested, dict):
        raise ConfigurationError(f"{path}: {_CORRECTION}: {nested!r} must be lines of `field: value` below it")
    yield from ((str(path), key, value) for key, value in content.items())
    for name, value in nested.items():
        yield f"{path}: below {_CORRECTION}", str(name).replace("_", "-"), value


def processes_of_file(name: str) -> int | None:
    """Number of processes of a launch file's run; None if the file does not say."""
    path = find_config(name)
    given = _read_mapping(path).get(_PROCESSES)
    if given is None:
        return None
    if not isinstance(given, str) or not given.isdecimal() or not int(given):
        raise ConfigurationError(f"{path}: {_PROCESSES}: {given!r} must be a positive number of processes")
    return int(given)


# Flags that contradict a directory that does not mention them.
_ABSENT = ("num_experts", "q_lora_rank", "moe_shared_expert_intermediate_size", "moe_router_group_topk")


def words_of_architecture(parser: argparse.ArgumentParser, folder: str) -> list[str]:
    """Read the model of a Hugging Face directory as flags."""
    options, path = long_options(parser), f"{folder}/config.json"
    found = read_architecture(folder).items()
    return [word for name, value in found for word in _as_flag(path, name, value, options[name])]


def check_architecture_words(parser: argparse.ArgumentParser, args: argparse.Namespace, words: list[str]) -> None:
    """Refuse flags that contradict the model of ``--load-hf``, whose flags ``words`` are."""
    if not words:
        return
    wanted = vars(parser.parse_args(words))
    described = [word[2:].split("=")[0].removeprefix("no-").replace("-", "_") for word in words]
    for name in [*described, *_ABSENT]:
        if getattr(args, name) != wanted[name]:
            raise ConfigurationError(
                f"--{name.replace('_', '-')} {getattr(args, name)} contradicts --load-hf {args.load_hf}, whose model "
                f"has {wanted[name]}: drop the flag"
            )


def _as_flag(where: str, key: str, value: Any, action: argparse.Action) -> list[str]:
    if action.nargs == 0:
        if value not in ("true", "false"):
            raise ConfigurationError(f"{where}: {key}: {value!r} must be true or false")
        if value == "true":
            return [f"--{key}"]
        return [f"--no-{key}"] if f"--no-{key}" in action.option_strings else []
    if action.nargs == "+" and isinstance(value, list) and value and all(isinstance(word, str) for word in value):
        return [f"--{key}", *value]
    if not isinstance(value, str) or value in ("", "null", "true", "false"):
        more = ", or a list of them" if action.nargs == "+" else ""
        raise ConfigurationError(f"{where}: {key}: {value!r} must be one number or one string{more}")
    return [f"--{key}={value}"]


def _as_json(path: Path, key: str) -> str:
    """Return the nested entry of a file as JSON, read again because :func:`_read_mapping` keeps its values as texts."""
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
        found = "an empty file" if content is None or content == "" else type(content).__name__
        raise ConfigurationError(f"--config {path}: expected lines of `name: value`, got {found}")
    return {str(key): value for key, value in content.items()}
