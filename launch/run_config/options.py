"""How a setting of the launcher is declared: once, as a field of a section, from which its flag follows.

    num_layers: int = option("transformer layers", required=True, positive=True)

makes ``--num-layers``: the type comes from the annotation, a ``Literal`` lists the choices, a ``bool`` is a switch, a
``tuple`` takes one value or more.
A field without ``option`` has no flag of its own: ``flags/resolve.py`` works it out from the others.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

_KEY = "option"
# Whole numbers beyond are none of any run, and not exact as float64.
MOST = 2**53
Section = TypeVar("Section")


@dataclass(frozen=True, kw_only=True)
class Option:
    """The flag of a field.

    Attributes:
        help: what it sets, for ``--help``.
        default: where it is not given; None: what is worked out, or nothing.
        flag: its name with underscores, where it is not the field's: Megatron-LM's parser calls some otherwise.
        inverted: the flag says the opposite of the field.
        required: there is no default.
        positive: must be a finite number above 0 where it is given.
        not_negative: must be a finite number of at least 0 where it is given.
        most: the largest whole number that it may be: more would fill time and memory before anything objects.
        metavar: stands for the value in ``--help``.
        read: makes a value of a word, where its type would take words that mean nothing.
        field: name of the field.
        kind: type of one value.
        choices: all values, where there are few.
        many: the flag takes one value or more, the field holds them all.
    """

    help: str
    default: Any = None
    flag: str = ""
    inverted: bool = False
    required: bool = False
    positive: bool = False
    not_negative: bool = False
    most: int = MOST
    metavar: str | None = None
    read: Callable[[str], Any] | None = None
    field: str = ""
    kind: type = str
    choices: tuple[str, ...] = ()
    many: bool = False


def option(help: str, **how: Any) -> Any:
    """A field with a flag; see :class:`Option` for what may be said of it."""
    return dataclasses.field(metadata={_KEY: Option(help=help, **how)})


def options_of(section: type) -> tuple[Option, ...]:
    """The flags of a section, complete, in the order of its fields."""
    return _read_options(section)


@functools.cache
def _read_options(section: type) -> tuple[Option, ...]:
    hints = get_type_hints(section)
    found = []
    for field in dataclasses.fields(section):
        declared = field.metadata.get(_KEY)
        if declared is not None:
            found.append(
                dataclasses.replace(
                    declared, field=field.name, flag=declared.flag or field.name, **_kind_of(hints[field.name])
                )
            )
    return tuple(found)


def out_of_range(option: Option, value: Any) -> str:
    """What a value must be that it is not, in words; nothing where it may stand."""
    if not isinstance(value, int | float):
        return ""
    if option.positive and not 0 < value < float("inf"):
        return "must be positive"
    if option.not_negative and not 0 <= value < float("inf"):
        return "must be 0 or more"
    return f"must be at most {option.most}" if isinstance(value, int) and value > option.most else ""


def values_of(section: Any) -> dict[str, Any]:
    """The fields of a section by name: arguments for the dataclass of Megatron's that has these names."""
    return {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}


def _kind_of(hint: Any) -> dict[str, Any]:
    """What ``int``, ``int | None``, ``Literal[...]`` and ``tuple[str, ...]`` say of a flag's values."""
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (part for part in get_args(hint) if part is not NoneType)
    if get_origin(hint) is Literal:
        return {"kind": str, "choices": get_args(hint)}
    if get_origin(hint) is tuple:
        return {"kind": get_args(hint)[0], "many": True}
    return {"kind": hint}
