"""Metrics of memory, time and floating-point operations."""

from __future__ import annotations

import resource
from collections.abc import Mapping

import torch
import torch.distributed as dist

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.flops import device_peak, step_flops

_GIB = 2**30
_PHASE = "_seconds"


class Machine:
    """Computes the metrics of the machines."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.flops, self.peak = step_flops(config), device_peak(config)

    def metrics(self, times: Mapping[str, float]) -> dict[str, float]:
        """Metrics of a step, from its ``perf/<phase>_seconds`` and ``perf/tokens_per_second``.

        Collectives: one all-reduce of one number over all ranks.
        """
        world = self.config.launch.world_size
        phases = {name.removesuffix(_PHASE): value for name, value in times.items() if name.endswith(_PHASE)}
        total = sum(phases.values())
        found = {f"{name}_share": value / total for name, value in phases.items()} if total else {}
        found["perf/tokens_per_second_per_rank"] = times["perf/tokens_per_second"] / world
        if self.flops is not None and times["perf/update_seconds"]:
            rate = self.flops / times["perf/update_seconds"] / world
            found |= {"perf/step_tflop": self.flops / 1e12, "perf/tflops_per_rank": rate / 1e12}
            if self.peak is not None:
                found["perf/utilization"] = rate / self.peak
        return found | self._memory()

    def _memory(self) -> dict[str, float]:
        """Peak memory over all ranks, and the rank that has it (the lowest of equal ones)."""
        world, device = self.config.launch.world_size, self.config.launch.device
        most = torch.tensor(_peak_bytes(on_cpu=self.config.launch.on_cpu) * world + world - 1 - dist.get_rank())
        most = most.to(device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=dist.group.WORLD)
        size, others = divmod(int(most), world)
        return {"perf/peak_memory_gib": size / _GIB, "perf/peak_memory_rank": float(world - 1 - others)}


def _peak_bytes(*, on_cpu: bool) -> int:
    """Peak bytes that PyTorch allocated on this rank's GPU; on a CPU, the process's peak resident memory."""
    if on_cpu:
        # Linux counts in KiB.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.cuda.max_memory_allocated()
