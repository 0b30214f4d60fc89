"""Declaration of a setting: a field of a section, from which its flag follows.

    num_layers: int = option("number of transformer layers", required=True)

makes ``--num-layers``. The annotation gives the type: a ``Literal`` lists the choices, a ``bool`` is a switch, a
``tuple`` takes one value or more. A field without ``option`` has no flag: ``flags/follow.py`` works it out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from megatron_rc.launch.errors import ConfigurationError, flag

_KEY = "option"


@dataclass(frozen=True, kw_only=True)
class Option:
    """Flag of a field."""

    help: str  # text for ``--help``; stands alone, with the unit and any default that is worked out
    # Value if the flag is not given; None: worked out from other flags, or nothing. A switch is off by default.
    default: Any = None
    flag: str = ""  # name with underscores; by default the field's name
    inverted: bool = False  # the flag says the opposite of the field
    required: bool = False  # the user has to give it
    not_negative: bool = False  # the value may be 0; otherwise a number must be positive, and finite
    any_sign: bool = False  # the number may also be negative
    below: float | None = None  # bound that the value must not reach
    most: float | None = None  # largest value
    metavar: str | None = None  # name of the value in ``--help``
    # Function that makes the value of a word, if the type alone would accept words without a meaning.
    read: Callable[[str], Any] | None = None
    # The rest follows from the annotation of the field.
    field: str = ""  # name of the field
    kind: type = str  # type of one value
    choices: tuple[str, ...] = ()  # all values, if there are few
    many: bool = False  # the flag takes one value or more


def option(help: str, *, default: Any = None, **how: Any) -> Any:
    """Declare a field with a flag; the keywords are the attributes of :class:`Option`."""
    declared = Option(help=help, default=default, **how)
    return dataclasses.field(default=default, metadata={_KEY: declared})


class Section:
    """Base of the sections: frozen dataclasses that check the ranges of their numbers."""

    def __post_init__(self) -> None:
        """Raise ConfigurationError for a number out of its range; sections add checks of their own."""
        for declared in options_of(type(self)):
            check_range(declared, getattr(self, declared.field))

    def typed(self, name: str) -> str:
        """Return the flag of a field with its value, as typed."""
        for declared in options_of(type(self)):
            if declared.field == name:
                value = getattr(self, name)
                return as_typed(declared.flag, not value if declared.inverted else value)
        raise KeyError(name)

    def refuse(self, *names: str, because: str) -> None:
        """Raise a ConfigurationError that begins with the flags of these fields and their values."""
        raise ConfigurationError(f"{' with '.join(map(self.typed, names))} {because}")


def _read_options(section: type) -> tuple[Option, ...]:
    """Return the complete options of a section, in the order of its fields."""
    hints = get_type_hints(section)
    options = []
    for field in dataclasses.fields(section):
        declared = field.metadata.get(_KEY)
        if declared is None:
            continue
        of_type = kind_of(hints[field.name])
        default = bool(declared.default) if of_type["kind"] is bool else declared.default
        name = declared.flag or field.name
        options.append(dataclasses.replace(declared, field=field.name, flag=name, default=default, **of_type))
    return tuple(options)


options_of: Callable[[type], tuple[Option, ...]] = functools.cache(_read_options)


def check_range(declared: Option, value: Any) -> None:
    """Raise ConfigurationError if a number is not finite, or outside of the range that its option allows."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    wrong = ""
    if declared.any_sign:
        if not math.isfinite(value):
            wrong = "must be a finite number"
    elif declared.not_negative:
        if not 0 <= value < math.inf:
            wrong = "must be 0 or more"
    elif not 0 < value < math.inf:
        wrong = "must be positive"
    if not wrong and declared.most is not None and value > declared.most:
        wrong = f"must be at most {declared.most}"
    if not wrong and declared.below is not None and value >= declared.below:
        wrong = f"must be below {declared.below}"
    if wrong:
        raise ConfigurationError(f"{flag(declared.flag)} {value} {wrong}")


def values_of(section: Any) -> dict[str, Any]:
    """Return the fields of a section by name: arguments for a dataclass of Megatron's that has these names."""
    return {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}


def parts_of(hint: Any) -> list[Any]:
    """Return the types of a union without None, or the type alone."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return [part for part in parts if part is not NoneType]


def kind_of(hint: Any) -> dict[str, Any]:
    """Return type, choices and number of a flag's values, from the annotation of its field without None."""
    kind = parts_of(hint)[0]
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        return {"kind": type(choices[0]), "choices": choices}
    if get_origin(kind) in (tuple, list):
        return {"kind": get_args(kind)[0], "many": True}
    return {"kind": kind}


def as_typed(name: str, value: Any) -> str:
    """Return a flag with its value, as typed; ``name`` has underscores."""
    if isinstance(value, bool):
        return flag(name if value else f"no_{name}")
    values = value if isinstance(value, tuple | list) else [value]
    return " ".join([flag(name), *map(str, values)])
