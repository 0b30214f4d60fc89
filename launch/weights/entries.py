"""Rows of a family's table, each relating entries of a ``config.json`` to flags of a run.

A row reads an entry into flags, writes flags as arguments of a ``transformers`` config, and tells whether a run's
settings fit the family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rc.launch.run_config import RunConfig, flag_options

# Names without dashes, and values as typed; ``true`` and ``false`` for switches.
Flags = dict[str, str]
File = Mapping[str, Any]


class UnknownFeatureError(Exception):
    """A setting in a ``config.json`` that GPTModel cannot reproduce."""


class Row:
    """Base of all rows; it reads and writes nothing, and every run fits it."""

    def read(self, file: File) -> Flags:
        """Flags from a ``config.json``; KeyError for a missing entry, UnknownFeatureError for one GPTModel lacks."""
        return {}

    def write(self, config: RunConfig) -> dict[str, Any]:
        """Arguments of the ``transformers`` config from a run's settings."""
        return {}

    def fits(self, config: RunConfig) -> bool:
        """Whether this family allows the run's settings."""
        return True


_REQUIRED = object()


@dataclass(frozen=True)
class Entry(Row):
    """An entry with the value of a flag."""

    name: str  # name in ``config.json``
    flag: str  # name of the flag without dashes
    default: Any = _REQUIRED  # value if the file lacks the entry or has null; may be a function of the file
    inverted: bool = False  # whether true in the file means false for the flag
    other_name: str = ""  # name that some files use instead
    other_flag: str = ""  # second flag with the same value

    def read(self, file: File) -> Flags:
        """See :class:`Row`; no flag if the value is None."""
        value = file.get(self.name)
        if value is None:
            value = file.get(self.other_name)
        if value is None:
            if self.default is _REQUIRED:
                raise KeyError(self.name)
            value = self.default(file) if callable(self.default) else self.default
        if self.inverted and isinstance(value, bool):
            value = not value
        return {
            flag: as_word(self.name, flag, value) for flag in (self.flag, self.other_flag) if flag and value is not None
        }

    def write(self, config: RunConfig) -> dict[str, Any]:
        """See :class:`Row`."""
        value = config.value_of(self.flag)
        return {self.name: not value if self.inverted else value}


@dataclass(frozen=True)
class Follows(Row):
    """A flag computed from the file (None: it is not given), with a test of a run's settings."""

    flag: str
    value: Callable[[File], Any]
    holds: Callable[[RunConfig], bool]

    def read(self, file: File) -> Flags:
        """See :class:`Row`."""
        value = self.value(file)
        return {} if value is None else {self.flag: as_word(self.flag, self.flag, value)}

    def fits(self, config: RunConfig) -> bool:
        """See :class:`Row`."""
        return self.holds(config)


def always(flag: str, value: Any) -> Follows:
    """Row of a flag with the same value in the whole family; None: the flag is not given."""
    return Follows(flag, lambda file: value, lambda config: bool(config.value_of(flag) == value))


def lacks(flag: str) -> Follows:
    """Row of a flag that no model of the family uses: it must have its default, or not apply."""
    default = flag_options()[flag][1].default
    return Follows(flag, lambda file: default, lambda config: config.value_of(flag) in (None, default))


@dataclass(frozen=True)
class Choice(Row):
    """An entry with a few values, each mapped to a value of the flag; of equal ones the first is written."""

    name: str
    flag: str
    values: Mapping[str, Any]
    default: str

    def read(self, file: File) -> Flags:
        """See :class:`Row`."""
        found = file.get(self.name, self.default)
        if not isinstance(found, str) or found not in self.values:
            raise UnknownFeatureError(f"{self.name} is {found!r}, not {' or '.join(map(repr, self.values))}")
        return {self.flag: as_word(self.name, self.flag, self.values[found])}

    def write(self, config: RunConfig) -> dict[str, Any]:
        """See :class:`Row`."""
        value = config.value_of(self.flag)
        return {self.name: next(name for name, meant in self.values.items() if meant == value)}

    def fits(self, config: RunConfig) -> bool:
        """See :class:`Row`."""
        return config.value_of(self.flag) in self.values.values()


@dataclass(frozen=True)
class Only(Row):
    """An entry with one allowed value, its default in ``transformers``; never written."""

    name: str
    value: Any

    def read(self, file: File) -> Flags:
        """See :class:`Row`."""
        found = file.get(self.name)
        if found is not None and found != self.value:
            raise UnknownFeatureError(f"{self.name} is {found!r}, not {self.value!r}")
        return {}


@dataclass(frozen=True)
class Written(Row):
    """An argument that is written but not read, because it does not change GPTModel's function."""

    name: str
    value: Any

    def write(self, config: RunConfig) -> dict[str, Any]:
        """See :class:`Row`."""
        return {self.name: self.value}


def as_word(name: str, flag: str, value: Any) -> str:
    """Value of an entry as typed after the flag; UnknownFeatureError if it has another type than the flag."""
    option = flag_options().get(flag)
    kind = bool if option is None else option[1].kind
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = {int: is_number and value == int(value), float: is_number, bool: isinstance(value, bool)}
    if not fits.get(kind, isinstance(value, str)):
        words = {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "a word")
        raise UnknownFeatureError(f"{name} is {value!r}, not {words}")
    if kind is bool:
        return "true" if value else "false"
    return str(int(value) if kind is int else value)
