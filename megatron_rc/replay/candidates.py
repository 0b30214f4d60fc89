"""The corrections that are compared: presets, files, and grids of settings over them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rc.settings.bounds import one_of
from megatron_rc.settings.config import RolloutCorrectionConfig, preset
from megatron_rc.settings.fields import DEFAULTS
from megatron_rc.settings.overrides import overridden

_WORDS: Mapping[str, Any] = {"none": None, "true": True, "false": False}
MOST = 64


def candidates(
    presets: Sequence[str], files: Sequence[str] = (), grid: Sequence[str] = ()
) -> dict[str, RolloutCorrectionConfig]:
    """Corrections by name, in their order.

    Args:
        presets: names of presets.
        files: YAML files of fields by name.
        grid: ``field=value,value,...``: each of the above once for every combination of these values.

    Raises:
        ValueError: nothing is given, a name or a value is unknown, or two settings do not go together.
    """
    bases = {name: preset(name) for name in presets}
    for file in dict.fromkeys(files):
        stem = Path(file).stem
        bases[file if stem in bases else stem] = _read(file)
    if not bases:
        raise ValueError("nothing to compare: give --preset NAME or --correction FILE, each as often as you like")
    axes = [_axis(one) for one in grid]
    names = [name for name, _ in axes]
    if len(set(names)) < len(names):
        raise ValueError(f"--grid has a field twice ({', '.join(names)}): give all its values at once")
    found = {}
    for name, base in bases.items():
        for values in itertools.product(*(values for _, values in axes)):
            given = dict(zip(names, values, strict=True))
            words = " ".join(f"{field}={_shown(value)}" for field, value in given.items())
            found[f"{name} {words}".strip()] = _changed(base, given, name, words)
    if len(found) > MOST:
        raise ValueError(f"{len(found)} corrections are asked for, {MOST} can be compared: give fewer values to --grid")
    return found


def _read(file: str) -> RolloutCorrectionConfig:
    try:
        return RolloutCorrectionConfig.from_yaml(file)
    except ValueError as problem:
        raise ValueError(f"--correction {file}: {problem}") from None


def _axis(text: str) -> tuple[str, list[Any]]:
    name, equals, values = text.partition("=")
    one_of("--grid", name, tuple(DEFAULTS))
    if not equals or not all(values.split(",")):
        raise ValueError(f"--grid {text}: expected field=value,value,... for example rollout_is_threshold=1.5,2,5")
    return name, [_value(one) for one in values.split(",")]


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return float(text) if "_" not in text else text
    except ValueError:
        return text


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _changed(base: RolloutCorrectionConfig, given: dict[str, Any], name: str, words: str) -> RolloutCorrectionConfig:
    if not given:
        return base
    try:
        return RolloutCorrectionConfig(**overridden(base.to_dict(), given))
    except (TypeError, ValueError) as problem:
        raise ValueError(f"--grid {words} over {name}: {problem}") from None
