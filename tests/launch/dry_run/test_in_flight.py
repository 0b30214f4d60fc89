"""The bytes of a stage's micro-batches in flight are those that PyTorch allocates when the same layers run on a CPU."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatron_rc.launch.dry_run import memory
from megatron_rc.launch.dry_run.fake_ranks import fake_groups, first_rank_of_stage, on_this_machine
from megatron_rc.launch.run_config.megatron_configs import build_transformer_config
from megatron_rc.launch.train_ppo import cpu_backend
from megatron_rc.launch.training.models.build import build_chunks
from tests.launch.dry_run.test_memory import COMMON, EXPERTS, RECOMPUTED
from tests.support.allocated import most_at_once
from tests.support.recorded_training import LLAMA, run_config

# The stage in the middle of three, whose layers are all that it has.
STAGES, STAGE = 3, 1
MIXTURE = [*LLAMA, *COMMON, *EXPERTS, "--num-layers=6", f"--pipeline-model-parallel-size={STAGES}"]
RECOMPUTATION = {
    "none": [],
    "full": RECOMPUTED,
    "selective": ["--recompute-granularity=selective", "--recompute-modules", "moe", "core_attn"],
}


def allocated(config, in_flight):
    """The most bytes at once while so many micro-batches go forward, and then back one after the other."""
    with cpu_backend(), fake_groups(config, first_rank_of_stage(config, STAGE)):
        (chunk,) = build_chunks(config, build_transformer_config(config))
        for parameter in chunk.parameters():
            parameter.register_post_accumulate_grad_hook(memory._forget_gradient)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            outputs = [memory._under_way(config, chunk)[0] for _ in range(in_flight)]
            chunk.set_input_tensor(None)
            while outputs:
                output = outputs.pop(0)
                output.backward(torch.empty_like(output))
    return most_at_once(profiler)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("more", RECOMPUTATION.values(), ids=RECOMPUTATION)
def test_experts_hold_the_bytes_that_pytorch_allocates(more, dispatcher):
    """Layers of experts keep tensors after a backward; these do not reduce the bytes of a waiting micro-batch."""
    config = run_config([*MIXTURE, *more, f"--moe-token-dispatcher-type={dispatcher}"], STAGES, engine=False)
    local = on_this_machine(config)
    with cpu_backend():
        (chunk,) = memory._measure_stage(config, local, STAGE)
    for in_flight in (1, 5):
        found = memory.dynamic_bytes([chunk], [0] * in_flight)
        assert found == pytest.approx(allocated(local, in_flight), rel=0.1), in_flight
