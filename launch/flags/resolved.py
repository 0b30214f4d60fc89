"""Flags from the settings of a run: each with its value, and whether the user gave it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from megatron_rc.launch.flags.own_objects import as_given
from megatron_rc.launch.flags.parser import build_parser
from megatron_rc.launch.resolved_file import ResolvedFlag
from megatron_rc.launch.run_config import RunConfig, passed_through
from megatron_rc.settings.fields import DEFAULTS
from megatron_rc.settings.flags import LOSS_FLAGS, is_correction_flag

_NO_SETTINGS = {"help", "config"}
# Without it a run from the written file would have the file's name.
_ALWAYS = "run_name"


def resolved_flags(args: argparse.Namespace, config: RunConfig) -> Iterator[ResolvedFlag]:
    """Yield flags in the order of ``--help``, without idle ones and Megatron's fields that were not given."""
    left_out = (set(passed_through()) - set(config.megatron.given)) | args.idle | _NO_SETTINGS
    given = {*args.typed, *args.in_launch_file, _ALWAYS}
    values = {name: getattr(config.loss, field) for field, name in LOSS_FLAGS.items()}
    values |= {name: value for name, value in vars(args).items() if value is not None or name not in values}
    for group in build_parser()._action_groups:
        for action in group._group_actions:
            dest, name = action.dest, action.option_strings[0].removeprefix("--")
            if dest not in left_out and not is_correction_flag(dest):
                shown = as_given(dest, values[dest], args.own_objects)
                yield ResolvedFlag(group.title or "", name, shown, dest in given)
    # The correction by its fields, whichever preset or file they came from. Without any flag it is weights of
    # sequences, so a chosen correction without weights has to say so.
    is_chosen = any(map(is_correction_flag, given))
    for name, value in config.correction.to_dict().items():
        is_given = is_chosen and (value != DEFAULTS[name] or name == "rollout_is")
        shown = as_given(name, value, args.own_objects)
        yield ResolvedFlag("rollout correction", name.replace("_", "-"), shown, is_given)
