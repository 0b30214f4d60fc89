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

# Until torchrun listens for it, Ctrl-C ends this process without a traceback, while modules load too.
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.flags.parser import Parser, build_parser
from megatron_rc.launch.ranks import run_ranks

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
    configure(flags, mine.nproc_per_node * mine.nnodes)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // mine.nproc_per_node)))
    command = ["--nproc-per-node", str(mine.nproc_per_node)]
    if mine.nnodes == 1:
        command += ["--standalone"]
    else:
        command += ["--nnodes", str(mine.nnodes), "--node-rank", str(mine.node_rank)]
        command += ["--master-addr", mine.master_addr, "--master-port", str(mine.master_port)]
    return [*command, "--module", module, *flags]


def _torchrun_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m megatron_rc.launch", allow_abbrev=False, add_help=False)
    group = parser.add_argument_group("torchrun")
    group.add_argument("-h", "--help", action="store_true", help="show torchrun's and the trainer's flags")
    group.add_argument("--nproc-per-node", type=int, default=1, help="processes on this machine")
    group.add_argument("--nnodes", type=int, default=1, help="machines")
    group.add_argument("--node-rank", type=int, default=0, help="number of this machine")
    group.add_argument("--master-addr", default="127.0.0.1", help="address of machine 0")
    group.add_argument("--master-port", type=int, default=29500, help="free port of machine 0")
    return parser


if __name__ == "__main__":
    main()
