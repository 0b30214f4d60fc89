"""Forms in which programs keep their settings: Hydra's overrides, dotted keys, W&B's files, files that inherit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rc.settings.overrides import value_of


def as_sections(fields: Any) -> dict[str, Any]:
    """Return settings by name inside of their sections, from any of the forms.

    Args:
        fields: a mapping, whose keys may be dotted (``algorithm.rollout_correction.rollout_is``) and whose values may
            be W&B's (``{value: …}``); or a list of Hydra's overrides (``name=value``).

    Raises:
        ValueError: another form, two values of one setting, or a file that inherits from another file.
    """
    if isinstance(fields, (list, tuple)):
        fields = _of_overrides(fields)
    if not isinstance(fields, Mapping):
        raise ValueError(
            f"fields is a {type(fields).__name__}: pass a dict of settings by name, or a list of overrides"
        )
    if "defaults" in fields:
        raise ValueError(
            f"defaults={fields['defaults']!r}: this file inherits settings from other files, which are not read here: "
            "give the resolved file (NeMo-RL saves it as config.yaml with each checkpoint, Hydra prints it with --cfg "
            "job --resolve)"
        )
    if "wandb_version" in fields or "_wandb" in fields:
        fields = {
            name: value["value"]
            for name, value in fields.items()
            if isinstance(value, Mapping) and "value" in value and name != "_wandb"
        }
    result: dict[str, Any] = {}
    for name, value in fields.items():
        if not isinstance(name, str):
            raise ValueError(f"{name!r} is no name of a setting: expected a text")
        _put(result, name.split("."), value)
    return result


def _of_overrides(overrides: list[Any] | tuple[Any, ...]) -> dict[str, Any]:
    """Return the settings of Hydra's overrides by dotted names; ``+`` and ``++`` add a setting, ``~`` drops it."""
    settings: dict[str, Any] = {}
    for override in overrides:
        if not isinstance(override, str):
            raise ValueError(
                f"{override!r} is no override: expected a text like algorithm.rollout_correction.rollout_is=token"
            )
        name, equals, value = override.partition("=")
        name = name.lstrip("+")
        if name.startswith("~"):
            settings.pop(name[1:], None)
            continue
        if not equals:
            raise ValueError(f"{override!r} is no override: expected name=value")
        settings[name] = value_of(value.strip("'\""))
    return settings


def _put(sections: dict[Any, Any], path: list[Any], value: Any) -> None:
    """Put a value at its place; ValueError if there is another one already."""
    name, *rest = path
    if not rest and not isinstance(value, Mapping):
        if name in sections and sections[name] != value:
            raise ValueError(f"{name} has two values, {sections[name]!r} and {value!r}: keep one of them")
        sections[name] = value
        return
    inner = sections.setdefault(name, {})
    if not isinstance(inner, dict):
        raise ValueError(f"{name} is both a setting and a section: keep one of them")
    if rest:
        _put(inner, rest, value)
        return
    for key, inner_value in value.items():
        _put(inner, [key], inner_value)
