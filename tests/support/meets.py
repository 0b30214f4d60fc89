"""Two machines that meet, each with a rank that records the ranks that it met.

Both are launchers with torchrun's agent, in processes of their own. ``tests.support.forked`` runs them.
"""

import os
import sys
from pathlib import Path

import torch.distributed.run

from megatron_rc.launch.ending import tell_ending
from megatron_rc.launch.flags.torchrun import machines_of, torchrun_parser, words_for_torchrun
from megatron_rc.launch.ranks import run_ranks


def rank(folder):
    """Write down the sum of all ranks' numbers, counted from 1."""
    torch.distributed.init_process_group("gloo")
    number = torch.tensor(torch.distributed.get_rank() + 1)
    torch.distributed.all_reduce(number)
    Path(folder, str(torch.distributed.get_rank())).write_text(str(int(number)))
    torch.distributed.destroy_process_group()
    tell_ending(kept=True)


def machine(number, port, folder):
    """The launcher's work on one machine, with such a rank instead of trainers."""
    arguments = ["--nnodes=2", "--nproc-per-node=1", f"--node-rank={number}"]
    arguments += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    mine = torchrun_parser().parse_args(arguments)
    outcome = run_ranks([*words_for_torchrun(mine, machines_of(mine)), "--module", "tests.support.meets", folder])
    sys.stderr.write(outcome.words)
    sys.stderr.flush()
    return outcome.code


def meet(port, folder):
    """Run both machines; returns the sum of their exit codes."""
    started = []
    for number in range(2):
        child = os.fork()
        if not child:
            os._exit(machine(number, port, folder))
        started.append(child)
    return sum(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in started)


if __name__ == "__main__":
    rank(sys.argv[-1])
