"""Objectives, estimators and rejection criteria from the user's own modules, which join the library's tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Kind:
    """Kind of object that a flag names."""

    type: type[Any]
    table: dict[str, Any]  # the library's objects of this kind, by name
    define: Any  # function that adds one to the table


_OBJECTIVE = _Kind(Objective, OBJECTIVES, define_objective)
_KINDS = {
    "policy_loss": _OBJECTIVE,
    "loss_type": _OBJECTIVE,
    "advantage_estimator": _Kind(AdvantageEstimator, GROUP_ESTIMATORS, define_estimator),
    "rollout_rs": _Kind(Criterion, CRITERIA, define_criterion),
}


def define_own_objects(values: Mapping[str, Any], specs: dict[str, str]) -> dict[str, Any]:
    """Define the object of each ``python:pkg.module:OBJECT``, and return the values with its name in that place.

    ``specs`` gets the ``python:`` text of each name.
    """
    named = dict(values)
    for flag_name, kind in _KINDS.items():
        parts = [part.strip() for part in (values.get(flag_name) or "").split(",")]
        if not any(map(is_python_spec, parts)):
            continue
        names = []
        for part in parts:
            name = part
            if is_python_spec(part):
                name = _define(part, flag(flag_name), kind)
                specs[name] = part
            names.append(name)
        named[flag_name] = ",".join(names)
    return named


def as_given(flag_name: str, value: Any, specs: Mapping[str, str]) -> Any:
    """Return the value of a flag with the ``python:`` texts in the place of own objects' names."""
    if flag_name not in _KINDS or not isinstance(value, str):
        return value
    return ",".join(specs.get(part, part) for part in value.split(","))


def _define(spec: str, flag_typed: str, kind: _Kind) -> str:
    """Define the object of a ``python:`` text, and return its name."""
    loaded = load_python(spec, flag_typed)
    if not isinstance(loaded, kind.type):
        raise ConfigurationError(
            f"{flag_typed} {spec} is of type {type(loaded).__name__}: name an object {kind.type.__name__} of "
            f"{kind.type.__module__}"
        )
    name: str = loaded.name
    # The module may have defined its object already.
    if kind.table.get(name) is not loaded:
        try:
            kind.define(loaded)
        except ValueError as error:
            raise ConfigurationError(f"{flag_typed} {spec}: {error}") from error
    return name
