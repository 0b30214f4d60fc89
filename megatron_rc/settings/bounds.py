"""Bounds of weights and of criteria: typed values, and the texts of settings that they are read from."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megatron_rc.parallel.arguments import check_number

Threshold = float | str | None
DEFAULT_WEIGHT_THRESHOLD = 2.0


@dataclass(frozen=True)
class WeightBounds:
    """Bounds on the importance weights, and the treatment of weights outside of them.

    Attributes:
        mode: ``truncate``: min(w, upper). ``clamp``: w limited to [lower, upper]. ``mask``: 0 outside [lower, upper].
        lower: the lower bound, a ratio. With ``truncate`` it changes no weight; metrics count the weights below it.
        upper: the upper bound, a ratio.
    """

    mode: Literal["truncate", "clamp", "mask"]
    lower: float
    upper: float

    @property
    def log_lower(self) -> float:
        """The lower bound in nats."""
        return math.log(self.lower)

    @property
    def log_upper(self) -> float:
        """The upper bound in nats."""
        return math.log(self.upper)


@dataclass(frozen=True)
class Bounds:
    """The form of a criterion's bounds: how they are read from the settings, and how they are described.

    Attributes:
        read: function that returns the bounds (lower, upper) on the statistic. Its arguments are the criterion's name,
            its text of ``rollout_rs_threshold``, and its text of ``rollout_rs_threshold_lower`` or None.
        words: function that describes the rejected range from (lower, upper): "is above 0.1 nats".
        takes_threshold: False for a criterion without a bound of the user's; ``read`` then gets an empty text.
        takes_lower: True if ``rollout_rs_threshold_lower`` may be given.
        on_ratio: True if the user's bounds apply to a ratio; the bounds on the statistic are their logarithms.
    """

    read: Callable[[str, str, str | None], tuple[float, float]]
    words: Callable[[float, float], str]
    takes_threshold: bool = True
    takes_lower: bool = False
    on_ratio: bool = False


def read_weight_bounds(threshold: Threshold, mode: str | None, lower: float | None) -> WeightBounds:
    """Return the weights' bounds that ``rollout_is_threshold``, ``_mode`` and ``_threshold_lower`` describe.

    A pair of bounds without a mode means ``mask``, one number without a mode ``truncate``. One number u with ``clamp``
    or ``mask`` means [1/u, u], if there is no ``rollout_is_threshold_lower``.

    Raises:
        ValueError: a bound that is no positive number, bounds out of order, or a pair with ``truncate``.
    """
    field = "rollout_is_threshold"
    if threshold is None:
        threshold = DEFAULT_WEIGHT_THRESHOLD
    pair_lower, upper = read_bounds(field, threshold)

    if pair_lower is not None and mode == "truncate":
        raise ValueError(
            f"{field}={threshold!r} has a lower bound that rollout_is_mode='truncate' does not use: give one number, "
            "or the mode mask or clamp"
        )
    if pair_lower is None and mode in (None, "truncate"):
        return WeightBounds(mode="truncate", lower=min(1 / upper, upper), upper=upper)

    low, high = ratio_interval(field, threshold, lower)
    return WeightBounds(mode="clamp" if mode == "clamp" else "mask", lower=low, upper=high)


def ratio_interval(field: str, threshold: float | str, lower: float | None) -> tuple[float, float]:
    """Return the bounds (lower, upper) on a ratio from a field and the field of its lower bound.

    Args:
        field: name of the field of the threshold; ``{field}_lower`` is the field of the lower bound.
        threshold: ``"lo_hi"``, or one number u, which means [1/u, u] if ``lower`` is None.
        lower: the lower bound, or None.

    Raises:
        ValueError: a bound that is no positive number, bounds out of order, or two lower bounds.
    """
    pair_lower, upper = read_bounds(field, threshold)
    if pair_lower is not None:
        if lower is not None:
            raise ValueError(
                f"{field}={threshold!r} has a lower bound already: drop {field}_lower={lower!r}, or give one number"
            )
        return pair_lower, upper

    if lower is None:
        check_ordered(field, threshold, 1 / upper, upper)
        return 1 / upper, upper

    check_positive(f"{field}_lower", lower)
    check_ordered(f"{field}_lower", lower, lower, upper)
    return lower, upper


def read_bounds(field: str, value: float | str) -> tuple[float | None, float]:
    """Return (lower, upper) of a pair such as ``"0.5_2"``, or (None, upper) of one number or its text.

    Raises:
        ValueError: a bound that is no finite positive number, or bounds out of order.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{field}={value!r} must be a finite positive number, or a pair of them as 'lo_hi'")
    if not isinstance(value, str):
        check_positive(field, value)
        return None, float(value)

    numbers = [read_number(field, part) for part in value.split("_")]
    if len(numbers) > 2:
        raise ValueError(f"{field}={value!r} must be a number or 'lo_hi'")
    for number in numbers:
        check_positive(field, number)
    if len(numbers) == 1:
        return None, numbers[0]
    check_ordered(field, value, numbers[0], numbers[1])
    return numbers[0], numbers[1]


def read_number(field: str, text: str) -> float:
    """Return the number that a text spells; ValueError for another text, and for a pair of numbers."""
    try:
        number = float(text)
    except ValueError:
        raise ValueError(
            f"{field}={text!r} is not a number: give digits, such as 2.0, or 0.5_2.0 for two bounds"
        ) from None
    # Python reads the text 0_5 as 5; in settings an underscore separates two bounds.
    if "_" in text:
        raise ValueError(f"{field}={text!r} must be one number, not a pair")
    return number


def check_ordered(field: str, value: float | str, lower: float, upper: float) -> None:
    """Raise ValueError unless lower <= upper. Equal bounds are legal, as in verl and NeMo-RL."""
    # The negation refuses NaN, too.
    if not lower <= upper:
        raise ValueError(
            f"{field}={value!r} means [{lower:g}, {upper:g}]: the lower bound on ρ must not lie above the upper one"
        )


def check_positive(field: str, value: object) -> None:
    """Raise ValueError unless the value is a finite positive number."""
    check_number(field, value, lambda number: 0 < number <= sys.float_info.max, "must be a finite positive number")


def _read_ratio(name: str, threshold: str, lower: str | None) -> tuple[float, float]:
    lower_number = None if lower is None else read_number("rollout_rs_threshold_lower", lower)
    low, high = ratio_interval("rollout_rs_threshold", threshold, lower_number)
    return math.log(low), math.log(high)


def _read_upper(name: str, threshold: str, lower: str | None) -> tuple[float, float]:
    pair_lower, upper = read_bounds("rollout_rs_threshold", threshold)
    if pair_lower is not None:
        raise ValueError(f"rollout_rs_threshold={threshold!r}: {name} takes one upper bound, in nats")
    return -math.inf, upper


def _read_margin(name: str, threshold: str, lower: str | None) -> tuple[float, float]:
    margin = read_number("rollout_rs_threshold", threshold)
    if not 0 <= margin < math.inf:
        raise ValueError(f"rollout_rs_threshold={threshold!r}: {name} takes one number, 0 or more")
    return -margin, math.inf


def _read_nothing(name: str, threshold: str, lower: str | None) -> tuple[float, float]:
    return -math.inf, 0.0


# Two bounds on a ratio: "lo_hi", or u for [1/u, u], or u with a lower bound in the field rollout_rs_threshold_lower.
RATIO = Bounds(
    read=_read_ratio,
    words=lambda lower, upper: f"is outside [{math.exp(lower):.10g}, {math.exp(upper):.10g}]",
    takes_lower=True,
    on_ratio=True,
)
# One upper bound, in nats.
UPPER = Bounds(read=_read_upper, words=lambda lower, upper: f"is above {upper:.10g} nats")
# One upper bound on a number without a unit.
UPPER_NUMBER = Bounds(read=_read_upper, words=lambda lower, upper: f"is above {upper:.10g}")
# One margin δ >= 0, in nats: the statistic may be as low as -δ.
MARGIN = Bounds(read=_read_margin, words=lambda lower, upper: f"is above {0.0 - lower:.10g} nats")
# No bound of the user's: the statistic is a number of rejected responses, and none may be rejected.
NONE_AT_ALL = Bounds(read=_read_nothing, words=lambda lower, upper: "", takes_threshold=False)
