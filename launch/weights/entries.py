"""Rows of a family's table, each relating entries of a ``config.json`` to flags of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rc.launch.run_config import RunConfig, flag_options

# Values of flags by their names, which have dashes inside and none in front.
Flags = dict[str, Any]
File = Mapping[str, Any]
_REQUIRED = object()


class UnknownFeatureError(Exception):
    """A setting in a ``config.json`` that the tables of families do not convert."""


@dataclass(frozen=True)
class Row:
    """Functions of one row; by default it reads and writes nothing, and every run fits it."""

    # Flags from a ``config.json``; KeyError for a missing entry, UnknownFeatureError for one that is not converted.
    read: Callable[[File], Flags] = lambda file: {}
    # Arguments of the ``transformers`` config from a run's settings.
    write: Callable[[RunConfig], dict[str, Any]] = lambda config: {}
    # Whether the family allows the run's settings.
    fits: Callable[[RunConfig], bool] = lambda config: True


def only(name: str, value: Any) -> Row:
    """Row of an entry with one allowed value, which is its default in ``transformers``; never written."""

    def read(file: File) -> Flags:
        found = file.get(name)
        # transformers takes null for false.
        is_null_for_false = name in file and found is None and value is True
        if is_null_for_false or (found is not None and found != value):
            raise UnknownFeatureError(f"{name} is {found!r}, not {value!r}")
        return {}

    return Row(read)


def stated(name: str, value: Any) -> Row:
    """Row of an entry with one allowed value, written for programs that have another default than ``transformers``."""
    return Row(only(name, value).read, lambda config: {name: value})


def entry(
    name: str,
    flag: str,
    default: Any = _REQUIRED,
    *,
    inverted: bool = False,
    other_name: str = "",
    other_flag: str = "",
) -> Row:
    """Row of an entry with the value of a flag; the flag is not given if the value is None.

    Args:
        name: name in ``config.json``.
        flag: name of the flag without dashes.
        default: value if the file lacks the entry or has null; may be a function of the file.
        inverted: whether true in the file means false for the flag.
        other_name: name that some files use instead.
        other_flag: second flag with the same value.
    """

    def read(file: File) -> Flags:
        value = file.get(name)
        if value is None:
            value = file.get(other_name)
        if value is None:
            if default is _REQUIRED:
                raise KeyError(name)
            value = default(file) if callable(default) else default
        if inverted and isinstance(value, bool):
            value = not value
        return {one: typed(name, one, value) for one in (flag, other_flag) if one and value is not None}

    def write(config: RunConfig) -> dict[str, Any]:
        value = config.value_of(flag)
        return {name: not value if inverted else value}

    return Row(read, write)


def follows(flag: str, value: Callable[[File], Any], fits: Callable[[RunConfig], bool]) -> Row:
    """Row of a flag computed from the file (None: it is not given), with a test of a run's settings."""

    def read(file: File) -> Flags:
        found = value(file)
        return {} if found is None else {flag: typed(flag, flag, found)}

    return Row(read, fits=fits)


def always(flag: str, value: Any) -> Row:
    """Row of a flag with the same value in the whole family; None: the flag is not given."""
    return follows(flag, lambda file: value, lambda config: bool(config.value_of(flag) == value))


def lacks(flag: str) -> Row:
    """Row of a flag that no model of the family uses: it must have its default, or not apply."""
    default = flag_options()[flag][1].default
    return follows(flag, lambda file: default, lambda config: config.value_of(flag) in (None, default))


def choice(name: str, flag: str, values: Mapping[str, Any], default: str) -> Row:
    """Row of an entry with a few values, each mapped to a value of the flag; of equal ones the first is written."""

    def read(file: File) -> Flags:
        found = file.get(name, default)
        if not isinstance(found, str) or found not in values:
            raise UnknownFeatureError(f"{name} is {found!r}, not {' or '.join(map(repr, values))}")
        return {flag: typed(name, flag, values[found])}

    def write(config: RunConfig) -> dict[str, Any]:
        return {name: next(word for word, meant in values.items() if meant == config.value_of(flag))}

    return Row(read, write, lambda config: config.value_of(flag) in values.values())


def written(name: str, value: Any) -> Row:
    """Row of an argument that is written but not read, because it does not change GPTModel's function."""
    return Row(write=lambda config: {name: value})


def typed(name: str, flag: str, value: Any) -> Any:
    """Value of an entry with the type of the flag; UnknownFeatureError if it has another type."""
    option = flag_options().get(flag)
    kind = bool if option is None else option[1].kind
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = {int: is_number and value == int(value), float: is_number, bool: isinstance(value, bool)}
    if not fits.get(kind, isinstance(value, str)):
        words = {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "a word")
        raise UnknownFeatureError(f"{name} is {value!r}, not {words}")
    return kind(value)
