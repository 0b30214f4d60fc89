"""Reading of another program's settings: every unknown key is an error, and dropped settings are noted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_rc.parallel.arguments import one_of

# In place of no lower bound: below every ratio of two float64 log-probs whose weight is not 0.
NO_LOWER_BOUND = 1e-300


class Settings:
    """The user's settings of another program, with its defaults, and the notes of their translation.

    A note is a line on a setting that was dropped or means something else here.
    """

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._values = {**defaults, **given}
        self._defaults = defaults
        self.given = frozenset(given)
        self.notes: list[str] = []

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def boolean(self, name: str) -> bool:
        """The value of a setting that is true or false; ValueError for another one."""
        value = self._values[name]
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} must be true or false")
        return value

    def choice(self, name: str, allowed: tuple[str | None, ...]) -> str | None:
        """The value of a setting that is one of several words; ValueError for another one."""
        value: str | None = self._values[name]
        one_of(name, value, allowed)
        return value

    def number(self, name: str) -> float | None:
        """The value of a setting that is a finite number, a text of one, or None; ValueError for another one."""
        value = self._values[name]
        return None if value is None else finite(name, value)

    def positive(self, name: str) -> float:
        """The value of a setting that is a finite number above 0; ValueError for another one, or None."""
        value = self.number(name)
        if value is None or value <= 0:
            raise ValueError(f"{name}={value!r} must be a finite positive number")
        return value

    def veto(self, name: str) -> dict[str, Any]:
        """The field of the veto from its setting; empty for None."""
        return {} if self._values[name] is None else {"rollout_token_veto_threshold": self.positive(name)}

    def bounds(self, lower: str, upper: str, default: float | None = None) -> tuple[float, float]:
        """Bounds on ρ from two settings; an absent lower one means 1 / upper, one of 0 or less no lower bound.

        ``default`` is the upper bound, with a note, if the setting is absent. ValueError unless lower <= upper.
        """
        if self._values[upper] is None and default is not None:
            self.notes.append(f"{upper} is absent: {default}")
            self._values[upper] = default
        high, low = self.positive(upper), self.number(lower)
        return self.interval(1 / high if low is None else low, high, lower, upper)

    def interval(self, low: float, high: float, lower: str, upper: str) -> tuple[float, float]:
        """The bounds, a low one of 0 or less replaced; ValueError, with both names, if they are not in order."""
        if low <= 0:
            self.notes.append(f"{lower}={low:g} is no bound: written as {NO_LOWER_BOUND:g}")
            low = NO_LOWER_BOUND
        if not low <= high:
            raise ValueError(f"{lower}={low:g} must not lie above {upper}={high:g}")
        return low, high

    def drop(self, *names: str, because: str) -> None:
        """Note settings that are not translated, if they differ from their defaults."""
        for name in names:
            value = self._values[name]
            if name in self.given and value is not None and value != self._defaults[name]:
                self.notes.append(f"{name}={value!r} dropped: {because}")


def finite(name: str, value: object) -> float:
    """A finite number, or the number that a text spells (YAML 1.1 reads 1e-4 as a text); ValueError for the rest."""
    try:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)) or "_" in str(value):
            raise ValueError
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        raise ValueError(f"{name} must be finite") from None
    except ValueError:
        raise ValueError(f"{name}={value!r} must be a number") from None
    if number - number != 0:
        raise ValueError(f"{name}={value!r} must be finite")
    return number


def pair(lower: float, upper: float) -> str:
    """Bounds as the text ``"lo_hi"``, from which exactly these numbers are read."""
    return f"{lower!r}_{upper!r}"


def rejection(criteria: list[tuple[str, str]]) -> dict[str, Any]:
    """The fields of a chain of (criterion, bound); empty for an empty chain."""
    if not criteria:
        return {}
    bounds = ",".join(bound for _, bound in criteria)
    lone = len(criteria) == 1 and "_" not in bounds
    return {
        "rollout_rs": ",".join(name for name, _ in criteria),
        "rollout_rs_threshold": float(bounds) if lone else bounds,
    }


def clamped(settings: Settings, lower: str, upper: str) -> dict[str, Any]:
    """The fields of weights clamped between two settings, or truncated if the lower one is 0 or None."""
    low = settings.number(lower)
    if low is None or low <= 0:
        return {"rollout_is_threshold": settings.positive(upper)}
    return {"rollout_is_threshold": pair(*settings.bounds(lower, upper)), "rollout_is_mode": "clamp"}


@dataclass(frozen=True)
class Dialect:
    """The configuration of one program in one of its releases."""

    name: str  # for ``from_dict``
    defaults: Mapping[str, Any]  # every known setting with the program's default
    read: Callable[[Settings], dict[str, Any]]  # translates the settings into this package's fields
    sections: tuple[str, ...] = ()  # of the program's files, each inside the one before; the last has the settings
    shares_section: bool = False  # the section also holds other settings, which are dropped with a note
    elsewhere: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # settings of other sections, by section
    switched_off: Mapping[str, Any] = field(default_factory=dict)  # the settings that a section of null means
    spelled: Callable[[str], str] = str  # the name in ``defaults`` of a key
