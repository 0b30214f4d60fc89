"""Checked settings of a run from its command line."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence

from megatron_rc.launch.errors import require
from megatron_rc.launch.flags.checks import check
from megatron_rc.launch.flags.checks.files import check_folders, check_machine
from megatron_rc.launch.flags.checks.weights import choose_bridge
from megatron_rc.launch.flags.command import Command, read_command
from megatron_rc.launch.flags.follow import (
    check_given,
    correction_and_loss,
    given_to_megatron,
    with_steps,
    with_what_follows,
)
from megatron_rc.launch.flags.launch_file import processes_of_file
from megatron_rc.launch.flags.own_objects import as_given
from megatron_rc.launch.flags.parser import parser_for
from megatron_rc.launch.flags.sources import check_sources
from megatron_rc.launch.flags.task_of_run import make_task_of_run, with_prompts
from megatron_rc.launch.flags.teachers import teacher_models
from megatron_rc.launch.flags.unused import LATER_RULES, make_sections, without_unused
from megatron_rc.launch.resolved_file import ResolvedFlag
from megatron_rc.launch.run_config import RunConfig, flag_options, passed_through
from megatron_rc.launch.tasks import Task
from megatron_rc.settings.fields import DEFAULTS
from megatron_rc.settings.flags import LOSS_FLAGS, is_correction_flag

_log = logging.getLogger("megatron_rc")
_NEEDED_PACKAGES = ("megatron.core", "transformers", "tokenizers", "tensorboard", "matplotlib", "tqdm")


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
    command = read_command(argv)
    for package in _NEEDED_PACKAGES:
        require(package, "training", "launch")
    samples = engine and not command.values.load_rollouts
    config, task = _make(command, world_size, samples=samples, elsewhere=elsewhere)
    config = choose_bridge(config, samples)
    check(config, task, samples)
    if folders:
        check_folders(config)
        check_machine(config)
    if config.unused:
        _log.warning("these flags do nothing in this run: %s", ", ".join(config.unused))
    return dataclasses.replace(config, flags=tuple(_resolved_flags(command, config))), task


def processes_meant(argv: Sequence[str]) -> int | None:
    """Return the number of processes in the launch file that these words name; None without a file or a number."""
    namespace, _ = parser_for([]).parse_known_args(argv)
    return processes_of_file(namespace.config) if "config" in namespace else None


def _make(command: Command, world_size: int, *, samples: bool, elsewhere: bool) -> tuple[RunConfig, Task]:
    """Make the settings and the task; settings that span sections are not checked yet."""
    values, unused = without_unused(with_prompts(command.values), command.given)
    check_given(values)
    check_sources(values)
    values = with_steps(values)
    values = with_what_follows(values, world_size, samples=samples, elsewhere=elsewhere)
    correction, loss = correction_and_loss(command, values)
    values = values.also({"correction": correction, "loss": loss})
    values, later_unused = without_unused(values, command.given, LATER_RULES)
    if values.correct_values is None:
        values = values.also({"correct_values": "none" if correction.corrects_in_loss else "mask"})
    task, values = make_task_of_run(command, values)
    values = values.also({"given": given_to_megatron(command)})
    config = RunConfig(**make_sections(values), correction=correction, loss=loss, unused=unused + later_unused)
    if config.distillation is not None:
        teachers = tuple(teacher_models(config, config.distillation, values))
        config = dataclasses.replace(config, teachers=teachers)
    return config, task


def _resolved_flags(command: Command, config: RunConfig) -> Iterator[ResolvedFlag]:
    """Yield flags in the order of ``--help-all``, without Megatron's fields that were not given."""
    # A run from the written file would otherwise have the file's name.
    given_names = {*command.given, "run_name"}
    of_loss = {flag: getattr(config.loss, field) for field, flag in LOSS_FLAGS.items()}
    declared = {option.flag: config.value_of(name) for name, (_, option) in flag_options().items()}
    values = {**declared, **of_loss}
    for group in parser_for([])._action_groups:
        for action in group._group_actions:
            name = action.dest
            if name in values:
                value = as_given(name, values[name], command.specs)
                key = action.option_strings[0].removeprefix("--")
                # Without a value the flag belongs to a section that this run does not have, or was replaced.
                yield ResolvedFlag(group.title or "", key, value, name in given_names and value is not None)
    for name, value in config.megatron.given.items():
        field = passed_through()[name]
        yield ResolvedFlag(field.title, field.on[0], value, is_given=True)
    yield from _flags_of_correction(command, config)


def _flags_of_correction(command: Command, config: RunConfig) -> Iterator[ResolvedFlag]:
    """Yield the correction by its fields, whichever preset or file they came from."""
    # Without any flag it is weights of sequences, so a chosen correction without weights has to say so.
    is_chosen = any(map(is_correction_flag, command.given))
    for name, value in config.correction.to_dict().items():
        is_given = is_chosen and (value != DEFAULTS[name] or name == "rollout_is")
        shown = as_given(name, value, command.specs)
        yield ResolvedFlag("rollout correction", name.replace("_", "-"), shown, is_given)
