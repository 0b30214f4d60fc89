"""Rejection criteria: a table of aggregation × divergence, and the parser of the user's words for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

# What each aggregation can test. k1 takes bounds on ρ, the others one upper bound in nats.
TABLE = {
    "token": ("k1", "k2", "k3"),
    "seq_sum": ("k1", "k2", "k3"),
    "seq_mean": ("k1", "k2", "k3"),
    "seq_max": ("k2", "k3"),
    "group_mean": ("k1", "k2", "k3"),
}
# Names of the first releases that had a rejection.
ALIASES = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
OPSM, GROUP_ANY = "opsm", "group_any"
NAMES = (*(f"{first}_{second}" for first, kinds in TABLE.items() for second in kinds), OPSM, GROUP_ANY)

Threshold = float | str | None


@dataclass(frozen=True)
class Criterion:
    """One rejection test: accept where ``lower <= statistic <= upper``.

    Attributes:
        name: the canonical name, for example ``seq_mean_k1``.
        aggregation: ``token`` tests each token; ``seq_sum``, ``seq_mean`` and ``seq_max`` a statistic of the whole
            sequence; ``group_mean`` one of all responses of a prompt; ``opsm`` the mean of sequences with A < 0;
            ``group_any`` whether the prompt lost a whole response.
        divergence: ``k1`` is log ρ here (bounds are on ρ), ``k2`` ½(log ρ)², ``k3`` ρ - 1 - log ρ; "" for
            ``group_any``.
        lower: bound on the statistic, in nats.
        upper: bound on the statistic, in nats.
    """

    name: str
    aggregation: str
    divergence: str
    lower: float
    upper: float

    @property
    def floor(self) -> float:
        """The lower bound, or the least value that the statistic can take."""
        return max(self.lower, 0.0) if self.divergence in ("k2", "k3") else self.lower

    @property
    def has_statistic(self) -> bool:
        """True where the statistic of tokens or sequences is described by metrics of its own."""
        return self.aggregation in ("token", "seq_sum", "seq_mean", "seq_max")

    @property
    def needs_groups(self) -> bool:
        """True where the verdict depends on the other responses of the prompt."""
        return self.aggregation in ("group_mean", GROUP_ANY)


def parse_criteria(names: str | None, threshold: Threshold, lower: Threshold) -> tuple[Criterion, ...]:
    """The criteria that ``rollout_rs``, ``rollout_rs_threshold`` and ``rollout_rs_threshold_lower`` describe.

    Raises:
        ValueError: names the field, the value and the remedy.
    """
    criteria = criterion_names(names)
    bounded = [name for name in criteria if name != GROUP_ANY]
    if not bounded:
        for field, value in (("rollout_rs_threshold", threshold), ("rollout_rs_threshold_lower", lower)):
            if value is not None:
                raise ValueError(
                    f"{field}={value!r} does nothing without a criterion in rollout_rs that takes a bound: name one, "
                    "for example token_k1, or drop the threshold"
                )
    if bounded and threshold is None:
        raise ValueError(f"rollout_rs={names!r} needs rollout_rs_threshold: one bound, or one a criterion")
    bounds = dict(zip(bounded, _aligned("rollout_rs_threshold", threshold, bounded), strict=True))
    ratios = [name for name in bounded if name.endswith("k1")]
    if lower is not None and not ratios:
        raise ValueError(
            f"rollout_rs_threshold_lower={lower!r} does nothing for {names!r}: only k1 criteria have a lower bound; "
            "drop it"
        )
    lowers = dict(zip(ratios, _aligned("rollout_rs_threshold_lower", lower, ratios), strict=True))
    return tuple(_criterion(name, bounds.get(name), lowers.get(name)) for name in criteria)


def criterion_names(text: str | None) -> list[str]:
    """The canonical names in a comma list, in its order, duplicates dropped.

    Raises:
        ValueError: an unknown name.
    """
    if text is not None and not isinstance(text, str):
        raise ValueError(f"rollout_rs={text!r} must be a comma list of criteria, for example 'token_k1,seq_mean_k3'")
    names = [part.strip() for part in text.split(",") if part.strip()] if text else []
    for name in names:
        if ALIASES.get(name, name) not in NAMES:
            raise ValueError(f"rollout_rs={name!r} is unknown: use {', '.join(NAMES)}")
    return list(dict.fromkeys(ALIASES.get(name, name) for name in names))


def ratio_bounds(field: str, value: float | str) -> tuple[float, float] | float:
    """``"lo_hi"`` as a pair, ``"u"`` or u as a number; bounds are finite, positive and in order.

    Raises:
        ValueError: names the field and the value.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{field}={value!r} must be a finite positive number, or a pair of them as 'lo_hi'")
    parts = [_number(field, part) for part in value.split("_")] if isinstance(value, str) else [float(value)]
    if len(parts) > 2:
        raise ValueError(f"{field}={value!r} must be a number or 'lo_hi'")
    for part in parts:
        positive(field, part)
    if len(parts) == 1:
        return parts[0]
    ordered(field, value, *parts)
    return parts[0], parts[1]


def one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise ValueError, naming the choices, unless the value is one of them."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown: use one of {', '.join(map(str, allowed))}")


def ordered(field: str, value: float | str, lower: float, upper: float) -> None:
    """Raise ValueError unless lower < upper."""
    if not lower < upper:
        raise ValueError(
            f"{field}={value!r} means [{lower:g}, {upper:g}]: the lower bound on ρ must lie below the upper one"
        )


def positive(field: str, value: object) -> None:
    """Raise ValueError unless the value is a finite positive number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{field}={value!r} must be a finite positive number")


def _aligned(field: str, value: Threshold, names: list[str]) -> list[str | None]:
    """One text for each name: a single one serves all."""
    if value is None:
        return [None] * len(names)
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{field}={value!r} must be a number or a comma list of bounds")
    parts: list[str | None] = [part.strip() for part in str(value).split(",")]
    if len(parts) not in (1, len(names)):
        raise ValueError(
            f"{field}={value!r} has {len(parts)} bounds for {len(names)} criteria ({', '.join(names)}): give one, or "
            "one for each"
        )
    return parts if len(parts) == len(names) else parts * len(names)


def _criterion(name: str, bound: str | None, lower: str | None) -> Criterion:
    if name == GROUP_ANY or bound is None:
        return Criterion(name, GROUP_ANY, "", -math.inf, math.inf)
    if name == OPSM:
        return Criterion(name, OPSM, "k1", -_not_negative(bound), math.inf)
    aggregation, _, divergence = name.rpartition("_")
    if divergence != "k1":
        upper = ratio_bounds("rollout_rs_threshold", bound)
        if isinstance(upper, tuple):
            raise ValueError(f"rollout_rs_threshold={bound!r}: {name} takes one upper bound, in nats")
        return Criterion(name, aggregation, divergence, -math.inf, upper)
    return Criterion(name, aggregation, divergence, *map(math.log, _k1_bounds(name, bound, lower)))


def _k1_bounds(name: str, bound: str, lower: str | None) -> tuple[float, float]:
    upper = ratio_bounds("rollout_rs_threshold", bound)
    if isinstance(upper, tuple):
        if lower is not None:
            raise ValueError(
                f"rollout_rs_threshold={bound!r} has a lower bound for {name} already: drop "
                f"rollout_rs_threshold_lower={lower!r}"
            )
        return upper
    low = 1 / upper if lower is None else _number("rollout_rs_threshold_lower", lower)
    positive("rollout_rs_threshold_lower", low)
    ordered("rollout_rs_threshold", bound, low, upper)
    return low, upper


def _not_negative(bound: str) -> float:
    value = _number("rollout_rs_threshold", bound)
    if not 0 <= value < math.inf:
        raise ValueError(f"rollout_rs_threshold={bound!r}: opsm takes one number, 0 or more")
    return value


def _number(field: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{field}={text!r} is not a number") from None
    if "_" in text:  # float() takes 0_5 for 5; here an underscore separates bounds
        raise ValueError(f"{field}={text!r} must be one number, not a pair")
    return value
