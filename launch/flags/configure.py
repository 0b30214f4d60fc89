"""Checked settings of a run from its command line."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Iterator, Sequence

from megatron_rc.launch.errors import ConfigurationError, require
from megatron_rc.launch.flags.checks import check
from megatron_rc.launch.flags.checks.files import check_folders, check_machine
from megatron_rc.launch.flags.checks.weights import choose_bridge
from megatron_rc.launch.flags.hints import unknown
from megatron_rc.launch.flags.launch_file import (
    check_architecture_words,
    processes_of_file,
    words_of_architecture,
    words_of_file,
)
from megatron_rc.launch.flags.own_objects import as_given, define_own_objects
from megatron_rc.launch.flags.parser import build_parser, long_options
from megatron_rc.launch.flags.resolve import resolve
from megatron_rc.launch.flags.sources import TOY
from megatron_rc.launch.resolved_file import ResolvedFlag
from megatron_rc.launch.run_config import RunConfig, passed_through
from megatron_rc.launch.tasks import Task
from megatron_rc.settings.fields import DEFAULTS
from megatron_rc.settings.flags import LOSS_FLAGS, is_correction_flag

_NO_SETTINGS = {"help", "config"}
# Without it a run from the written file would have the file's name.
_ALWAYS = "run_name"


def configure(
    argv: Sequence[str], world_size: int, *, engine: bool = True, folders: bool = True, elsewhere: bool = False
) -> tuple[RunConfig, Task]:
    """Make and check the settings that these words describe, and the task.

    Args:
        argv: flags; they override ``--config FILE``, which overrides the model of ``--load-hf DIR``.
        world_size: number of processes.
        engine: an engine of this run samples, unless rollouts are read; False: rollouts come from elsewhere.
        folders: check that folders can be written to, and the limits of this machine.
        elsewhere: the run is for other machines, which have GPUs unless ``--cpu`` is given.

    Raises:
        ConfigurationError: one sentence with the flag or key, its value and the remedy.
    """
    args = parse_args(argv)
    for module in ("megatron.core", "transformers", "tokenizers", "tensorboard", "matplotlib", "tqdm"):
        require(module, "training", "launch")
    args.elsewhere = elsewhere
    args.toy = _parser().parse_args(words_of_file(_parser(), TOY))
    config, task = resolve(args, world_size, engine=engine)
    config = choose_bridge(config, samples=engine and not config.rollouts.load_rollouts)
    check(config, task, engine=engine)
    if folders:
        check_folders(config)
        check_machine(config)
    return dataclasses.replace(config, flags=tuple(_resolved_flags(args, config))), task


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Read flags and the launch file that they name into one namespace of typed values."""
    parser = _parser()
    options, typed = long_options(parser), [word.partition("=")[0][2:] for word in argv if word.startswith("--")]
    for name in typed:
        # The first values would be lost.
        if name in options and options[name].nargs == "+" and typed.count(name) > 1:
            raise ConfigurationError(f"--{name} is given twice: give all its values after one")
    command_line, rest = parser.parse_known_args(argv)
    if rest:
        names = [word.split("=")[0] for word in rest if word.startswith("--")] or rest[:1]
        raise ConfigurationError("; ".join(unknown("flag", name, parser) for name in dict.fromkeys(names)))
    base = words_of_file(parser, command_line.config) if command_line.config else []
    try:
        launch_file = parser.parse_args(base)
    except ConfigurationError as error:
        raise ConfigurationError(f"--config {command_line.config}: {error}") from error
    model = command_line.load_hf or launch_file.load_hf
    architecture = words_of_architecture(parser, model) if model else []
    args = parser.parse_args([*architecture, *base, *argv])
    # The correction's flags override the launch file by rules of their own.
    args.launch_file, args.command_line = launch_file, command_line
    args.typed, args.in_launch_file = _names(argv, parser), _names(base, parser)
    args.own_objects, args.idle = {}, set()
    for namespace in (args, args.launch_file, args.command_line):
        args.own_objects.update(define_own_objects(namespace))
    check_architecture_words(parser, args, architecture)
    return args


def processes_meant(argv: Sequence[str]) -> int | None:
    """Number of processes in the launch file that these words name; None without a file or a number."""
    known, _ = _parser().parse_known_args(argv)
    return processes_of_file(known.config) if known.config else None


def _resolved_flags(args: argparse.Namespace, config: RunConfig) -> Iterator[ResolvedFlag]:
    """Yield flags in the order of ``--help``, without idle ones and Megatron's fields that were not given."""
    left_out = (set(passed_through()) - set(config.megatron.given)) | args.idle | _NO_SETTINGS
    given = {*args.typed, *args.in_launch_file, _ALWAYS}
    values = {name: getattr(config.loss, field) for field, name in LOSS_FLAGS.items()}
    values |= {name: value for name, value in vars(args).items() if value is not None or name not in values}
    for group in _parser()._action_groups:
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


@functools.cache
def _parser() -> argparse.ArgumentParser:
    """Return this process's parser of flags; its help may be older than the objectives that a program has defined."""
    return build_parser()


def _names(words: Sequence[str], parser: argparse.ArgumentParser) -> set[str]:
    """Names of the flags among these words, with underscores; ``--no-x`` has the name of ``--x``."""
    flags, known = (word.partition("=")[0][2:] for word in words if word.startswith("--")), long_options(parser)
    return {known[name].dest for name in flags if name in known}
