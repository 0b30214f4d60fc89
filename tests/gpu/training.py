"""What the checks of training share: the launcher's own groups on a device, its trainers, and their steps.

As a program it is one rank of a case of the matrix, or a run that goes on from a checkpoint; see the two functions.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from tests.support import training_cases
from tests.support.made_rollouts import on_device
from tests.support.paths import ROOT
from tests.support.recorded_training import make_trainer, recorded_batch, run_config

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def words_for(device: str, arguments: Sequence[str]) -> list[str]:
    """Flags for a device, from those of the tests, which train on a CPU."""
    return [word for word in arguments if word != "--cpu"] + ["--cpu"] * (device == "cpu")


@contextlib.contextmanager
def joined(arguments: Sequence[str]) -> Iterator[None]:
    """Megatron's groups as these flags have them: nccl on a GPU, gloo behind the CPU switch else.

    The ranks are torchrun's; without it this process is the only one.
    """
    from megatron_rc.launch.train_ppo import cpu_backend, ignore_megatron_warnings

    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ["MASTER_PORT"] = str(free_port())
    ignore_megatron_warnings()
    config = run_config(list(arguments), int(os.environ["WORLD_SIZE"]), engine=False)
    with cpu_backend() if config.launch.on_cpu else contextlib.nullcontext():
        from megatron_rc.launch.distributed import initialize, shut_down

        initialize(config)
        yield
        shut_down()


def job(arguments: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """``python words``, which must succeed, as a job of its own beside the ranks of this process."""
    environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    options = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True, "timeout": seconds}
    done = subprocess.run((sys.executable, *arguments), **options, check=False)
    assert done.returncode == 0, f"{done.stdout[-1500:]}\n{done.stderr[-4000:]}"
    return done


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def steps(arguments: Sequence[str], batches: Sequence[int]) -> list[dict[str, float]]:
    """The metrics of one optimizer step on each of these recorded batches; ends with a checkpoint if asked for one."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    # Of several trainers in one process each would begin with other weights.
    model_parallel_cuda_manual_seed(run_config(list(arguments), engine=False).training.seed)
    trainer = make_trainer(list(arguments))
    metrics = []
    for index in batches:
        prepared = trainer.prepare(on_device(recorded_batch(index), trainer.device))
        metrics.append(trainer.update(prepared, 0).metrics)
    if trainer.config.checkpoints.save:
        trainer.save()
    return metrics


def go_on(path: Path, batches: Sequence[int], arguments: Sequence[str]) -> None:
    """Steps on these batches from whatever the flags load; their metrics go to the file."""
    with joined(arguments):
        path.write_text(json.dumps(steps(arguments, batches)), encoding="utf-8")


def one_rank(folder: Path, arguments: Sequence[str]) -> None:
    """A case of the matrix on this rank; what it finds goes to the folder."""
    old, new = training_cases.weights()
    with joined(arguments):
        outcome = training_cases.run_case(list(arguments), training_cases.make_data(), old, new)
        torch.save(outcome, folder / f"rank-{os.environ['RANK']}.pt")


if __name__ == "__main__":
    kind, where, *rest = sys.argv[1:]
    if kind == "rank":
        one_rank(Path(where), rest)
    else:
        go_on(Path(where), json.loads(rest[0]), rest[1:])
