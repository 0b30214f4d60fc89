"""Checked settings of a run from its command line."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from megatron_rc.launch.errors import ConfigurationError, require
from megatron_rc.launch.flags.checks import check
from megatron_rc.launch.flags.checks.files import check_folders
from megatron_rc.launch.flags.checks.machine import check_machine
from megatron_rc.launch.flags.checks.weights import choose_bridge
from megatron_rc.launch.flags.hints import unknown
from megatron_rc.launch.flags.launch_file import (
    check_architecture_words,
    processes_of_file,
    words_of_architecture,
    words_of_file,
)
from megatron_rc.launch.flags.own_objects import define_own_objects
from megatron_rc.launch.flags.parser import Parser, build_parser, long_options
from megatron_rc.launch.flags.resolve import resolve
from megatron_rc.launch.flags.resolved import resolved_flags
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.tasks import Task


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
    config, task = resolve(args, world_size, engine=engine)
    config = choose_bridge(config, samples=engine and not config.rollouts.load_rollouts)
    check(config, task, engine=engine)
    if folders:
        check_folders(config)
        check_machine(config)
    return dataclasses.replace(config, flags=tuple(resolved_flags(args, config))), task


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Read flags and the launch file that they name into one namespace of typed values."""
    parser = build_parser()
    _check_repeated(argv, parser)
    known, _ = _sources().parse_known_args(argv)
    base = words_of_file(parser, known.config) if known.config else []
    try:
        launch_file = parser.parse_args(base)
    except ConfigurationError as error:
        raise ConfigurationError(f"--config {known.config}: {error}") from error
    known, _ = _sources().parse_known_args([*base, *argv])
    architecture = words_of_architecture(parser, known.load_hf) if known.load_hf else []
    args, rest = parser.parse_known_args([*architecture, *base, *argv])
    if rest:
        names = [word.split("=")[0] for word in rest if word.startswith("--")] or rest[:1]
        raise ConfigurationError("; ".join(unknown("flag", name, parser) for name in dict.fromkeys(names)))
    # The correction's flags override the launch file by rules of their own.
    args.launch_file, args.command_line = launch_file, parser.parse_args(argv)
    args.typed, args.in_launch_file = _names(argv, parser), _names(base, parser)
    args.own_objects, args.idle = {}, set()
    for namespace in (args, args.launch_file, args.command_line):
        args.own_objects.update(define_own_objects(namespace))
    check_architecture_words(parser, args, architecture)
    return args


def processes_meant(argv: Sequence[str]) -> int | None:
    """Number of processes in the launch file that these words name; None without a file or a number."""
    known, _ = _sources().parse_known_args(argv)
    return processes_of_file(known.config) if known.config else None


def _check_repeated(argv: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Raise ConfigurationError if a flag of several values is typed twice, because the first values would be lost."""
    options = long_options(parser)
    typed = [word.partition("=")[0][2:] for word in argv if word.startswith("--")]
    for name in typed:
        if name in options and options[name].nargs == "+" and typed.count(name) > 1:
            raise ConfigurationError(f"--{name} is given twice: give all its values after one")


def _names(words: Sequence[str], parser: argparse.ArgumentParser) -> set[str]:
    """Names of the flags among these words, with underscores; ``--no-x`` has the name of ``--x``."""
    flags, known = (word.partition("=")[0][2:] for word in words if word.startswith("--")), long_options(parser)
    return {known[name].dest for name in flags if name in known}


def _sources() -> argparse.ArgumentParser:
    """Parser of the two flags that name files with further flags."""
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default=None)
    parser.add_argument("--load-hf", default=None)
    return parser
