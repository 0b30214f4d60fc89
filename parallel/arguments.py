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
    # numbers.Real includes NumPy's numbers, and bool, which is excluded first: temperature=True is a mistake.
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not fits(value):
        raise ValueError(f"{name}={value!r} {expected}")


def check_integer(name: str, value: object, least: float = -math.inf) -> None:
    """Raise ValueError unless the value is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name}={value!r} must be a whole number")
    if value < least:
        expected = f"at least {least}" if least else "0 or more"
        raise ValueError(f"{name}={value} must be {expected}")


def one_of(name: str, value: object, allowed: Collection[object]) -> None:
    """Raise ValueError, naming the choices, unless the value is one of them."""
    # A tuple, because looking up an unhashable value, such as a list, in a set or a dict would raise TypeError.
    if value in tuple(allowed):
        return
    choices = [str(choice) for choice in allowed]
    question = ""
    if isinstance(value, str):
        close_matches = difflib.get_close_matches(value, choices, n=1)
        if close_matches:
            question = f"; did you mean {close_matches[0]!r}?"
    raise ValueError(f"{name}={value!r} is unknown: use one of {', '.join(choices)}{question}")


def check_kind(name: str, value: object, kind: type, remedy: str) -> None:
    """Raise ValueError for a value of another class; ``remedy`` names the value to pass."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} is a {type(value).__name__}: pass {remedy}")


def check_tensors(optional: dict[str, object], **required: object) -> None:
    """Raise ValueError, with the argument's name, for the first value that is no tensor.

    Values in ``optional``, by argument name, may also be None.
    """
    for name, value in (optional | required).items():
        if value is None and name in optional:
            continue
        check_kind(name, value, Tensor, "a torch.Tensor")


def check_alike(like: str, tensor: Tensor, **others: Tensor | None) -> None:
    """Raise ValueError for the first of ``others`` whose shape is not that of ``tensor``; None is skipped.

    ``like`` is the argument name of ``tensor`` in the message.
    """
    for name, value in others.items():
        if value is not None and value.shape != tensor.shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}: expected {tuple(tensor.shape)} of {like}")
