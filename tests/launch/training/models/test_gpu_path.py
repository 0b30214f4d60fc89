"""The launcher's GPU path without a GPU: nothing mixes tensors of the host with those of the device."""

import contextlib
import os
from unittest import mock

import pytest

from tests.support.forked import ForkedCall
from tests.support.runs import finish, read

WHOLE_RUN = """--config=count_up --tensor-model-parallel-size=1 --pipeline-model-parallel-size=1 --no-sequence-parallel
--train-iters=2 --grpo-prompts-per-step=2 --global-batch-size=16 --micro-batch-size=8 --bf16
--use-distributed-optimizer --optimizer-offload --rl-use-sequence-packing --grpo-kl-beta=0.1""".split()


@contextlib.contextmanager
def steps_counted(device):
    """A list that gets the host's waits of each optimizer step inside this block."""
    from megatron_rc.launch.training.trainer import Trainer

    steps = []
    accumulate = Trainer.accumulate

    def counted(self, *args, **options):
        before = device.waits.copy()
        results = accumulate(self, *args, **options)
        steps.append(device.waits - before)
        return results

    with mock.patch.object(Trainer, "accumulate", counted):
        yield steps


def train(words):
    """Operations that a GPU refuses, then a run on it."""
    import torch

    from megatron_rc.launch import train_ppo
    from tests.gpu.training import free_port
    from tests.support.far_device import GPU
    from tests.support.tagged_gpu import tagged_gpu

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(free_port())
    with tagged_gpu() as device:
        there = torch.ones(3, device=GPU)
        assert there.sum().device == GPU
        with pytest.raises(RuntimeError, match="expected all tensors to be on one device"):
            there + torch.ones(3)
        there[torch.tensor([0, 1])] = torch.ones(2, device=GPU)
        with pytest.raises(RuntimeError, match="expected all tensors to be on one device"):
            there[torch.tensor([0, 1])] = torch.ones(2)
        train_ppo.cpu_backend = None  # a run on a GPU never takes the CPU switch
        with steps_counted(device) as steps:
            train_ppo._main(words, None)
        for waits in steps:
            # For the metrics' sums, and for the number of tokens that Megatron divides by; nothing of the model waits.
            files = sorted(wait.split()[-1].split(":")[0] for wait in waits.elements())
            assert files == ["collectives.py", "schedule.py"], waits
        assert len(steps) == 2
        assert torch.optim.AdamW([there]).param_groups[0]["params"][0].is_cuda


@pytest.mark.processes
def test_a_run(tmp_path):
    arguments = [*WHOLE_RUN, f"--runs-dir={tmp_path}", "--run-name=run", f"--save={tmp_path / 'checkpoints'}"]
    code, _, errors = finish(ForkedCall(tmp_path, train, arguments))
    assert code == 0, errors
    row = read(tmp_path / "run")[-1]
    assert row["perf/peak_memory_gib"] == 1
