"""The config of the correction: one frozen record, checked when it is made, and the ways to make it."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from megatron_rc.parallel.arguments import one_of
from megatron_rc.settings import presets
from megatron_rc.settings.consistency import check_idle, check_together, check_values
from megatron_rc.settings.description import describe
from megatron_rc.settings.dialects import other_dialects, probable_dialects, translate
from megatron_rc.settings.fields import FIELDS, CorrectionFields
from megatron_rc.settings.files import read_fields
from megatron_rc.settings.overrides import overridden

_log = logging.getLogger("megatron_rc")
# A constructor of a preset. Its arguments are in ``megatron_rc.settings.presets``; ``help`` shows them.
_PresetConstructor = Callable[..., "RolloutCorrectionConfig"]


@dataclass(frozen=True)
class RolloutCorrectionConfig(CorrectionFields):
    """Importance sampling and rejection between the policy that sampled and the policy that trains.

    ρ = π_train / π_rollout; π_train is π_old, or π_θ in bypass mode. Metrics only: ``rollout_is=None``, no criterion.

    The fields are documented in :class:`megatron_rc.settings.fields.CorrectionFields`. A preset is a config with a
    name: ``RolloutCorrectionConfig.decoupled_token_is(threshold=3.0)``, or
    ``RolloutCorrectionConfig.preset("decoupled_token_is", rollout_is_threshold=3.0)``.

    Raises:
        ValueError: at construction: names the field, the value and the remedy.
    """

    # The constructors of the presets are made behind the class, from the tables of ``megatron_rc.settings.presets``;
    # these lines tell type checkers their names.
    decoupled_token_is: ClassVar[_PresetConstructor]
    decoupled_token_icepop: ClassVar[_PresetConstructor]
    decoupled_token_kpop: ClassVar[_PresetConstructor]
    decoupled_prefix_is: ClassVar[_PresetConstructor]
    decoupled_min_prefix_is: ClassVar[_PresetConstructor]
    decoupled_turn_is: ClassVar[_PresetConstructor]
    decoupled_seq_is: ClassVar[_PresetConstructor]
    decoupled_seq_is_rs: ClassVar[_PresetConstructor]
    decoupled_geo_rs: ClassVar[_PresetConstructor]
    decoupled_geo_rs_seq_tis: ClassVar[_PresetConstructor]
    decoupled_geo_rs_token_tis: ClassVar[_PresetConstructor]
    seq_mask_tis: ClassVar[_PresetConstructor]
    decoupled_k3_rs: ClassVar[_PresetConstructor]
    decoupled_k3_rs_seq_tis: ClassVar[_PresetConstructor]
    decoupled_k3_rs_token_tis: ClassVar[_PresetConstructor]
    trust_region_masking: ClassVar[_PresetConstructor]
    bypass_ppo_clip: ClassVar[_PresetConstructor]
    bypass_ppo_clip_geo_rs: ClassVar[_PresetConstructor]
    bypass_ppo_clip_k3_rs: ClassVar[_PresetConstructor]
    bypass_dppo_tv: ClassVar[_PresetConstructor]
    bypass_dppo_kl: ClassVar[_PresetConstructor]
    bypass_cppo: ClassVar[_PresetConstructor]
    bypass_sapo: ClassVar[_PresetConstructor]
    bypass_gmpo: ClassVar[_PresetConstructor]
    bypass_pg_is: ClassVar[_PresetConstructor]
    bypass_pg_prefix_is: ClassVar[_PresetConstructor]
    bypass_pg_min_prefix_is: ClassVar[_PresetConstructor]
    bypass_pg_token_icepop: ClassVar[_PresetConstructor]
    bypass_pg_geo_rs: ClassVar[_PresetConstructor]
    bypass_pg_geo_rs_seq_tis: ClassVar[_PresetConstructor]
    bypass_pg_geo_rs_token_tis: ClassVar[_PresetConstructor]
    disabled: ClassVar[_PresetConstructor]
    # Aliases.
    token_is: ClassVar[_PresetConstructor]
    token_tis: ClassVar[_PresetConstructor]
    seq_is: ClassVar[_PresetConstructor]
    seq_is_rs: ClassVar[_PresetConstructor]
    seq_mis: ClassVar[_PresetConstructor]
    geo_rs: ClassVar[_PresetConstructor]
    geo_mis: ClassVar[_PresetConstructor]
    geo_rs_seq_tis: ClassVar[_PresetConstructor]
    ppo_is_bypass: ClassVar[_PresetConstructor]
    pg_is: ClassVar[_PresetConstructor]
    pure_is: ClassVar[_PresetConstructor]
    pg_rs: ClassVar[_PresetConstructor]
    pure_rs: ClassVar[_PresetConstructor]
    bypass_pg_rs: ClassVar[_PresetConstructor]
    pg_geo_rs_seq_tis: ClassVar[_PresetConstructor]

    def __post_init__(self, use_policy_gradient: bool | None) -> None:
        check_values(self)
        if use_policy_gradient is not None:
            # The record is frozen; this is the one field that another argument sets.
            object.__setattr__(self, "loss_type", _loss_type_of(use_policy_gradient, self.loss_type))
        check_idle(self)

        # Read the texts of the bounds now, so that a wrong one is an error here. The properties keep the results.
        for name in ("level", "weight_bounds", "criteria", "needs", "divergences", "staleness_scale", "fingerprint"):
            getattr(self, name)
        check_together(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the fields alone: the criteria, which follow from them, hold functions."""
        return functools.partial(type(self), **self.to_dict(), notes=self.notes), ()

    def describe(self) -> str:
        """Return the config in words and as flags, one fact a line; the notes of a translation come last."""
        return describe(self)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> RolloutCorrectionConfig:
        """Return a preset by its name or an alias, with other values of some fields.

        Fields of the preset that a change makes meaningless are dropped, as flags over a preset do:
        ``preset("decoupled_token_is", rollout_is=None)`` has no threshold of the weights.

        Args:
            name: a name of ``megatron_rc.settings.presets``.
            changes: fields of the config.

        Raises:
            ValueError: an unknown name or field, or a value that a field does not take.
        """
        for field in changes:
            one_of("field", field, FIELDS)
        config = cls(**presets.fields_of(name))
        if not changes:
            return config
        return cls(**overridden(config.to_dict(), changes))

    @classmethod
    def from_dict(
        cls, fields: Mapping[str, Any] | Sequence[str], dialect: str | None = None
    ) -> RolloutCorrectionConfig:
        """Return a config from fields by name.

        Args:
            fields: names and values in the dialect's words; for another program's also dotted names, the values of
                W&B's ``config.yaml``, or a list of Hydra's overrides.
            dialect: ``megatron_rc``, ``verl``, ``verl-2025-11``, ``verl-2025-10``, ``slime``, ``nemo-rl`` or ``trl``;
                see ``megatron_rc.settings.dialects``. Settings that the other program would have ignored are dropped;
                ``notes`` name them. Default: ``megatron_rc``, with a warning if verl can read
                the same fields and would bound ρ otherwise.

        Raises:
            ValueError: an unknown field or dialect, a value that a field does not take, or no mapping.
        """
        if dialect not in (None, "megatron_rc"):
            translated, notes = translate(fields, dialect)
            return cls(**translated, notes=tuple(notes))
        if not isinstance(fields, Mapping):
            remedy = "; Hydra's overrides can be read with dialect='verl'" if isinstance(fields, (list, tuple)) else ""
            raise ValueError(f"fields is a {type(fields).__name__}: pass a dict of settings by name{remedy}")

        known = (*FIELDS, "use_policy_gradient")
        for name, value in fields.items():
            if name not in known:
                remedy = other_dialects(name, fields, "megatron_rc") or f"known are {', '.join(known)}"
                if isinstance(value, Mapping) and set(value) <= set(known):
                    remedy += f"; or, if they are this project's, give the fields without the line {name}:"
                raise ValueError(f"unknown field {name!r} of the rollout correction: {remedy}")
        config = cls(**fields)
        if dialect is None and "verl" in probable_dialects(fields):
            _warn_of_verl(config)
        return config

    @classmethod
    def from_yaml(cls, path: str | Path, dialect: str | None = None) -> RolloutCorrectionConfig:
        """Return a config from a YAML file of fields by name; ``dialect`` as in :meth:`from_dict`.

        Raises:
            ValueError: the file cannot be read or holds no mapping, or a field is wrong.
        """
        return cls.from_dict(read_fields(Path(path)), dialect)


def _preset_constructor(name: str) -> Any:
    """Return the class method that makes the preset of this name, with the arguments of its row in the table."""

    def construct(cls: type[RolloutCorrectionConfig], *args: Any, **kwargs: Any) -> RolloutCorrectionConfig:
        return cls(**presets.fields_of(name, *args, **kwargs))

    construct.__name__ = name
    construct.__qualname__ = f"RolloutCorrectionConfig.{name}"
    construct.__doc__ = presets.documentation_of(name)
    # For ``help`` and editors: (cls, threshold=2.0), and not (cls, *args, **kwargs).
    signature = presets.signature_of(name)
    class_parameter = inspect.Parameter("cls", inspect.Parameter.POSITIONAL_ONLY)
    construct.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[class_parameter, *signature.parameters.values()]
    )
    return classmethod(construct)


for _name in presets.NAMES:
    setattr(RolloutCorrectionConfig, _name, _preset_constructor(_name))


def _loss_type_of(use_policy_gradient: object, loss_type: str) -> str:
    """Return the objective that ``use_policy_gradient``, the older switch of REINFORCE, and ``loss_type`` mean.

    Raises:
        ValueError: the switch is neither true nor false, or contradicts a ``loss_type``.
    """
    if not isinstance(use_policy_gradient, bool):
        raise ValueError(f"use_policy_gradient={use_policy_gradient!r} must be true or false")
    # ppo_clip is the default of loss_type, so that it may mean "not given".
    if use_policy_gradient and loss_type in ("ppo_clip", "reinforce"):
        return "reinforce"
    if not use_policy_gradient and loss_type != "reinforce":
        return loss_type
    raise ValueError(
        f"use_policy_gradient={use_policy_gradient} contradicts loss_type={loss_type!r}: drop use_policy_gradient"
    )


def _warn_of_verl(config: RolloutCorrectionConfig) -> None:
    """Warn of the first criterion whose bounds mean another range in verl's code, which applies them to 1/ρ."""
    for criterion in config.criteria:
        if not criterion.bounds.on_ratio:
            continue
        # If the bounds are each other's inverse, or nearly, both ranges are the same, or nearly.
        if abs(criterion.lower + criterion.upper) <= 0.01 * (criterion.upper - criterion.lower):
            continue
        warnings.warn(
            f"rollout_rs_threshold={config.rollout_rs_threshold!r} is read as dialect='megatron_rc': {criterion.name} "
            f"accepts ρ in {_interval(criterion.lower, criterion.upper)}. verl's code applies these bounds to 1/ρ and "
            f"accepts ρ in {_interval(-criterion.upper, -criterion.lower)}: pass dialect='verl' for settings of verl, "
            "or dialect='megatron_rc' to keep them as they are",
            stacklevel=3,
        )
        return


def _interval(log_lower: float, log_upper: float) -> str:
    """Return bounds in nats as an interval of ratios, in words."""
    return f"[{math.exp(log_lower):g}, {math.exp(log_upper):g}]"


def wrong_config(config: object) -> ValueError:
    """Return the error, with the remedy, for a ``config`` that is no :class:`RolloutCorrectionConfig`."""
    remedy = "a RolloutCorrectionConfig, for example RolloutCorrectionConfig.decoupled_token_is()"
    if isinstance(config, Mapping):
        remedy = "RolloutCorrectionConfig.from_dict(...)"
    elif isinstance(config, str) and config in presets.NAMES:
        remedy = f"the preset as RolloutCorrectionConfig.{config}()"
    elif isinstance(config, (str, Path)):
        remedy = "RolloutCorrectionConfig.from_yaml(...)"
    return ValueError(f"config is a {type(config).__name__}: pass {remedy}")
