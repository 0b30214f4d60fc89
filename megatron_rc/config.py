"""What the user asks the correction to do: one frozen, validated record, and presets that fill it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

AGGREGATIONS = ("token", "seq_sum", "seq_mean")
DIVERGENCES = ("k1", "k2", "k3")
DEFAULT_IS_THRESHOLD = 2.0


@dataclass(frozen=True)
class Criterion:
    """One rejection test: accept where ``lower <= statistic <= upper``.

    Attributes:
        name: as the user wrote it, for example ``seq_mean_k1``.
        aggregation: ``token`` tests each token; ``seq_sum`` and ``seq_mean`` test a statistic of the whole sequence.
        divergence: ``k1`` is log ρ here (bounds are on ρ), ``k2`` ½(log ρ)², ``k3`` ρ - 1 - log ρ.
        lower: bound on the statistic, in nats.
        upper: bound on the statistic, in nats.
    """

    name: str
    aggregation: str
    divergence: str
    lower: float
    upper: float


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """Importance sampling and rejection, decoupled mode: ρ = π_old / π_rollout.

    Attributes:
        rollout_is: level of the importance weights: ``token``, ``sequence`` (product of a sequence's ratios),
            ``geometric`` (their geometric mean), or ``None`` for no weights.
        rollout_is_threshold: weights are truncated at this ratio from above; default 2.0 where weights are on.
        rollout_rs: rejection criteria, a comma list of ``{token,seq_sum,seq_mean}_{k1,k2,k3}``; all must accept.
        rollout_rs_threshold: one bound for all criteria or a comma list with one for each. k1: ``"lo_hi"`` bounds ρ,
            one number u means [1/u, u]; k2 and k3: one upper bound, in nats.
        rejection_denominator: which tokens the loss is averaged over: the ``accepted`` ones, or all that were there
            ``original``-ly.

    Raises:
        ValueError: at construction: names the field, the value and the remedy.
    """

    rollout_is: Literal["token", "sequence", "geometric"] | None = "sequence"
    rollout_is_threshold: float | None = None
    rollout_rs: str | None = None
    rollout_rs_threshold: float | str | None = None
    rejection_denominator: Literal["accepted", "original"] = "accepted"

    def __post_init__(self) -> None:
        _one_of("rollout_is", self.rollout_is, (None, "token", "sequence", "geometric"))
        _one_of("rejection_denominator", self.rejection_denominator, ("accepted", "original"))
        if self.rollout_is is None and self.rollout_is_threshold is not None:
            raise ValueError(
                f"rollout_is_threshold={self.rollout_is_threshold} does nothing without rollout_is: "
                "set rollout_is to token, sequence or geometric, or drop the threshold"
            )
        if self.rollout_is is not None:
            _positive("rollout_is_threshold", self.is_threshold)
        self.criteria  # noqa: B018  parsing is the check

    @property
    def is_threshold(self) -> float:
        """The truncation that applies where weights are on."""
        return DEFAULT_IS_THRESHOLD if self.rollout_is_threshold is None else self.rollout_is_threshold

    @property
    def criteria(self) -> tuple[Criterion, ...]:
        """The rejection criteria, parsed; duplicates dropped."""
        names = list(dict.fromkeys(part.strip() for part in (self.rollout_rs or "").split(",") if part.strip()))
        given = self.rollout_rs_threshold
        if not names:
            if given is not None:
                raise ValueError(
                    f"rollout_rs_threshold={given!r} does nothing without rollout_rs: name a criterion, for example "
                    "token_k1, or drop the threshold"
                )
            return ()
        if given is None:
            raise ValueError(
                f"rollout_rs={self.rollout_rs!r} needs rollout_rs_threshold: one bound, or one a criterion"
            )
        bounds = [part.strip() for part in str(given).split(",")]
        if len(bounds) not in (1, len(names)):
            raise ValueError(
                f"rollout_rs_threshold={given!r} has {len(bounds)} bounds for {len(names)} criteria: give one, or one "
                "for each"
            )
        bounds = bounds if len(bounds) == len(names) else bounds * len(names)
        return tuple(_criterion(name, bound) for name, bound in zip(names, bounds, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """The fields by name; ``from_dict`` takes it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> RolloutCorrectionConfig:
        """A config from fields by name.

        Raises:
            ValueError: an unknown field, or a value that a field does not take.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                raise ValueError(f"unknown field {name!r} of the rollout correction: known are {', '.join(known)}")
        return cls(**fields)

    @classmethod
    def from_yaml(cls, path: str | Path) -> RolloutCorrectionConfig:
        """A config from a YAML file of fields by name.

        Raises:
            ValueError: the file holds no mapping, or a field is wrong.
            OSError: the file cannot be read.
        """
        import yaml

        text = Path(path).read_text(encoding="utf-8")
        try:
            fields, written = yaml.safe_load(text), yaml.load(text, yaml.BaseLoader)
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
        if not isinstance(fields, dict):
            raise ValueError(f"{path}: expected lines of `field: value`, got {type(fields).__name__}")
        for name, value in fields.items():
            # YAML reads 0.5_2 as the number 0.52; here it is a pair of bounds.
            if isinstance(value, (int, float)) and "_" in written[name]:
                fields[name] = written[name]
        return cls.from_dict(fields)

    @classmethod
    def decoupled_token_is(cls, threshold: float = 2.0) -> RolloutCorrectionConfig:
        """Token-level truncated importance sampling: w_t = min(ρ_t, threshold). Low variance, biased; the first to try.

        Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training".
        """
        return cls(rollout_is="token", rollout_is_threshold=threshold)

    @classmethod
    def decoupled_seq_is(cls, threshold: float = 2.0) -> RolloutCorrectionConfig:
        """Sequence-level truncated importance sampling: w = min(Π ρ_t, threshold). Unbiased but for the truncation.

        Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch".
        """
        return cls(rollout_is="sequence", rollout_is_threshold=threshold)

    @classmethod
    def decoupled_geo_rs(cls, bounds: str = "0.999_1.001") -> RolloutCorrectionConfig:
        """Reject sequences whose geometric mean ratio is out of bounds; no weights. For long chains of thought.

        Liu et al. 2025, as above (geometric masked importance sampling).
        """
        return cls(rollout_is=None, rollout_rs="seq_mean_k1", rollout_rs_threshold=bounds)

    @classmethod
    def decoupled_geo_rs_token_tis(cls, bounds: str = "0.999_1.001", threshold: float = 2.0) -> RolloutCorrectionConfig:
        """``decoupled_geo_rs`` and ``decoupled_token_is`` together."""
        return dataclasses.replace(cls.decoupled_geo_rs(bounds), rollout_is="token", rollout_is_threshold=threshold)

    @classmethod
    def disabled(cls) -> RolloutCorrectionConfig:
        """Nothing is corrected, everything is measured."""
        return cls(rollout_is=None)


PRESETS = ("decoupled_token_is", "decoupled_seq_is", "decoupled_geo_rs", "decoupled_geo_rs_token_tis", "disabled")


def preset(name: str) -> RolloutCorrectionConfig:
    """The preset of this name with its default numbers.

    Raises:
        ValueError: no such preset.
    """
    _one_of("preset", name, PRESETS)
    config: RolloutCorrectionConfig = getattr(RolloutCorrectionConfig, name)()
    return config


def _criterion(name: str, bound: str) -> Criterion:
    aggregation, _, divergence = name.rpartition("_")
    if aggregation not in AGGREGATIONS or divergence not in DIVERGENCES:
        known = ", ".join(f"{first}_{second}" for first in AGGREGATIONS for second in DIVERGENCES)
        raise ValueError(f"rollout_rs={name!r} is unknown: use {known}")
    parts = [_number("rollout_rs_threshold", part) for part in bound.split("_")]
    if len(parts) > (2 if divergence == "k1" else 1):
        raise ValueError(
            f"rollout_rs_threshold={bound!r}: {name} takes {'lo_hi' if divergence == 'k1' else 'one bound'}"
        )
    for part in parts:
        _positive("rollout_rs_threshold", part)
    if divergence != "k1":
        return Criterion(name, aggregation, divergence, -math.inf, parts[0])
    lower, upper = parts if len(parts) == 2 else (1 / parts[0], parts[0])
    if not lower < upper:
        raise ValueError(f"rollout_rs_threshold={bound!r}: the lower bound on ρ must lie below the upper one")
    return Criterion(name, aggregation, divergence, math.log(lower), math.log(upper))


def _one_of(field: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{field}={value!r} is unknown: use one of {', '.join(map(str, allowed))}")


def _number(field: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{field}={text!r} is not a number") from None


def _positive(field: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{field}={value!r} must be a finite positive number")
