"""The trainer, whose rank 0 is killed within the writing of the second checkpoint, after its file."""

import os
import signal
from unittest import mock

from torch.distributed.checkpoint.filesystem import FileSystemWriter

from megatron_rc.launch import train_ppo

write_data = FileSystemWriter.write_data


def write_and_die(writer, plan, planner):
    written = write_data(writer, plan, planner)
    if "iter_0000002" in str(writer.path) and os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return written


if __name__ == "__main__":
    with mock.patch.object(FileSystemWriter, "write_data", write_and_die):
        train_ppo.main()
