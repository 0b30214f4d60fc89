"""Other programs' settings of the correction, translated into this package's fields.

``verl`` is verl's form of 2026, ``verl-2025-11`` its form of November and December 2025, ``verl-2025-10`` the flat one
before. A setting that the program would have ignored is dropped with a note; an unknown one is an error.
``docs/migrating.md`` has every setting. Each program has a module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megatron_rc.parallel.arguments import one_of
from megatron_rc.settings.dialects.nemo_rl import NEMO_RL
from megatron_rc.settings.dialects.reader import Dialect, Settings
from megatron_rc.settings.dialects.slime import SLIME
from megatron_rc.settings.dialects.verl import VERL, VERL_2025_10, VERL_2025_11
from megatron_rc.settings.fields import FIELDS

BY_NAME = {dialect.name: dialect for dialect in (VERL, VERL_2025_11, VERL_2025_10, SLIME, NEMO_RL)}
DIALECTS = tuple(BY_NAME)


def translate(fields: Mapping[str, Any], dialect: str) -> tuple[dict[str, Any], list[str]]:
    """(this package's fields, notes) from another program's settings, alone or inside the sections of its files.

    The notes are lines: first the translation, then settings that changed or were dropped. ValueError for an unknown
    dialect or setting, or a value that the program would refuse or that cannot work here.
    """
    one_of("dialect", dialect, DIALECTS)
    program = BY_NAME[dialect]
    given, unread = _given(fields, program)
    for name in given:
        if name not in program.defaults:
            raise ValueError(f"unknown setting {name!r}{known_elsewhere(name, dialect, program.defaults, fields)}")
    settings = Settings(given, program.defaults)
    try:
        own = program.read(settings)
    except ValueError as error:
        others = " or ".join(f"dialect={name!r}" for name in probable_dialects(fields))
        raise ValueError(f"{error}{'; these settings can be read with ' * bool(others)}{others}") from error
    became = ", ".join(f"{name}={value!r}" for name, value in own.items())
    notes = [f"read as {dialect}: {became}", *dict.fromkeys(settings.notes)]
    if unread:
        notes.append(f"not read, no part of the correction: {', '.join(map(str, unread))}")
    return own, notes


def probable_dialects(fields: Mapping[str, Any]) -> list[str]:
    """The dialects that can read all these settings and know most of their names; empty if no name is known."""
    known: dict[str, int] = {}
    for name, program in BY_NAME.items():
        try:
            given, _ = _given(fields, program)
            if given.keys() <= program.defaults.keys():
                program.read(Settings(given, program.defaults))
                known[name] = len(given)
        except ValueError:
            continue
    most = max(known.values(), default=0)
    return [name for name, number in known.items() if 0 < number == most]


def known_elsewhere(name: object, dialect: str, known: Iterable[str], fields: Mapping[str, Any]) -> str:
    """The end of an error about an unknown name: the dialects that have it, or else the known names.

    If several dialects have the name, those that can read the other settings are preferred.
    """
    owners = ["megatron_rc"] if name in FIELDS else []
    for program in BY_NAME.values():
        if name in program.sections or name in program.elsewhere or program.spelled(str(name)) in program.defaults:
            owners.append(program.name)
    if not owners or dialect in owners:
        return f": known are {', '.join(known)}"
    owners = [owner for owner in owners if owner in probable_dialects(fields)] or owners
    return f", a name of {' and '.join(owners)}: read these settings with dialect={' or '.join(map(repr, owners))}"


def _given(fields: Mapping[str, Any], program: Dialect) -> tuple[dict[str, Any], list[Any]]:
    """The settings inside their sections, with the names of the program's defaults, and keys outside.

    ValueError for a setting with two values.
    """
    elsewhere: list[dict[str, Any]] = []
    unread: list[Any] = []
    for section, names in program.elsewhere.items():
        inner = fields.get(section)
        if isinstance(inner, Mapping) and set(names) & set(inner):
            elsewhere.append({name: inner[name] for name in names if name in inner})
            unread += [f"{section}.{name}" for name in inner if name not in names]
            fields = {name: value for name, value in fields.items() if name != section}
    for section in program.sections:
        if section in fields:
            unread += [name for name in fields if name != section]
            # null switches the section off
            fields = program.switched_off if fields[section] is None else fields[section]
            if not isinstance(fields, Mapping):
                raise ValueError(f"{section}={fields!r} must hold settings, one `name: value` a line")
            if program.shares_section and section == program.sections[-1]:
                unread += [name for name in fields if name not in program.defaults]
                fields = {name: value for name, value in fields.items() if name in program.defaults}
    given: dict[str, Any] = {}
    for key, value in (pair for settings in (fields, *elsewhere) for pair in settings.items()):
        name = program.spelled(str(key))
        if given.setdefault(name, value) != value:
            raise ValueError(f"{name} has two values, {given[name]!r} and {value!r}: keep one of them")
    return given, unread
