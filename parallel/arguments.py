"""Checks of arguments. Each error names the argument, its value and the expected value."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor


def check_number(name: str, value: object, fits: Callable[[Any], bool], expected: str) -> None:
    """Raise ValueError unless the value is a number (not a bool) for which ``fits`` is true.

    ``expected`` ends the message: "must be positive, and finite". NaN fits no comparison.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not fits(value):
        raise ValueError(f"{name}={value!r} {expected}")


def check_integer(name: str, value: object, least: float = -math.inf) -> None:
    """Raise ValueError unless the value is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name}={value!r} must be a whole number")
    if value < least:
        raise ValueError(f"{name}={value} must be {f'at least {least}' if least else '0 or more'}")


def one_of(name: str, value: object, allowed: Collection[object]) -> None:
    """Raise ValueError, naming the choices, unless the value is one of them."""
    if value not in tuple(allowed):
        known = list(map(str, allowed))
        near = difflib.get_close_matches(value, known, n=1) if isinstance(value, str) else []
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{name}={value!r} is unknown: use one of {', '.join(known)}{meant}")


def check_kind(name: str, value: object, kind: type, remedy: str) -> None:
    """Raise ValueError for a value of another class; ``remedy`` names the value to pass."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} is a {type(value).__name__}: pass {remedy}")


def check_tensors(optional: dict[str, object], **required: object) -> None:
    """Raise ValueError, with the argument's name, for the first value that is no tensor; optional ones may be None."""
    for name, value in (optional | required).items():
        if value is not None or name in required:
            check_kind(name, value, Tensor, "a torch.Tensor")


def check_alike(like: str, tensor: Tensor, **others: Tensor | None) -> None:
    """Raise ValueError for the first other tensor that has not the shape of the tensor named ``like``."""
    for name, value in others.items():
        if value is not None and value.shape != tensor.shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}: expected {tuple(tensor.shape)} of {like}")
