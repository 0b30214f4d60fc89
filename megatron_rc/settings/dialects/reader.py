"""Another program's settings, checked when they are read, and helpers that make this package's fields of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_rc.parallel.arguments import one_of

# Stand for "no bound": below and above every ratio of two float64 log-probs whose weight is neither 0 nor limited.
NO_LOWER_BOUND = 1e-300
NO_UPPER_BOUND = 1e300


@dataclass(frozen=True)
class Dialect:
    """The configuration of one program in one of its releases.

    Attributes:
        name: the name for ``from_dict``.
        defaults: every setting that is read, with the program's default.
        read: function that translates the settings into fields of :class:`megatron_rc.RolloutCorrectionConfig`.
        sections: sections of the program's files, each inside the one before; the last one has the settings.
        shares_section: True if other settings stand beside these; they are dropped with a note.
        reserved_prefixes: in a shared section: beginnings of names that belong to the correction; an unknown name that
            begins so is an error.
        needed: the settings that matter; if all of them are given, an unknown one is a warning, no error.
        known_beside: other settings of a shared section; if any are listed, a name that is not is a warning.
        beside: functions of settings that are no part of the correction, but change the loss, by name. They get the
            dotted name and the value, and return a note, or None if the value changes nothing. They raise ValueError
            for a value that cannot work here.
        elsewhere: settings of other sections, by section.
        switched_off: the settings that a section without a value (``null``) means.
        spelled: function from a key to the setting's name in ``defaults``.
        common_names: settings whose names other sections of a file may have with another meaning.
    """

    name: str
    defaults: Mapping[str, Any]
    read: Callable[[Settings], dict[str, Any]]
    sections: tuple[str, ...] = ()
    shares_section: bool = False
    reserved_prefixes: tuple[str, ...] = ()
    needed: frozenset[str] = frozenset()
    known_beside: frozenset[str] = frozenset()
    beside: Mapping[str, Callable[[str, Any], str | None]] = field(default_factory=dict)
    elsewhere: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    switched_off: Mapping[str, Any] = field(default_factory=dict)
    spelled: Callable[[str], str] = str
    common_names: frozenset[str] = frozenset()


class Settings:
    """The user's settings of another program over its defaults, and the notes of their translation.

    A note is a line about a setting that was dropped, or that means something else here.

    Args:
        given: the user's settings by name.
        defaults: every setting of the dialect with the program's default.
    """

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._values = {**defaults, **given}
        self._defaults = defaults
        self.given = frozenset(given)
        self.notes: list[str] = []

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def boolean(self, name: str) -> bool:
        """Return a setting that is true or false; ValueError for another value."""
        value = self._values[name]
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} must be true or false")
        return value

    def choice(self, name: str, allowed: tuple[str | None, ...]) -> str | None:
        """Return a setting that is one of several words; ValueError for another value."""
        value: str | None = self._values[name]
        one_of(name, value, allowed)
        return value

    def number(self, name: str) -> float | None:
        """Return a setting that is a finite number, a text of one, or None; ValueError for another value."""
        value = self._values[name]
        return None if value is None else _finite(name, value)

    def positive(self, name: str) -> float:
        """Return a setting that is a finite number above 0; ValueError for another value, and for None."""
        value = self.number(name)
        if value is None or value <= 0:
            raise ValueError(f"{name}={value!r} must be a finite positive number")
        return value

    def not_negative(self, name: str) -> float:
        """Return a setting that is a finite number of 0 or more; ValueError for another value, and for None."""
        value = self.number(name)
        if value is None or value < 0:
            raise ValueError(f"{name}={value!r} must be a number, 0 or more")
        return value

    def veto(self, name: str) -> dict[str, Any]:
        """Return the field of the veto from its setting; no field for None."""
        if self._values[name] is None:
            return {}
        return {"rollout_token_veto_threshold": self.positive(name)}

    def bounds(self, lower_name: str, upper_name: str) -> tuple[float, float]:
        """Return bounds on ρ from two settings; an absent lower one means 1/upper.

        Raises:
            ValueError: no positive upper bound, or a lower bound above it.
        """
        upper = self.positive(upper_name)
        lower = self.number(lower_name)
        if lower is None:
            lower = 1 / upper
        return self.interval(lower, upper, lower_name, upper_name)

    def interval(self, lower: float, upper: float, lower_name: str, upper_name: str) -> tuple[float, float]:
        """Return the bounds; a lower one of 0 or less is no bound, and becomes ``NO_LOWER_BOUND``, with a note.

        Raises:
            ValueError: the lower bound lies above the upper one; the error has both names.
        """
        if lower <= 0:
            self.notes.append(f"{lower_name}={lower:g} is no bound: written as {NO_LOWER_BOUND:g}")
            lower = NO_LOWER_BOUND
        if lower > upper:
            raise ValueError(f"{lower_name}={lower:g} must not lie above {upper_name}={upper:g}")
        return lower, upper

    def default(self, name: str, value: float) -> None:
        """Use a value for a setting that is absent, with a note."""
        if self._values[name] is None:
            self.notes.append(f"{name} is absent: {value}")
            self._values[name] = value

    def drop(self, *names: str, because: str) -> None:
        """Note settings that are not translated, if they differ from their defaults."""
        for name in names:
            value = self._values[name]
            if name in self.given and value is not None and value != self._defaults[name]:
                self.notes.append(f"{name}={value!r} dropped: {because}")


def _finite(name: str, value: object) -> float:
    """Return a finite number, or the number that a text spells (YAML 1.1 reads 1e-4 as a text); else ValueError."""
    # Python reads the text 0_5 as 5.
    if isinstance(value, bool) or not isinstance(value, (int, float, str)) or "_" in str(value):
        raise ValueError(f"{name}={value!r} must be a number")
    try:
        number = float(value)
    except OverflowError:
        # Python cannot print integers of thousands of digits in an error.
        raise ValueError(f"{name} must be finite") from None
    except ValueError:
        raise ValueError(f"{name}={value!r} must be a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{name}={value!r} must be finite")
    return number


def noted(words: str) -> Callable[[str, Any], str | None]:
    """Return the function of ``Dialect.beside`` for a setting that has a note, unless it is off."""
    return lambda name, value: None if value in (None, False) else f"{name}={value!r}: {words}"


def pair(lower: float, upper: float) -> str:
    """Return bounds as the text ``"lo_hi"``, from which exactly these numbers are read."""
    return f"{lower!r}_{upper!r}"


def rejection(criteria: list[tuple[str, str]]) -> dict[str, Any]:
    """Return the fields of rejection criteria from (name, text of its bound) of each; no field for an empty list."""
    if not criteria:
        return {}
    names = ",".join(name for name, _ in criteria)
    bounds = ",".join(bound for _, bound in criteria)
    is_number = len(criteria) == 1 and "_" not in bounds
    return {"rollout_rs": names, "rollout_rs_threshold": float(bounds) if is_number else bounds}


def clamped(settings: Settings, lower_name: str, upper_name: str) -> dict[str, Any]:
    """Return the fields of weights clamped between two settings, or truncated if the lower one is 0 or absent."""
    lower = settings.number(lower_name)
    if lower is None or lower <= 0:
        return {"rollout_is_threshold": settings.positive(upper_name)}
    return {"rollout_is_threshold": pair(*settings.bounds(lower_name, upper_name)), "rollout_is_mode": "clamp"}
