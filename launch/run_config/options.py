"""Declaration of a setting: a field of a section, from which its flag follows.

    num_layers: int = option("number of transformer layers", required=True)

makes ``--num-layers``. The annotation gives the type: a ``Literal`` lists the choices, a ``bool`` is a switch, a
``tuple`` takes one value or more. A field without ``option`` has no flag: ``flags/resolve.py`` works it out.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from megatron_rc.launch.errors import flag

_KEY = "option"
Section = TypeVar("Section")


@dataclass(frozen=True, kw_only=True)
class Option:
    """Flag of a field."""

    help: str  # text for ``--help``; stands alone, with the unit and any default that is worked out
    # Value if the flag is not given; None: worked out from other flags, or nothing. A switch is off by default.
    default: Any = None
    flag: str = ""  # name with underscores, if it is not the field's name
    inverted: bool = False  # the flag says the opposite of the field
    required: bool = False  # the user has to give it
    # Conditions of an effect, all of which must hold: ``name`` (that flag is given), ``name=value|value`` (it has one
    # of these values), ``!name`` or ``!name=value|value`` (not so). Without an effect a given flag is refused.
    needs: tuple[str, ...] = ()
    not_negative: bool = False  # the value may be 0; otherwise a number must be positive, and finite
    any_sign: bool = False  # the number may also be negative
    # Bound that the value must not reach: a number, or the name of another flag; None: no such bound.
    below: float | str | None = None
    # Largest value: a number, or the name of another flag; None: no such bound.
    most: float | str | None = None
    metavar: str | None = None  # name of the value in ``--help``
    # Function that makes the value of a word, if the type alone would accept words without a meaning.
    read: Callable[[str], Any] | None = None
    field: str = ""  # name of the field
    kind: type = str  # type of one value
    choices: tuple[str, ...] = ()  # all values, if there are few
    many: bool = False  # the flag takes one value or more


def option(help: str, *, needs: str = "", **how: Any) -> Any:
    """Declare a field with a flag. ``needs`` separates conditions by blanks; the rest is as in :class:`Option`."""
    return dataclasses.field(metadata={_KEY: Option(help=help, needs=tuple(needs.split()), **how)})


def options_of(section: type) -> tuple[Option, ...]:
    """Complete options of a section, in the order of its fields; all of them need the section's ``NEEDS``."""
    return _read_options(section)


@functools.cache
def _read_options(section: type) -> tuple[Option, ...]:
    hints, switch = get_type_hints(section), getattr(section, "NEEDS", "")
    found = []
    for field in dataclasses.fields(section):
        declared = field.metadata.get(_KEY)
        if declared is not None:
            name = declared.flag or field.name
            needs = declared.needs if name == switch or not switch else (switch, *declared.needs)
            kind = kind_of(*parts_of(hints[field.name]))
            if kind["kind"] is bool and not declared.inverted:
                kind["default"] = bool(declared.default)
            found.append(dataclasses.replace(declared, field=field.name, flag=name, needs=needs, **kind))
    return tuple(found)


def out_of_range(option: Option, value: Any, settings: Any = None) -> str:
    """Words that say which range a value misses, or nothing; bounds by other flags are looked up in ``settings``."""
    if not isinstance(value, int | float) or option.kind is bool:
        return ""
    if not (option.not_negative or option.any_sign or 0 < value < float("inf")):
        return "must be positive"
    if option.not_negative and not 0 <= value < float("inf"):
        return "must be 0 or more"
    for bound, is_excluded in ((option.most, False), (option.below, True)):
        number, shown = (getattr(settings, bound, None), f"{flag(bound)} ") if isinstance(bound, str) else (bound, "")
        if number is not None and (value > number or (is_excluded and value == number)):
            return f"must be {'below' if is_excluded else 'at most'} {shown}{number}"
    return ""


def values_of(section: Any) -> dict[str, Any]:
    """Fields of a section by name: arguments for a dataclass of Megatron's that has these names."""
    return {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}


def parts_of(hint: Any) -> list[Any]:
    """Types of a union without None, or the type alone."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return [part for part in parts if part is not NoneType]


def kind_of(hint: Any) -> dict[str, Any]:
    """Type, choices and number of a flag's values, from ``int``, ``Literal``, ``tuple[str, ...]`` or ``list[str]``."""
    if get_origin(hint) is Literal:
        return {"kind": type(get_args(hint)[0]), "choices": get_args(hint)}
    if get_origin(hint) in (tuple, list):
        return {"kind": get_args(hint)[0], "many": True}
    return {"kind": hint}


def is_met(need: str, settings: Any) -> bool:
    """Whether the values of flags, by name as attributes, meet a condition."""
    name, values = _parsed(need)
    value = getattr(settings, name)
    return (str(value) in values if values else bool(value)) != need.startswith("!")


def name_of(need: str) -> str:
    """Flag that a condition is about."""
    return _parsed(need)[0]


def why_unmet(need: str, settings: Any) -> str:
    """End of a sentence that says why a flag does nothing, and the remedy."""
    name, values = _parsed(need)
    value = getattr(settings, name)
    if need.startswith("!"):
        return f"with {as_typed(name, value)}: drop one of them"
    if values and value is not None:
        return f"with {as_typed(name, value)}: drop it, or use {' or '.join(values)}"
    return f"without {_words(need)}: give both, or neither"


def as_typed(name: str, value: Any) -> str:
    """Text of a flag with its value, as typed; ``name`` has underscores."""
    if isinstance(value, bool):
        return flag(name if value else f"no_{name}")
    return " ".join([flag(name), *map(str, value if isinstance(value, tuple | list) else [value])])


def in_words(needs: Iterable[str]) -> str:
    """Conditions at the end of a help text."""
    wanted = [_words(need) for need in needs if not need.startswith("!")]
    others = [_words(need) for need in needs if need.startswith("!")]
    parts = {"needs": " and ".join(wanted), "not with": " or ".join(others)}
    return "".join(f"; {head} {words}" for head, words in parts.items() if words)


def _parsed(need: str) -> tuple[str, list[str]]:
    name, _, values = need.removeprefix("!").partition("=")
    return name, values.split("|") if values else []


def _words(need: str) -> str:
    name, values = _parsed(need)
    return f"{flag(name)} {' or '.join(values)}".rstrip()
