"""``python -m megatron_rc.launch --nproc-per-node N <flags>``: check the flags once, then let torchrun start the ranks.

Exit codes: 0 if all steps are made, or a checkpoint holds the steps made before a signal; 2 for flags that cannot
work; 1 for a failed run; 130, 143 or 129 if Ctrl-C, SIGTERM or a closed terminal ended a run that saved nothing. The
last line of the output says the reason of every code except 0.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import math
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

# Until torchrun listens for it, Ctrl-C ends this process without a traceback, while modules load too.
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Modules make many objects and little garbage: looking for it takes a tenth of the launcher's start.
    gc.disable()

from megatron_rc.launch.errors import ConfigurationError, missing_packages_noted
from megatron_rc.launch.flags.configure import configure, processes_meant
from megatron_rc.launch.flags.help import short_help, whole_help
from megatron_rc.launch.flags.torchrun import Machines, machines_of, torchrun_parser, words_for_torchrun
from megatron_rc.launch.ranks import run_ranks
from megatron_rc.launch.run_config.training import CheckpointSection
from megatron_rc.launch.standard_error import VisibleFormatter, outlast_reader, say_error, visible
from megatron_rc.launch.train_ppo import ignore_megatron_warnings
from megatron_rc.launch.training.reporting.config_yaml import settings_text

_log = logging.getLogger("megatron_rc")
USAGE_ERROR = 2
TRAINER = "megatron_rc.launch.train_ppo"


def main(argv: Sequence[str] | None = None, module: str = TRAINER) -> None:
    """Run the module on every rank; exit with a code that the module's docstring lists."""
    # Rank 0 writes the same warnings, if ranks start.
    _log.setLevel(logging.ERROR)
    gc.enable()
    command_line = sys.argv[1:] if argv is None else argv
    if not command_line:
        sys.stderr.write(short_help())
        sys.exit(USAGE_ERROR)
    try:
        outcome = run_ranks(torchrun_arguments(command_line, module))
    except ConfigurationError as error:
        if "--json" in command_line:
            sys.stdout.write(json.dumps({"error": str(error)}) + "\n")
        say_error(str(error))
        sys.exit(USAGE_ERROR)
    if outcome.words:
        sys.stderr.write(f"{visible(outcome.words)}\n")
    sys.exit(outcome.code)


def torchrun_arguments(words: Sequence[str], module: str = TRAINER) -> list[str]:
    """Check these words, and return torchrun's arguments.

    Raises:
        ConfigurationError: as in ``configure``.
    """
    # ``launcher_args``: the flags of torchrun and of this launcher; ``flags``: the words that the ranks will read.
    launcher_args, flags = torchrun_parser().parse_known_args(words)
    if launcher_args.help or launcher_args.help_all:
        sys.stdout.write(whole_help() if launcher_args.help_all else short_help())
        sys.exit(0)
    machines = machines_of(launcher_args)
    if launcher_args.dry_run:
        typed = {word.partition("=")[0][2:].replace("_", "-") for word in words if word.startswith("--")}
        meant = None if {"nproc-per-node", "nnodes"} & typed else processes_meant(flags)
        # Eight GPUs on each machine, if only the launch file gives the number of processes.
        num_machines = math.ceil(meant / 8) if meant else machines.most
        _dry_run(launcher_args, flags, meant or machines.world_sizes()[-1], num_machines)
        sys.exit(0)
    # Check the fewest and the most machines; the ranks check the real number.
    *other_sizes, size = machines.world_sizes()
    for other_size in other_sizes:
        configure(flags, other_size, folders=not launcher_args.print_config)
    with _warnings_shown() if launcher_args.print_config else contextlib.nullcontext():
        config, _ = configure(flags, size, folders=not launcher_args.print_config)
    _check_restarts(launcher_args, machines, config.checkpoints)
    if launcher_args.print_config:
        sys.stdout.write(settings_text(config, Path("FILE")))
        sys.exit(0)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // machines.processes)))
    return [*words_for_torchrun(launcher_args, machines), "--module", module, *flags]


def _dry_run(launcher_args: argparse.Namespace, flags: Sequence[str], world_size: int, num_machines: int) -> None:
    """Check the flags as for another machine, and print what the run needs: batches, memory, places of the ranks.

    Raises:
        ConfigurationError: wrong flags, or a rank needs more memory than ``--device-memory-gib``.
    """
    ignore_megatron_warnings()
    # ``missing`` is filled while ``configure`` runs. Another machine will run it: its folders and GPUs are not here.
    with _warnings_shown(), missing_packages_noted() as missing:
        config, task = configure(flags, world_size, folders=False, elsewhere=True)
    # Wrong flags are refused before Megatron-Core is imported.
    from megatron_rc.launch.dry_run.findings import examine

    findings = examine(config, task, missing, num_machines, launcher_args.device_memory_gib)
    text = json.dumps(findings.as_mapping(), indent=2) if launcher_args.json else "\n".join(findings.in_words())
    sys.stdout.write(f"{text}\n")


@contextlib.contextmanager
def _warnings_shown() -> Iterator[None]:
    """Write the warnings about flags to standard error inside the block, for a command that starts no ranks."""
    handler = logging.StreamHandler()
    handler.setFormatter(VisibleFormatter("%(message)s"))
    _log.addHandler(handler)
    _log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        _log.setLevel(logging.ERROR)
        _log.removeHandler(handler)


def _check_restarts(launcher_args: argparse.Namespace, machines: Machines, files: CheckpointSection) -> None:
    """Refuse flags by which ranks that are started again could not go on from the newest checkpoint."""
    if launcher_args.max_restarts:
        flag = f"--max-restarts {launcher_args.max_restarts}"
    elif machines.fewest < machines.most:
        flag = f"--nnodes {launcher_args.nnodes}"
    else:
        return
    if not (files.is_save(files.load) and files.save_interval):
        raise ConfigurationError(
            f"{flag} needs --save DIR, --load DIR with the same folder, and --save-interval: ranks that are started "
            "again go on from the newest checkpoint"
        )
    if files.ckpt_step is not None:
        raise ConfigurationError(
            f"--ckpt-step {files.ckpt_step} would take ranks that are started again back to that step: drop it, or "
            f"{flag}"
        )


if __name__ == "__main__":
    outlast_reader()
    main()
