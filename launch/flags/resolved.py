"""From the settings of a run back to its flags: each with its value, and whether the user gave it."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from typing import Any

from megatron_rc.launch.flags.idle import idle_names
from megatron_rc.launch.flags.own_objects import as_given
from megatron_rc.launch.flags.parser import build_parser
from megatron_rc.launch.resolved_file import ResolvedFlag
from megatron_rc.launch.run_config import RunConfig, passed_through
from megatron_rc.settings.fields import DEFAULTS
from megatron_rc.settings.flags import LOSS_FLAGS, is_correction_flag

# They say where flags are read, or what is done with them.
_NO_SETTINGS = ("help", "config")
# Without this one a run from the file would have the file's name.
_ALWAYS = "run_name"


def resolved_flags(args: argparse.Namespace, config: RunConfig) -> Iterator[ResolvedFlag]:
    """All flags in the order of ``--help``, without those that do nothing beside the others.

    Of what goes unchanged to Megatron only what was given: the rest are its own defaults.

    Args:
        args: as ``resolve`` left them.
        config: the settings that followed.
    """
    absent = set(passed_through()) - set(config.megatron.given)
    given, idle = {*args.typed, *args.in_launch_file, _ALWAYS}, idle_names(args, config.loss) | absent
    values = {name: getattr(config.loss, field) for field, name in LOSS_FLAGS.items()}
    values |= {name: value for name, value in vars(args).items() if value is not None or name not in values}
    for title, dest, name in _settings():
        if dest not in idle:
            value = as_given(dest, values[dest], args.own_objects)
            yield ResolvedFlag(title, name, value, dest in given)
    fields = config.correction.to_dict()
    own = {name: as_given(name, value, args.own_objects) for name, value in fields.items()}
    yield from _correction(own, any(map(is_correction_flag, given)))


@functools.cache
def _settings() -> tuple[tuple[str, str, str], ...]:
    """Title, attribute and name of every flag that is a setting, but for the correction's; whatever run it is."""
    return tuple(
        (group.title or "", action.dest, action.option_strings[0].removeprefix("--"))
        for group in build_parser()._action_groups
        for action in group._group_actions
        if not (action.dest in _NO_SETTINGS or is_correction_flag(action.dest))
    )


def _correction(fields: dict[str, Any], is_chosen: bool) -> Iterator[ResolvedFlag]:
    """The correction by its fields, whatever preset or file they came from; ``is_chosen``: anything of it was given."""
    for name, value in fields.items():
        # Nothing given is weights of sequences, so a correction without weights is to say so.
        is_given = is_chosen and (value != DEFAULTS[name] or name == "rollout_is")
        yield ResolvedFlag("rollout correction", name.replace("_", "-"), value, is_given)
