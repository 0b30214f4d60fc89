"""What a rank does that only wants to know whom it met: ``python tests/support/meets.py <torchrun's flags> FOLDER``."""

import os
import sys
from pathlib import Path


def rank():
    """Write down the sum of all ranks' numbers, from 1."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    number = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(number)
    Path(sys.argv[-1], str(dist.get_rank())).write_text(str(int(number)))
    dist.destroy_process_group()


def machine(words):
    """What the launcher does with these flags, with such ranks in the place of trainers."""
    from megatron_rc.launch.flags.torchrun import machines_of, torchrun_parser, words_for_torchrun
    from megatron_rc.launch.ranks import run_ranks

    mine, rest = torchrun_parser().parse_known_args(words)
    return run_ranks([*words_for_torchrun(mine, machines_of(mine)), __file__, *rest]).code


if __name__ == "__main__":
    rank() if "RANK" in os.environ else sys.exit(machine(sys.argv[1:]))
