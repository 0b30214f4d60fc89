"""Entries of a ``config.json`` and the flags of a run that say the same: each is one row of a table, for both ways.

A family lists its rows. Read from a file they give flags; written from a run's settings they give the arguments of a
``transformers`` config; and settings that they fit are a model of the family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rc.launch.run_config import RunConfig, flag_options

# Names without dashes, and values as they would be typed; ``true`` and ``false`` for switches.
Flags = dict[str, str]
File = Mapping[str, Any]


class UnknownFeatureError(Exception):
    """A setting in a ``config.json`` under which our GPTModel would be another function."""


class Row:
    """What one row of a family's table does; this one reads and writes nothing, and every run fits it."""

    def read(self, file: File) -> Flags:
        """The flags that it stands for in a ``config.json``.

        Raises:
            KeyError: an entry is missing that has no default.
            UnknownFeatureError: it says what this model cannot be.
        """
        return {}

    def write(self, config: RunConfig) -> dict[str, Any]:
        """The arguments of the ``transformers`` config that it stands for in a run's settings."""
        return {}

    def fits(self, config: RunConfig) -> bool:
        """Whether a run's settings are possible in this family."""
        return True


_REQUIRED = object()


@dataclass(frozen=True)
class Entry(Row):
    """An entry whose value is a flag's.

    Attributes:
        name: in ``config.json``.
        flag: without dashes.
        default: where the file lacks it, or has null: a value, or a function of the file.
        inverted: true in the file is false as a flag, and the other way round.
        other_name: that some files use instead.
        other_flag: that is set to the same.
    """

    name: str
    flag: str
    default: Any = _REQUIRED
    inverted: bool = False
    other_name: str = ""
    other_flag: str = ""

    def read(self, file: File) -> Flags:
        """See :class:`Row`; no flag where the value is None."""
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
class Always(Row):
    """A flag that the whole family has at one value; None: it is not given."""

    flag: str
    value: Any

    def read(self, file: File) -> Flags:
        """See :class:`Row`."""
        return {} if self.value is None else {self.flag: as_word(self.flag, self.flag, self.value)}

    def fits(self, config: RunConfig) -> bool:
        """See :class:`Row`."""
        found: Any = config.value_of(self.flag)
        return bool(found == self.value)


@dataclass(frozen=True)
class Lacks(Row):
    """A flag that no model of the family has: in a run it has its default, or does not apply."""

    flag: str

    def read(self, file: File) -> Flags:
        """See :class:`Row`."""
        default = flag_options()[self.flag][1].default
        return {} if default is None else {self.flag: as_word(self.flag, self.flag, default)}

    def fits(self, config: RunConfig) -> bool:
        """See :class:`Row`."""
        return config.value_of(self.flag) in (None, flag_options()[self.flag][1].default)


@dataclass(frozen=True)
class Follows(Row):
    """A flag that follows from the file, and what it then is in a run."""

    flag: str
    value: Callable[[File], Any]
    holds: Callable[[RunConfig], bool]

    def read(self, file: File) -> Flags:
        """See :class:`Row`."""
        return {self.flag: as_word(self.flag, self.flag, self.value(file))}

    def fits(self, config: RunConfig) -> bool:
        """See :class:`Row`."""
        return self.holds(config)


@dataclass(frozen=True)
class Choice(Row):
    """An entry of few values, each of them a value of one flag; the first with a value is the one that is written."""

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
    """An entry that may have one value alone, which is its default in ``transformers`` too: it is never written."""

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
    """An argument that a file may have otherwise, since it changes nothing that is computed here."""

    name: str
    value: Any

    def write(self, config: RunConfig) -> dict[str, Any]:
        """See :class:`Row`."""
        return {self.name: self.value}


def as_word(name: str, flag: str, value: Any) -> str:
    """The value as it would be typed.

    Raises:
        UnknownFeatureError: it is of another kind than the flag's.
    """
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
