"""The config of the correction: one frozen record, checked when it is made."""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rc.loss.objectives import OBJECTIVES
from megatron_rc.parallel.arguments import one_of
from megatron_rc.settings.bounds import weight_bounds
from megatron_rc.settings.consistency import check_idle, check_together, check_values
from megatron_rc.settings.criteria import parse_criteria
from megatron_rc.settings.description import describe
from megatron_rc.settings.dialects import known_elsewhere, probable_dialects, translate
from megatron_rc.settings.dialects.writer import written
from megatron_rc.settings.fields import FIELDS, CorrectionFields
from megatron_rc.settings.files import read_fields
from megatron_rc.settings.levels import LEVELS
from megatron_rc.settings.presets import NEWEST, PRESETS, Presets
from megatron_rc.settings.staleness import parse_staleness_scale

_log = logging.getLogger("megatron_rc")


@dataclass(frozen=True)
class RolloutCorrectionConfig(CorrectionFields, Presets):
    """Importance sampling and rejection between the policy that sampled and the policy that trains.

    ρ = π_train / π_rollout; π_train is π_old, or π_θ in bypass mode. Metrics only: ``rollout_is=None``, no criterion.

    The fields are documented in :class:`megatron_rc.settings.fields.CorrectionFields`; presets are constructors, in
    :class:`megatron_rc.settings.presets.Presets`.

    Raises:
        ValueError: at construction: names the field, the value and the remedy.
    """

    def __post_init__(self, use_policy_gradient: bool | None) -> None:
        check_values(self)
        self._take_policy_gradient(use_policy_gradient)
        check_idle(self)
        for name, value in self._derived().items():
            object.__setattr__(self, name, value)
        check_together(self)

    def _derived(self) -> dict[str, Any]:
        """The derived fields, by name."""
        mode, bounds = weight_bounds(self.rollout_is_threshold, self.rollout_is_mode, self.rollout_is_threshold_lower)
        criteria = parse_criteria(self.rollout_rs, self.rollout_rs_threshold, self.rollout_rs_threshold_lower)
        units = [criterion.unit for criterion in criteria]
        of_sequences = [criterion for criterion in criteria if criterion.unit != "turn"]
        needs = [need for criterion in of_sequences for need in criterion.needs]
        level = None if self.rollout_is is None else LEVELS[self.rollout_is]
        fields = repr(sorted(self.to_dict().items()))
        in_the_ratio = self.bypass_mode and not OBJECTIVES[self.loss_type].weighed_in_bypass
        return {
            "level": level,
            "weighs_tokens": level is not None and level.unit != "sequence",
            "applies_weights": level is not None and self.rollout_is_apply and not in_the_ratio,
            "is_mode": mode,
            "is_bounds": bounds,
            "is_log_bounds": (math.log(bounds[0]), math.log(bounds[1])),
            "criteria": criteria,
            "needs": tuple(need for need in dict.fromkeys(needs) if need.name != "log_ratio"),
            "divergences": tuple(dict.fromkeys(divergence for one in of_sequences for divergence in one.divergences)),
            "needs_prompts": "prompt" in units,
            "needs_history": "turn" in units or (level is not None and (level.unit == "turn" or bool(level.before))),
            "staleness_scale": parse_staleness_scale(self.rollout_staleness_scale),
            "fingerprint": int(hashlib.sha256(fields.encode()).hexdigest()[:12], 16),
        }

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the fields alone: the derived criteria hold functions."""
        return functools.partial(type(self), **self.to_dict(), notes=self.notes), ()

    def describe(self) -> str:
        """The config in words and as flags, one fact a line; the notes of a translation come last."""
        return describe(self)

    def to_dict(self, dialect: str | None = None) -> dict[str, Any]:
        """The fields by name, in the dialect's words; ``from_dict`` with the same dialect reads them.

        Args:
            dialect: one of :meth:`from_dict`'s. Other programs' settings have no metrics' prefix and no weights that
                are only measured; these are left out.

        Raises:
            ValueError: an unknown dialect, or a field that the dialect does not have.
        """
        if dialect in (None, "megatron_rc"):
            return super().to_dict()
        said, lost = written(self, dialect)
        if lost:
            raise ValueError(f"{dialect} has no words for {'; '.join(lost)}: change that, or choose another dialect")
        return said

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], dialect: str | None = None) -> RolloutCorrectionConfig:
        """A config from fields by name.

        Args:
            fields: names and values in the dialect's words.
            dialect: ``megatron_rc``, ``verl``, ``verl-2025-11``, ``verl-2025-10``, ``slime`` or ``nemo-rl``; see
                ``megatron_rc.settings.dialects``. Settings that the other program would have ignored are dropped;
                ``notes``, which are also logged, name them. Default: ``megatron_rc``, with a warning if verl can read
                the same fields and would bound ρ otherwise.

        Raises:
            ValueError: an unknown field or dialect, a value that a field does not take, or no mapping.
        """
        if not isinstance(fields, Mapping):
            raise ValueError(f"fields is a {type(fields).__name__}: pass a dict of settings by name")
        if dialect not in (None, "megatron_rc"):
            own, notes = translate(fields, dialect)
            for note in notes:
                _log.info("%s", note)
            return cls(**own, notes=tuple(notes))
        known = (*FIELDS, "use_policy_gradient")
        for name in fields:
            if name not in known:
                owner = known_elsewhere(name, "megatron_rc", known, fields)
                raise ValueError(f"unknown field {name!r} of the rollout correction{owner}")
        config = cls(**fields)
        if dialect is None and "verl" in probable_dialects(fields):
            _warn_of_verl(config)
        return config

    @classmethod
    def from_yaml(cls, path: str | Path, dialect: str | None = None) -> RolloutCorrectionConfig:
        """A config from a YAML file of fields by name; ``dialect`` as in :meth:`from_dict`.

        Raises:
            ValueError: the file cannot be read or holds no mapping, or a field is wrong.
        """
        return cls.from_dict(read_fields(Path(path)), dialect)

    def _take_policy_gradient(self, use_policy_gradient: bool | None) -> None:
        if use_policy_gradient is None:
            return
        if not isinstance(use_policy_gradient, bool):
            raise ValueError(f"use_policy_gradient={use_policy_gradient!r} must be true or false")
        others = [name for name in OBJECTIVES if name not in ("ppo_clip", "reinforce")]
        if self.loss_type in (others if use_policy_gradient else ["reinforce"]):
            given = f"use_policy_gradient={use_policy_gradient} contradicts loss_type={self.loss_type!r}"
            raise ValueError(f"{given}: drop use_policy_gradient")
        if use_policy_gradient:
            object.__setattr__(self, "loss_type", "reinforce")


def _warn_of_verl(config: RolloutCorrectionConfig) -> None:
    """Warn of the first criterion whose bounds mean another range in verl's code, which applies them to 1/ρ."""
    for one in config.criteria:
        # For bounds that are each other's inverse, or nearly, both ranges are the same, or nearly.
        if one.bounds.on_ratio and abs(one.lower + one.upper) > 0.01 * (one.upper - one.lower):
            here, there = (
                f"[{math.exp(lower):g}, {math.exp(upper):g}]"
                for lower, upper in ((one.lower, one.upper), (-one.upper, -one.lower))
            )
            warnings.warn(
                f"rollout_rs_threshold={config.rollout_rs_threshold!r} is read as dialect='megatron_rc': {one.name} "
                f"accepts ρ in {here}. verl's code applies these bounds to 1/ρ and accepts ρ in {there}: pass "
                "dialect='verl' for settings of verl, or dialect='megatron_rc' to keep them as they are",
                stacklevel=3,
            )
            return


def wrong_config(config: object) -> ValueError:
    """The error, with the remedy, for a ``config`` that is no :class:`RolloutCorrectionConfig`."""
    remedy = "a RolloutCorrectionConfig, for example RolloutCorrectionConfig.decoupled_token_is()"
    if isinstance(config, Mapping):
        remedy = "RolloutCorrectionConfig.from_dict(...)"
    elif isinstance(config, (str, Path)):
        remedy = "RolloutCorrectionConfig.from_yaml(...)"
        if config in PRESETS:
            remedy = f"the preset as RolloutCorrectionConfig.{config}()"
    return ValueError(f"config is a {type(config).__name__}: pass {remedy}")


def preset(name: str, release: str | None = None) -> RolloutCorrectionConfig:
    """A preset by name, with the numbers of a release; default: the newest. ValueError if there is none."""
    one_of("preset", name, PRESETS)
    config: RolloutCorrectionConfig = getattr(RolloutCorrectionConfig, name)(
        release=NEWEST if release is None else release
    )
    return config
