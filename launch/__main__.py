"""``python -m megatron_rc.launch --nproc-per-node N <flags>``: check the flags once, then let torchrun start the ranks.

Ends with 0 where all steps are made, or a checkpoint holds those that were when a signal came; with 2 for flags that
cannot work, 1 for a failed run, and as shells tell signals (130 for Ctrl-C, 143 for SIGTERM) where one came and nothing
was saved. But for 0 the last line of the output says why.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

# Until torchrun listens for it, Ctrl-C ends this process without a traceback, while modules load too.
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from megatron_rc.launch.errors import ConfigurationError, flag
from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.flags.parser import Parser, build_parser
from megatron_rc.launch.ranks import run_ranks
from megatron_rc.launch.run_config.training import CheckpointSection
from megatron_rc.launch.training.settings_file import settings_text

USAGE_ERROR = 2
TRAINER = "megatron_rc.launch.train_ppo"


def main(argv: Sequence[str] | None = None, module: str = TRAINER) -> None:
    """Run the module on every rank; ends the process with the code and the sentence above."""
    # Rank 0 comes to the same warnings.
    logging.getLogger("megatron_rc").setLevel(logging.ERROR)
    try:
        words = torchrun_arguments(sys.argv[1:] if argv is None else argv, module)
    except ConfigurationError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(USAGE_ERROR)
    outcome = run_ranks(words)
    if outcome.words:
        sys.stderr.write(f"{outcome.words}\n")
    sys.exit(outcome.code)


def torchrun_arguments(words: Sequence[str], module: str = TRAINER) -> list[str]:
    """The arguments of torchrun that these words stand for, after all checks.

    Raises:
        ConfigurationError: as in ``configure``.
    """
    parser = _torchrun_parser()
    mine, flags = parser.parse_known_args(words)
    if mine.help:
        parser.print_help()
        build_parser().print_help()
        sys.exit(0)
    _check(mine)
    if mine.dry_run:
        from megatron_rc.launch.dry_run.command import dry_run

        world_size = mine.nproc_per_node * mine.nnodes
        sys.exit(dry_run(flags, world_size, as_json=mine.json, device_memory_gib=mine.device_memory_gib))
    config, _ = configure(flags, mine.nproc_per_node * mine.nnodes, folders=not mine.print_config)
    _check_restarts(mine.max_restarts, config.checkpoints)
    if mine.print_config:
        sys.stdout.write(settings_text(config, Path("FILE")))
        sys.exit(0)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // mine.nproc_per_node)))
    command = ["--nproc-per-node", str(mine.nproc_per_node)]
    if mine.max_restarts:
        command += ["--max-restarts", str(mine.max_restarts)]
    if mine.nnodes == 1:
        command += ["--standalone"]
    else:
        command += ["--nnodes", str(mine.nnodes), "--node-rank", str(mine.node_rank or 0)]
        command += ["--master-addr", mine.master_addr or "127.0.0.1", "--master-port", str(mine.master_port or 29500)]
    return [*command, "--module", module, *flags]


def _check(mine: argparse.Namespace) -> None:
    for name in ("nproc_per_node", "nnodes"):
        if getattr(mine, name) < 1:
            raise ConfigurationError(f"{flag(name)} {getattr(mine, name)} must be positive")
    memory = mine.device_memory_gib
    for name, given in (("--json", mine.json), (f"--device-memory-gib {memory}", memory is not None)):
        if given and not mine.dry_run:
            raise ConfigurationError(f"{name} does nothing without --dry-run: give both, or neither")
    if memory is not None and not 0 < memory < float("inf"):
        raise ConfigurationError(f"--device-memory-gib {memory} must be positive")
    for name in ("node_rank", "master_addr", "master_port"):
        if mine.nnodes == 1 and getattr(mine, name) is not None:
            raise ConfigurationError(f"{flag(name)} {getattr(mine, name)} does nothing without --nnodes above 1")
    if not 0 <= (mine.node_rank or 0) < mine.nnodes:
        raise ConfigurationError(
            f"--node-rank {mine.node_rank} must be one of 0 to {mine.nnodes - 1}, with --nnodes {mine.nnodes}"
        )


def _check_restarts(restarts: int, files: CheckpointSection) -> None:
    if restarts < 0:
        raise ConfigurationError(f"--max-restarts {restarts} must be 0 or more")
    if restarts and not (files.save and files.save == files.load and files.save_interval):
        raise ConfigurationError(
            f"--max-restarts {restarts} needs --save DIR, --load DIR with the same folder, and --save-interval: ranks "
            "that are started again go on from the newest checkpoint"
        )


def _torchrun_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m megatron_rc.launch", allow_abbrev=False, add_help=False)
    group = parser.add_argument_group("torchrun")
    group.add_argument("-h", "--help", action="store_true", help="show torchrun's and the trainer's flags")
    text = "check the flags, print all of them as a launch file, and start nothing"
    group.add_argument("--print-config", action="store_true", help=text)
    text = "check the flags, say what the run would need on its ranks, and start nothing; no GPU is needed"
    group.add_argument("--dry-run", action="store_true", help=text)
    group.add_argument("--json", action="store_true", help="the dry run as one JSON object")
    text = "what a rank's device has: a dry run ends with 2 where a rank needs more"
    group.add_argument("--device-memory-gib", type=float, metavar="GIB", help=text)
    group.add_argument("--nproc-per-node", type=int, default=1, help="processes on this machine")
    text = "start all ranks again, from the newest checkpoint, when one has failed; at most this often"
    group.add_argument("--max-restarts", type=int, default=0, help=text)
    group.add_argument("--nnodes", type=int, default=1, help="machines")
    group.add_argument("--node-rank", type=int, help="number of this machine; default: 0")
    group.add_argument("--master-addr", help="address of machine 0; default: 127.0.0.1")
    group.add_argument("--master-port", type=int, help="free port of machine 0; default: 29500")
    return parser


if __name__ == "__main__":
    main()
