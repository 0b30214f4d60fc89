"""Every flag of a run as it was resolved, and the launch file that stands for them all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any


@dataclass(frozen=True)
class ResolvedFlag:
    """One flag of a run."""

    section: str  # title of its section in ``--help``
    name: str  # name without leading dashes
    value: Any  # the run's value; None: there is none
    is_given: bool  # the user gave it, by flag or launch file; otherwise a default, or follows from other flags


def as_launch_file(flags: Iterable[ResolvedFlag]) -> str:
    """Return a launch file of the same run: given flags as settings, all other flags as comments.

    Other flags are comments because many flags are refused in runs in which they do nothing.
    """
    parts = []
    shown = (flag for flag in flags if flag.is_given or flag.value is not None)
    for section, members in groupby(shown, key=lambda flag: flag.section):
        lines = [f"{'' if flag.is_given else '# '}{_line(flag)}" for flag in members]
        parts.append("\n".join([f"# -- {section}", *lines]))
    return "\n\n".join(parts) + "\n"


def as_mapping(flags: Iterable[ResolvedFlag]) -> dict[str, Any]:
    """Return all values by their flags' names, with underscores."""
    return {flag.name.replace("-", "_"): flag.value for flag in flags}


def _line(flag: ResolvedFlag) -> str:
    import yaml

    if flag.value is None:
        return f"{flag.name}: none"
    # YAML's own words for numbers would not all be read as Python's.
    if isinstance(flag.value, float):
        return f"{flag.name}: {flag.value!r}"
    value = list(flag.value) if isinstance(flag.value, tuple) else flag.value
    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**9)
    return f"{flag.name}: {text.partition(chr(10))[0]}"
