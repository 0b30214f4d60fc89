"""Corrections to compare: presets, files, the doctor's proposals, and grids over them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_rc.doctor.advice import candidates as doctors_candidates
from megatron_rc.doctor.advice import choose
from megatron_rc.doctor.measure import facts_of_batch
from megatron_rc.doctor.rules import judge
from megatron_rc.doctor.sampled import Sampled
from megatron_rc.parallel.arguments import one_of
from megatron_rc.records.rollout import RolloutBatch
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.fields import DEFAULTS
from megatron_rc.settings.overrides import overridden, value_of

MOST = 64


def named(presets: Sequence[str], files: Sequence[str] = ()) -> dict[str, RolloutCorrectionConfig]:
    """Presets by name, then the settings of YAML files; ValueError if one is unknown, or does not go with another."""
    bases = {name: RolloutCorrectionConfig.preset(name) for name in presets}
    for file in dict.fromkeys(files):
        stem = Path(file).stem
        try:
            bases[file if stem in bases else stem] = RolloutCorrectionConfig.from_yaml(file)
        except ValueError as problem:
            raise ValueError(f"--correction {file}: {problem}") from None
    return bases


def suggested(batches: Sequence[RolloutBatch]) -> dict[str, RolloutCorrectionConfig]:
    """The correction that the doctor proposes for these rollouts, then the usual others, by name.

    ValueError if the batches were sampled differently.
    """
    together = RolloutBatch.concatenate([replace(batch, routed_experts=None) for batch in batches])
    sampled = Sampled.of_batch(together)
    facts = facts_of_batch(sampled)
    choice = choose(facts, judge(facts), sampled)
    choices = [] if choice is None else doctors_candidates(choice)
    return {" ".join([tried.preset, *map(str, tried.arguments.values())]): tried.config() for tried in choices}


def with_grid(
    bases: Mapping[str, RolloutCorrectionConfig], grid: Sequence[str] = ()
) -> dict[str, RolloutCorrectionConfig]:
    """Each correction with every combination of the grid's values (``field=value,value,...``), by name.

    ValueError if there are too many, or a value is unknown.
    """
    axes = [_axis(text) for text in grid]
    names = [name for name, _ in axes]
    if len(set(names)) < len(names):
        raise ValueError(f"--grid has a field twice ({', '.join(names)}): give all its values at once")
    # Counted first: making a billion of them would take hours.
    number = len(bases) * math.prod(len(values) for _, values in axes)
    if number > MOST:
        raise ValueError(
            f"{number} corrections are too many, at most {MOST} can be compared: give fewer values to --grid"
        )
    configs = {}
    for name, base in bases.items():
        for values in itertools.product(*(values for _, values in axes)):
            changes = dict(zip(names, values, strict=True))
            suffix = " ".join(f"{field}={_shown(value)}" for field, value in changes.items())
            configs[f"{name} {suffix}".strip()] = _changed(base, changes, name, suffix)
    return configs


def _axis(text: str) -> tuple[str, list[Any]]:
    name, equals, values = text.partition("=")
    one_of("--grid", name, tuple(DEFAULTS))
    if not equals or not all(values.split(",")):
        raise ValueError(f"--grid {text}: expected field=value,value,... for example rollout_is_threshold=1.5,2,5")
    return name, [value_of(value) for value in values.split(",")]


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _changed(base: RolloutCorrectionConfig, changes: dict[str, Any], name: str, suffix: str) -> RolloutCorrectionConfig:
    try:
        return RolloutCorrectionConfig(**overridden(base.to_dict(), changes))
    except (TypeError, ValueError) as problem:
        raise ValueError(f"--grid {suffix} over {name}: {problem}") from None
