"""Other programs' settings of the correction, translated into this package's fields.

``verl`` is verl's form of 2026, ``verl-2025-11`` its form of November and December 2025, ``verl-2025-10`` the flat one
before. A setting that the program would have ignored is dropped with a note. An unknown one is an error, or a warning
if the settings that matter are there. Settings of the correction below a key where the program has none are an error.
``docs/migrating.md`` has every setting. Each program has a module.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
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
# How similar a name beside the settings must be to one of them to be read as misspelt: 1 is equal. All names of verl,
# slime, NeMo-RL and TRL that are no misspelt ones are below, except for those that a dialect lists.
_MISSPELT = 0.85


@dataclass
class _SortedSettings:
    """The settings of a file, sorted by what they are for.

    Attributes:
        of_correction: the program's settings of the correction, and unknown names that stand among them.
        others: (dotted name, value) of the settings that are no part of the correction.
        has_section: True if the file has the section of the correction. Without a setting in it, the program's
            defaults apply.
        unlisted: names of a shared section that the program is not known to have.
    """

    of_correction: dict[str, Any] = field(default_factory=dict)
    others: list[tuple[str, Any]] = field(default_factory=list)
    has_section: bool = False
    unlisted: list[str] = field(default_factory=list)


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
        ValueError: an unknown dialect or setting, no setting of the program, or a value that the program would refuse
            or that cannot work here.
    """
    one_of("dialect", dialect, DIALECTS)
    program = BY_NAME[dialect]
    fields = as_sections(fields)
    file = _sorted_settings(fields, program)
    known = {name: value for name, value in file.of_correction.items() if name in program.defaults}
    unknown = {name: value for name, value in file.of_correction.items() if name not in program.defaults}
    others = [*file.others, *unknown.items()]

    _refuse_names_of_others(unknown, known, fields, program)
    notes_beside = _notes_beside(others, known, program)
    if not known and not file.has_section:
        raise ValueError(_nothing_to_read(fields, program))
    _refuse_unless_needed(unknown, known, program)
    for name in [*unknown, *file.unlisted]:
        warnings.warn(f"{name!r} is no known setting of {program.name} and is not read", stacklevel=3)

    settings = Settings(known, program.defaults)
    try:
        translated = program.read(settings)
    except ValueError as error:
        raise ValueError(f"{error}{_other_readers(fields)}") from error

    became = ", ".join(f"{name}={value!r}" for name, value in translated.items())
    notes = [f"read as {dialect}: {became}", *dict.fromkeys(settings.notes)]
    if others:
        notes.append(f"not read, no part of the correction: {', '.join(name for name, _ in others)}")
    return translated, [*notes, *notes_beside]


def _refuse_names_of_others(
    unknown: Mapping[str, Any], known: Mapping[str, Any], fields: Mapping[str, Any], program: Dialect
) -> None:
    """Raise ValueError for the first unknown name that another dialect has, or that is a misspelt one."""
    absent = [setting for setting in program.defaults if setting not in known]
    for name in unknown:
        remedy = other_dialects(name, fields, program.name)
        similar = difflib.get_close_matches(name, absent, n=1, cutoff=0.8)
        if not remedy and similar:
            remedy = f"did you mean {similar[0]}? Known are {', '.join(program.defaults)}"
        if remedy:
            raise ValueError(f"unknown setting {name!r} of {program.name}: {remedy}")


def _notes_beside(others: Iterable[tuple[str, Any]], known: Mapping[str, Any], program: Dialect) -> list[str]:
    """Return the notes about settings that are no part of the correction, but change the loss.

    Args:
        others: (dotted name, value) of the settings that are not read; a value may be a section.
        known: the settings of the correction that are read.
        program: the dialect.

    Raises:
        ValueError: one of ``others`` cannot work here, or holds a setting of the correction that is not among ``known``
            with the same value.
    """
    notes = []
    for section, key, value in _at_any_depth(others):
        name = program.spelled(key)
        path = f"{section}.{name}" if section else name
        is_setting = name in program.defaults and name not in program.common_names
        if section and is_setting and (name not in known or known[name] != value):
            raise ValueError(
                f"{section} holds {name}, a setting of {program.name}: give the settings below {section} alone"
            )
        if name in program.beside:
            note = program.beside[name](path, value)
            if note is not None:
                notes.append(note)
    return notes


def _at_any_depth(settings: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, str, Any]]:
    """Yield (dotted name of the section, name, value) of settings and of all settings inside of sections."""
    for path, value in settings:
        section, _, name = path.rpartition(".")
        yield section, name, value
        if isinstance(value, Mapping):
            yield from _at_any_depth((f"{path}.{inner}", inner_value) for inner, inner_value in value.items())


def _nothing_to_read(fields: Mapping[str, Any], program: Dialect) -> str:
    """Return the error for a file that has no setting of the program."""
    content = f"setting of {program.name}" if program.shares_section else ".".join(program.sections)
    return f"there is no {content} in these settings: known are {', '.join(program.defaults)}{_other_readers(fields)}"


def _other_readers(fields: Mapping[str, Any]) -> str:
    """Return the end of an error, which names the dialects that can read the settings; empty if none can."""
    others = probable_dialects(fields)
    return f"; these settings can be read with {_choice_of(others)}" if others else ""


def _refuse_unless_needed(unknown: Iterable[str], known: Mapping[str, Any], program: Dialect) -> None:
    """Raise ValueError for an unknown name, unless the settings that matter are there."""
    if program.needed and program.needed <= known.keys():
        return
    for name in unknown:
        raise ValueError(f"unknown setting {name!r} of {program.name}: known are {', '.join(program.defaults)}")


def probable_dialects(fields: Mapping[str, Any]) -> list[str]:
    """Return the dialects that read these settings without an error and have the most of them.

    Empty if no dialect has any.
    """
    num_settings: dict[str, int] = {}
    try:
        fields = as_sections(fields)
    except ValueError:
        return []
    for name, program in BY_NAME.items():
        try:
            settings = _sorted_settings(fields, program).of_correction
            if settings.keys() <= program.defaults.keys():
                program.read(Settings(settings, program.defaults))
                num_settings[name] = len(settings)
        except ValueError:
            continue

    largest = max(num_settings.values(), default=0)
    return [name for name, number in num_settings.items() if 0 < number == largest]


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


def _sorted_settings(fields: Mapping[str, Any], program: Dialect) -> _SortedSettings:
    """Return the program's settings, out of their sections and under the names of its defaults, and the other ones.

    Raises:
        ValueError: a section that holds no settings, or a setting with two values.
    """
    file = _SortedSettings()
    fields, moved = _out_of_other_sections(fields, program, file)

    for section in program.sections:
        if section not in fields:
            continue
        file.others += [(str(name), value) for name, value in fields.items() if name != section]
        inner = program.switched_off if fields[section] is None else fields[section]
        if not isinstance(inner, Mapping):
            raise ValueError(f"{section}={inner!r} must hold settings, one `name: value` a line")
        fields = inner
        if section == program.sections[-1]:
            file.has_section = True
            if program.shares_section:
                fields = _without_others(fields, program, file)
    if program.shares_section and not program.sections:
        fields = _without_others(fields, program, file)

    for key, value in [*fields.items(), *moved]:
        name = program.spelled(str(key))
        if name in file.of_correction and file.of_correction[name] != value:
            raise ValueError(f"{name} has two values, {file.of_correction[name]!r} and {value!r}: keep one of them")
        file.of_correction[name] = value
    return file


def _out_of_other_sections(
    fields: Mapping[str, Any], program: Dialect, file: _SortedSettings
) -> tuple[Mapping[str, Any], list[tuple[str, Any]]]:
    """Return (the fields without these sections, their settings of the correction); their other keys go to ``file``."""
    moved: list[tuple[str, Any]] = []
    for section, names in program.elsewhere.items():
        inner = fields.get(section)
        if not isinstance(inner, Mapping):
            continue
        settings = [(name, value) for name, value in inner.items() if name in names or _is_misspelt(str(name), names)]
        if not settings:
            continue
        moved += settings
        file.others += [(f"{section}.{name}", value) for name, value in inner.items() if (name, value) not in settings]
        fields = {name: value for name, value in fields.items() if name != section}
    return fields, moved


def _without_others(fields: Mapping[str, Any], program: Dialect, file: _SortedSettings) -> dict[str, Any]:
    """Return the settings of a section that belong to the correction; the others go to ``file``.

    An unknown name stays if it has the correction's prefix or is similar to a setting, so that a misspelt setting is an
    error; and so does the section of another dialect.
    """
    foreign = {section for dialect in BY_NAME.values() for section in dialect.sections} - set(program.sections)
    settings = {}
    for key, value in fields.items():
        name = program.spelled(str(key))
        is_listed = name in program.beside or name in program.known_beside
        has_prefix = name.startswith((*program.reserved_prefixes, *_OF_OTHERS))
        is_unknown = has_prefix or name in foreign or _is_misspelt(name, program.defaults)
        if name in program.defaults or (is_unknown and not is_listed):
            settings[str(key)] = value
            continue
        file.others.append((name, value))
        if program.known_beside and not is_listed:
            file.unlisted.append(name)
    return settings


def _is_misspelt(name: str, settings: Iterable[str]) -> bool:
    """Return whether a name is similar to one of the settings."""
    return bool(difflib.get_close_matches(name, settings, n=1, cutoff=_MISSPELT))
