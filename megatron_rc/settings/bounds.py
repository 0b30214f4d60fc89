"""Bounds of weights and criteria: reading them from settings, checking them, and describing them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

from megatron_rc.parallel.arguments import check_number

Threshold = float | str | None
DEFAULT_WEIGHT_THRESHOLD = 2.0


@dataclass(frozen=True)
class Bounds:
    """The form of a criterion's bounds.

    Attributes:
        read: (lower, upper) on the statistic, from the criterion's name, its threshold and its lower one.
        words: the rejected range, from (lower, upper): "is above 0.1 nats".
        takes_threshold: a threshold is needed; otherwise ``read`` gets an empty text.
        takes_lower: ``rollout_rs_threshold_lower`` may be given.
        on_ratio: the bounds apply to exp(statistic), a ratio.
    """

    read: Callable[[str, str, str | None], tuple[float, float]]
    words: Callable[[float, float], str]
    takes_threshold: bool = True
    takes_lower: bool = False
    on_ratio: bool = False


def ratio_bounds(field: str, value: float | str) -> tuple[float, float] | float:
    """``"lo_hi"`` as a pair, ``"u"`` or u as a number; ValueError unless finite, positive and in order."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{field}={value!r} must be a finite positive number, or a pair of them as 'lo_hi'")
    parts = [_number(field, part) for part in value.split("_")] if isinstance(value, str) else [value]
    if len(parts) > 2:
        raise ValueError(f"{field}={value!r} must be a number or 'lo_hi'")
    for part in parts:
        check_positive(field, part)
    if len(parts) == 1:
        return float(parts[0])
    check_ordered(field, value, *parts)
    return parts[0], parts[1]


def weight_bounds(
    threshold: float | str | None, mode: str | None, lower: float | None
) -> tuple[str, tuple[float, float]]:
    """(mode, (lower, upper)) of the weights, from the fields ``rollout_is_threshold``, ``_mode`` and ``_lower``.

    With ``truncate`` the lower bound, 1/u, is for metrics alone. ValueError names the field, the value and the remedy.
    """
    bounds = ratio_bounds("rollout_is_threshold", DEFAULT_WEIGHT_THRESHOLD if threshold is None else threshold)
    if isinstance(bounds, tuple):
        if mode == "truncate":
            raise ValueError(
                f"rollout_is_threshold={threshold!r} has a lower bound that rollout_is_mode='truncate' does not use: "
                "give one number, or the mode mask or clamp"
            )
        return mode or "mask", bounds
    if mode in (None, "truncate"):
        return "truncate", (min(1 / bounds, bounds), bounds)
    low = 1 / bounds if lower is None else lower
    check_positive("rollout_is_threshold_lower", low)
    if lower is None:
        check_ordered("rollout_is_threshold", bounds, low, bounds)
    else:
        check_ordered("rollout_is_threshold_lower", lower, low, bounds)
    return mode, (low, bounds)


def check_ordered(field: str, value: float | str, lower: float, upper: float) -> None:
    """Raise ValueError unless lower <= upper. They may be equal, as in verl and NeMo-RL."""
    if not lower <= upper:  # of NaN too
        raise ValueError(
            f"{field}={value!r} means [{lower:g}, {upper:g}]: the lower bound on ρ must not lie above the upper one"
        )


def check_positive(field: str, value: object) -> None:
    """Raise ValueError unless the value is a finite positive number."""
    check_number(field, value, lambda number: 0 < number <= sys.float_info.max, "must be a finite positive number")


def aligned(field: str, value: Threshold, names: list[str]) -> list[str | None]:
    """One text for each name; a single text serves all names; ValueError for another number of texts."""
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


def _read_ratio(name: str, threshold: str, lower: str | None) -> tuple[float, float]:
    upper = ratio_bounds("rollout_rs_threshold", threshold)
    if isinstance(upper, tuple):
        if lower is not None:
            raise ValueError(
                f"rollout_rs_threshold={threshold!r} has a lower bound for {name} already: drop "
                f"rollout_rs_threshold_lower={lower!r}"
            )
        return math.log(upper[0]), math.log(upper[1])
    low = 1 / upper if lower is None else _number("rollout_rs_threshold_lower", lower)
    check_positive("rollout_rs_threshold_lower", low)
    if lower is None:
        check_ordered("rollout_rs_threshold", threshold, low, upper)
    else:
        check_ordered("rollout_rs_threshold_lower", lower, low, upper)
    return math.log(low), math.log(upper)


def _read_upper(name: str, threshold: str, lower: str | None) -> tuple[float, float]:
    upper = ratio_bounds("rollout_rs_threshold", threshold)
    if isinstance(upper, tuple):
        raise ValueError(f"rollout_rs_threshold={threshold!r}: {name} takes one upper bound, in nats")
    return -math.inf, upper


def _read_margin(name: str, threshold: str, lower: str | None) -> tuple[float, float]:
    margin = _number("rollout_rs_threshold", threshold)
    if not 0 <= margin < math.inf:
        raise ValueError(f"rollout_rs_threshold={threshold!r}: {name} takes one number, 0 or more")
    return -margin, math.inf


def _number(field: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(
            f"{field}={text!r} is not a number: give digits, such as 2.0, or 0.5_2.0 for two bounds"
        ) from None
    if "_" in text:  # float() reads 0_5 as 5; in settings an underscore separates bounds
        raise ValueError(f"{field}={text!r} must be one number, not a pair")
    return value


# [lo, hi] of a ratio: "lo_hi", or u for [1/u, u], or u with a separate lower bound.
RATIO = Bounds(
    read=_read_ratio,
    words=lambda lower, upper: f"is outside [{math.exp(lower):.10g}, {math.exp(upper):.10g}]",
    takes_lower=True,
    on_ratio=True,
)
# One upper bound, in nats.
UPPER = Bounds(_read_upper, lambda lower, upper: f"is above {upper:.10g} nats")
# One upper bound, of a number without a unit.
UPPER_NUMBER = Bounds(_read_upper, lambda lower, upper: f"is above {upper:.10g}")
# δ >= 0 nats: log ρ may be as low as -δ.
MARGIN = Bounds(_read_margin, lambda lower, upper: f"is above {0.0 - lower:.10g} nats")
# No bound of the user's: the statistic counts rejected responses, and none may be rejected.
NONE_AT_ALL = Bounds(lambda name, threshold, lower: (-math.inf, 0.0), lambda lower, upper: "", takes_threshold=False)
