"""``python -m tests.support.meets PORT FOLDER``: two machines meet, each with a rank that writes down whom it met.

Both are launchers with torchrun's agent, in processes of their own; that and their ranks are forks of one process that
has torch loaded, which is most of what such a start takes.
"""

import os
import sys
from pathlib import Path
from unittest import mock

import torch.distributed.run
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from megatron_rc.launch.flags.torchrun import machines_of, torchrun_parser, words_for_torchrun
from megatron_rc.launch.ranks import run_ranks
from tests.support.forked import Forked


def rank(folder):
    """Write down the sum of all ranks' numbers, from 1."""
    torch.distributed.init_process_group("gloo")
    number = torch.tensor(torch.distributed.get_rank() + 1)
    torch.distributed.all_reduce(number)
    Path(folder, str(torch.distributed.get_rank())).write_text(str(int(number)))
    torch.distributed.destroy_process_group()


def machine(number, port, folder):
    """What the launcher does with these flags, with such a rank in the place of trainers."""
    words = ["--nnodes=2", "--nproc-per-node=1", f"--master-port={port}", f"--node-rank={number}"]
    mine = torchrun_parser().parse_args(words)
    outcome = run_ranks([*words_for_torchrun(mine, machines_of(mine)), "--module", "tests.support.meets", folder])
    sys.stderr.write(outcome.words)
    sys.stderr.flush()
    return outcome.code


def main(port, folder):
    """The exit codes of both machines."""
    started = []
    for number in range(2):
        child = os.fork()
        if not child:
            os._exit(machine(number, port, folder))
        started.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in started]


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank(sys.argv[-1])
    else:
        with mock.patch.object(subprocess_handler, "Popen", Forked):
            print(main(*sys.argv[1:]))  # noqa: T201
