"""Objectives, estimators and rejection criteria from the user's own modules, which join the library's tables."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from megatron_rc.advantages.estimators import GROUP_ESTIMATORS, AdvantageEstimator
from megatron_rc.advantages.estimators import define as define_estimator
from megatron_rc.launch.errors import ConfigurationError, flag
from megatron_rc.launch.python_specs import is_python_spec, load_python
from megatron_rc.loss.objectives import OBJECTIVES, Objective
from megatron_rc.loss.objectives import define as define_objective
from megatron_rc.settings.criteria import CRITERIA
from megatron_rc.settings.criteria import define as define_criterion
from megatron_rc.settings.criterion import Criterion

# Type of the objects that each flag names, their table, and the function that adds one.
_Kind = tuple[type[Any], dict[str, Any], Any]
_OBJECTIVE: _Kind = (Objective, OBJECTIVES, define_objective)
_KINDS: dict[str, _Kind] = {
    "policy_loss": _OBJECTIVE,
    "loss_type": _OBJECTIVE,
    "advantage_estimator": (AdvantageEstimator, GROUP_ESTIMATORS, define_estimator),
    "rollout_rs": (Criterion, CRITERIA, define_criterion),
}


def define_own_objects(args: argparse.Namespace) -> dict[str, str]:
    """Define the object of each ``python:pkg.module:OBJECT``, put its name in the flag's place, and return both."""
    specs = {}
    for name, kind in _KINDS.items():
        parts = [part.strip() for part in (getattr(args, name) or "").split(",")]
        if any(map(is_python_spec, parts)):
            names = [_name_of(part, flag(name), kind) for part in parts]
            specs.update({own: part for own, part in zip(names, parts, strict=True) if is_python_spec(part)})
            setattr(args, name, ",".join(names))
    return specs


def as_given(name: str, value: Any, specs: Mapping[str, str]) -> Any:
    """Value of a flag with the ``python:`` texts in the place of own objects' names."""
    if name not in _KINDS or not isinstance(value, str):
        return value
    return ",".join(specs.get(part, part) for part in value.split(","))


def _name_of(part: str, flag: str, kind: _Kind) -> str:
    """Name of the object that one entry of a flag's list stands for."""
    if not is_python_spec(part):
        return part
    found, (wanted, table, define) = load_python(part, flag), kind
    if not isinstance(found, wanted):
        raise ConfigurationError(
            f"{flag} {part} is of type {type(found).__name__}: name an object {wanted.__name__} of {wanted.__module__}"
        )
    name: str = found.name
    # The module may have defined its object already.
    if table.get(name) is not found:
        try:
            define(found)
        except ValueError as error:
            raise ConfigurationError(f"{flag} {part}: {error}") from error
    return name
