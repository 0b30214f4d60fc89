"""Other programs' settings of the correction, translated into this package's fields.

``verl`` is verl's form of 2026, ``verl-2025-11`` its form of November and December 2025, ``verl-2025-10`` the flat one
before. A setting that the program would have ignored is dropped with a note. An unknown one is an error, or a warning
if the settings that matter are there. ``docs/migrating.md`` has every setting. Each program has a module.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping
from typing import Any

from megatron_rc.parallel.arguments import one_of
from megatron_rc.settings.dialects.forms import as_sections
from megatron_rc.settings.dialects.nemo_rl import NEMO_RL
from megatron_rc.settings.dialects.reader import Dialect, Settings
from megatron_rc.settings.dialects.slime import SLIME
from megatron_rc.settings.dialects.trl import TRL
from megatron_rc.settings.dialects.verl import VERL, VERL_2025_10, VERL_2025_11
from megatron_rc.settings.fields import FIELDS

BY_NAME = {dialect.name: dialect for dialect in (VERL, VERL_2025_11, VERL_2025_10, SLIME, NEMO_RL, TRL)}
DIALECTS = tuple(BY_NAME)
# Beginnings of names of verl and this package, which no program with a shared section has.
_OF_OTHERS = ("rollout_is", "rollout_rs")


def translate(fields: Any, dialect: str) -> tuple[dict[str, Any], list[str]]:
    """Return this package's fields, and notes, from another program's settings.

    Args:
        fields: the settings, alone or inside the sections of the program's files, in any form of
            :func:`megatron_rc.settings.dialects.forms.as_sections`.
        dialect: a name of ``DIALECTS``.

    Returns:
        (fields by name, notes). The first note is the whole translation; the others are about settings that changed
        their meaning or were dropped, a line each.

    Raises:
        ValueError: an unknown dialect or setting, or a value that the program would refuse or that cannot work here.
    """
    one_of("dialect", dialect, DIALECTS)
    program = BY_NAME[dialect]
    fields = as_sections(fields)
    own_settings, other_keys = _own_settings(fields, program)
    unknown = [name for name in own_settings if name not in program.defaults]
    for name in unknown:
        remedy = _remedy(name, fields, own_settings, program)
        if remedy is not None:
            raise ValueError(f"unknown setting {name!r} of {dialect}: {remedy}")
        warnings.warn(f"{name!r} is no known setting of {dialect} and is not read", stacklevel=3)
        del own_settings[name]
        other_keys.append(name)

    settings = Settings(own_settings, program.defaults)
    try:
        translated = program.read(settings)
    except ValueError as error:
        others = probable_dialects(fields)
        if not others:
            raise
        raise ValueError(f"{error}; these settings can be read with {_choice_of(others)}") from error

    became = ", ".join(f"{name}={value!r}" for name, value in translated.items())
    notes = [f"read as {dialect}: {became}", *dict.fromkeys(settings.notes)]
    if other_keys:
        notes.append(f"not read, no part of the correction: {', '.join(other_keys)}")
    notes += [note for name, note in program.beside.items() if name in other_keys]
    return translated, notes


def _remedy(name: str, fields: Mapping[str, Any], own_settings: Mapping[str, Any], program: Dialect) -> str | None:
    """Return what to do about an unknown setting; None if it can be left out.

    It can, if the settings that matter are there, no other dialect has the name, and it is no misspelt one.
    """
    others = other_dialects(name, fields, program.name)
    if others:
        return others
    absent = [setting for setting in program.defaults if setting not in own_settings]
    similar = difflib.get_close_matches(name, absent, n=1, cutoff=0.8)
    if similar:
        return f"did you mean {similar[0]}? Known are {', '.join(program.defaults)}"
    if not program.needed or not program.needed <= own_settings.keys():
        return f"known are {', '.join(program.defaults)}"
    return None


def probable_dialects(fields: Mapping[str, Any]) -> list[str]:
    """Return the dialects that can read all these settings and know most of their names; empty if none knows one."""
    known_names: dict[str, int] = {}
    try:
        fields = as_sections(fields)
    except ValueError:
        return []
    for name, program in BY_NAME.items():
        try:
            own_settings, _ = _own_settings(fields, program)
            if own_settings.keys() <= program.defaults.keys():
                program.read(Settings(own_settings, program.defaults))
                known_names[name] = len(own_settings)
        except ValueError:
            continue

    most = max(known_names.values(), default=0)
    return [name for name, count in known_names.items() if 0 < count == most]


def other_dialects(name: object, fields: Mapping[str, Any], dialect: str) -> str:
    """Return the remedy for a name that a dialect does not have: other dialects that have it; empty if none has it.

    Dialects that can read all the settings are preferred.

    Args:
        name: the unknown name.
        fields: all settings, as the user gave them.
        dialect: the dialect that they were read with.
    """
    owners = ["megatron_rc"] if name in FIELDS else []
    for program in BY_NAME.values():
        is_section = name in program.sections or name in program.elsewhere
        if is_section or program.spelled(str(name)) in program.defaults:
            owners.append(program.name)
    # A section of the dialect itself may stand in the wrong place.
    if not owners or dialect in owners:
        return ""

    probable = [owner for owner in owners if owner in probable_dialects(fields)] or owners
    return f"it is a name of {' and '.join(probable)}: read these settings with {_choice_of(probable)}"


def _choice_of(dialects: list[str]) -> str:
    return " or ".join(f"dialect={name!r}" for name in dialects)


def _own_settings(fields: Mapping[str, Any], program: Dialect) -> tuple[dict[str, Any], list[str]]:
    """Return the program's settings, out of their sections and under the names of its defaults, and the other keys.

    Raises:
        ValueError: a section that holds no settings, or a setting with two values.
    """
    fields, moved, other_keys = _out_of_other_sections(fields, program)

    for section in program.sections:
        if section not in fields:
            continue
        other_keys += [str(name) for name in fields if name != section]
        inner = program.switched_off if fields[section] is None else fields[section]
        if not isinstance(inner, Mapping):
            raise ValueError(f"{section}={inner!r} must hold settings, one `name: value` a line")
        fields = inner
        if program.shares_section and section == program.sections[-1]:
            fields = _without_others(fields, program, other_keys)
    if program.shares_section and not program.sections:
        fields = _without_others(fields, program, other_keys)

    settings: dict[str, Any] = {}
    for key, value in [*fields.items(), *moved]:
        name = program.spelled(str(key))
        if name in settings and settings[name] != value:
            raise ValueError(f"{name} has two values, {settings[name]!r} and {value!r}: keep one of them")
        settings[name] = value
    return settings, other_keys


def _out_of_other_sections(
    fields: Mapping[str, Any], program: Dialect
) -> tuple[Mapping[str, Any], list[tuple[str, Any]], list[str]]:
    """Return (the fields without these sections, their settings of the correction, their other keys)."""
    moved: list[tuple[str, Any]] = []
    other_keys: list[str] = []
    for section, names in program.elsewhere.items():
        inner = fields.get(section)
        if not isinstance(inner, Mapping) or not set(names) & set(inner):
            continue
        moved += [(name, inner[name]) for name in names if name in inner]
        other_keys += [f"{section}.{name}" for name in inner if name not in names]
        fields = {name: value for name, value in fields.items() if name != section}
    return fields, moved, other_keys


def _without_others(fields: Mapping[str, Any], program: Dialect, other_keys: list[str]) -> dict[str, Any]:
    """Return the settings of a section that belong to the correction; the others are added to ``other_keys``.

    An unknown name with the correction's prefix stays, so that a misspelt setting is an error; and so does the section
    of another dialect.
    """
    foreign = {section for dialect in BY_NAME.values() for section in dialect.sections} - set(program.sections)
    settings = {}
    for key, value in fields.items():
        name = program.spelled(str(key))
        if name in program.defaults or name.startswith((*program.reserved_prefixes, *_OF_OTHERS)) or name in foreign:
            settings[str(key)] = value
            continue
        other_keys.append(name)
        if program.known_beside and name not in program.known_beside:
            warnings.warn(f"{name!r} is no known setting of {program.name} and is not read", stacklevel=5)
    return settings
