"""The golden cases' configurations as the oracle's settings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from tests.support.correction_oracle import Criterion, Settings, log

LEVEL_CRITERIA = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


def golden_settings(generation: str, config: Mapping[str, Any]) -> Settings:
    """The settings of a golden case: ``gen1``, ``gen2``, ``gen3`` or ``slime``.

    Two sources differ: gen1 sets the weights of rejected tokens to 0, and slime's ``mask`` mode keeps weights out of
    bounds. Here gen1's veto is a rejection, and slime's mode a criterion beside unbounded weights.
    """
    return {"gen1": _gen1, "gen2": _gen2, "gen3": _gen3, "slime": _slime}[generation](config)


def on_ratio(name: str, lower: float | None, upper: float) -> Criterion:
    """A k1 criterion from bounds on ρ."""
    return name, log(1 / upper if lower is None else lower), log(upper)


def _gen1(config: Mapping[str, Any]) -> Settings:
    return Settings(
        level=config["rollout_is_level"],
        mode=config["rollout_is_mode"],
        lower=config["rollout_is_threshold_lower"],
        upper=config["rollout_is_threshold"],
        veto=config["rollout_is_veto_threshold"],
    )


def _gen2(config: Mapping[str, Any]) -> Settings:
    criteria: tuple[Criterion, ...] = ()
    if config["rollout_rs"]:
        bounds = config["rollout_rs_threshold_lower"], config["rollout_rs_threshold"]
        criteria = (on_ratio(LEVEL_CRITERIA[config["rollout_rs"]], *bounds),)
    return Settings(
        level=config["rollout_is"],
        upper=config["rollout_is_threshold"],
        batch_normalize=config["rollout_is_batch_normalize"],
        criteria=criteria,
        veto=config["rollout_token_veto_threshold"],
    )


def _gen3(config: Mapping[str, Any]) -> Settings:
    names = (config.get("rollout_rs") or "").split(",")
    texts = str(config.get("rollout_rs_threshold")).split(",")
    settings = Settings(
        level=config.get("rollout_is"),
        batch_normalize=config.get("rollout_is_batch_normalize", False),
        criteria=tuple(_gen3_criterion(name, texts[i % len(texts)]) for i, name in enumerate(names) if name),
    )
    lower, _, upper = str(config.get("rollout_is_threshold", 2.0)).rpartition("_")
    if lower:
        settings = dataclasses.replace(settings, mode="mask", lower=float(lower))
    return dataclasses.replace(settings, upper=float(upper))


def _gen3_criterion(name: str, text: str) -> Criterion:
    """A criterion; written k1 bounds are on -log ρ, so that ρ is between the inverse ones."""
    lower, _, upper = text.rpartition("_")
    if not name.endswith("k1"):
        return name, -math.inf, float(upper)
    low = float(lower) if lower else 1 / float(upper)
    return on_ratio(name, 1 / float(upper), 1 / low)


def _slime(config: Mapping[str, Any]) -> Settings:
    bounds, level = (config["tis_lower_bound"], config["tis_upper_bound"]), config["tis_level"]
    settings = Settings(
        level=level,
        mode={"truncate": "truncate", "clip": "clamp", "mask": "truncate"}[config["tis_mode"]],
        lower=bounds[0],
        upper=bounds[1],
        batch_normalize=config["tis_batch_normalize"],
    )
    criteria = []
    if config["tis_mode"] == "mask":
        criteria.append(on_ratio(LEVEL_CRITERIA[level], *bounds))
        settings = dataclasses.replace(settings, lower=None, upper=math.inf)
    if config["use_rs"]:
        name = LEVEL_CRITERIA[config["rs_level"]]
        criteria.append(on_ratio(name, config["rs_lower_bound"], config["rs_upper_bound"]))
        settings = dataclasses.replace(settings, veto=config["rs_veto_threshold"])
    return dataclasses.replace(settings, criteria=tuple(criteria))
