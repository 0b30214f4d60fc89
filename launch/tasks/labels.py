"""Labels of the built-in rules of ``--reward``, which compare a response with a text or a number, or with several."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

EXACT, MATH_VERIFY = BUILT_IN = ("exact", "math-verify")
# Names that data sets give the label inside of an object, the most usual first.
_USUAL_NAMES = ("ground_truth", "answer", "label", "target", "solution")


def answers_of(label: Any) -> list[Any]:
    """Return the right answers that a label stands for: the entries of a list, or the label itself."""
    return list(label) if isinstance(label, list | tuple) else [label]


def texts_of(answer: str | int | float) -> tuple[str, ...]:
    """Return the texts of an answer; a number as Python writes it, and last without exponent and needless zeros."""
    if isinstance(answer, str):
        return (answer.strip(),)
    plain = f"{Decimal(str(answer)):f}"
    if "." in plain:
        plain = plain.rstrip("0").rstrip(".")
    return str(answer), plain


def label_flaw(label: Any, rule: str) -> str | None:
    """Return the part of a label that a built-in rule cannot compare, as a noun phrase; None if there is none."""
    answers = answers_of(label)
    if not answers:
        return "an empty list"
    flaws = (_answer_flaw(answer, rule) for answer in answers)
    return next((flaw for flaw in flaws if flaw is not None), None)


def remedy_for(label: Any, named_by: str | None = None) -> str:
    """Return how to mend a label that has a flaw.

    ``named_by`` is the flag that names the label's key, with its value, as in ``--label-key answer``; None: the label
    comes from no file.
    """
    inside = _label_inside(label) if isinstance(label, Mapping) else None
    if named_by is not None and inside is not None:
        return f"name the answer inside with {named_by}.{inside}"
    return "give the text or number that a response must have, or score with python:pkg.module:function"


def kind_of(value: Any) -> str:
    """Return the JSON type of a value, as a noun phrase."""
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    names = {dict: "an object", list: "a list", str: "a string", type(None): "null"}
    return names.get(type(value), f"a {type(value).__name__}")


def _answer_flaw(answer: Any, rule: str) -> str | None:
    """Return what a built-in rule cannot compare in one answer, as a noun phrase; None if it can."""
    # True is a number to Python.
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return f"{kind_of(answer)} ({reprlib.repr(answer)})"
    if isinstance(answer, float) and not math.isfinite(answer):
        return f"{answer}, which is no finite number"
    # For the rule exact an empty text is the right answer of an empty response.
    if rule == MATH_VERIFY and isinstance(answer, str) and not answer.strip():
        return "an empty text"
    return None


def _label_inside(value: Mapping[Any, Any]) -> str | None:
    """Return the key of an object's entry that can be a label; None if it has none."""
    usable = [key for key, entry in value.items() if isinstance(key, str) and label_flaw(entry, MATH_VERIFY) is None]
    usual = [name for name in _USUAL_NAMES if name in usable]
    return next(iter([*usual, *usable]), None)
