"""What a piece of work costs a GPU: kernel launches, waits of the host, bytes."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel")  # and those with more letters behind
_LEAD = 40_000_000  # cycles, 20 ms at 2 GHz: more than the host needs to ask for a forward and a backward
_SYNC = "called a synchronizing CUDA operation"


def costs(work: Callable[[], object]) -> dict[str, float]:
    """Launches, milliseconds of kernels, host synchronisations and peak bytes of the work, after a first call of it.

    Copies from memory that is not pinned to the GPU wait as well, and count as synchronisations.
    """
    work()
    launches, busy = count_launches(work)
    return {"launches": launches, "busy_ms": busy, "syncs": count_syncs(work), "peak_bytes": peak_bytes(work)}


def count_launches(work: Callable[[], object]) -> tuple[int, float]:
    """Kernels that the host launches, copies and fills not counted, and the milliseconds that the GPU works."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
        work()
        torch.cuda.synchronize()
    events = list(record.events())
    num_launches = sum(event.name.startswith(_LAUNCHES) for event in events)
    if not num_launches:
        raise RuntimeError("the profiler saw no kernel: it cannot see this GPU's, or the work launches none")
    return num_launches, sum(
        event.time_range.elapsed_us() for event in events if event.device_type == DeviceType.CUDA
    ) / 1e3


def count_syncs(work: Callable[[], object]) -> int:
    """How often the host waits for the GPU."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum(_SYNC in str(warning.message) for warning in caught)


def peak_bytes(work: Callable[[], object]) -> int:
    """Bytes that the work allocates at once beyond what there was; its result is dropped at its end."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def milliseconds(
    work: Callable[[Callable[[], None]], object], device: torch.device, turns: int = 11, *, ahead: bool = False
) -> list[float]:
    """The median milliseconds of each stretch of some work, whose end it tells by a call of its argument.

    By the GPU's own events, or by the clock where there is none, from when nothing is left to do. Three more turns come
    before. What follows the last stretch is not measured.

    Args:
        work: the work.
        device: that works.
        turns: how many are measured.
        ahead: the GPU is kept busy before the work, so that the host asks for it before it is due, as it does in a
            step, and what is measured is the GPU alone. Not for work in which the host waits.
    """
    on_gpu = device.type == "cuda"
    rounds = []
    for _ in range(turns + 3):
        marks: list[Any] = []
        if on_gpu:
            torch.cuda.synchronize()
            if ahead:
                torch.cuda._sleep(_LEAD)
        lap = partial(_mark, marks, on_gpu)
        lap()
        work(lap)
        if on_gpu:
            torch.cuda.synchronize()
        pairs = pairwise(marks)
        rounds.append([begin.elapsed_time(end) if on_gpu else 1e3 * (end - begin) for begin, end in pairs])
    return [statistics.median(column) for column in zip(*rounds[3:], strict=True)]


def _mark(marks: list[Any], on_gpu: bool) -> None:
    """The end of a stretch, and the beginning of the next one."""
    if on_gpu:
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
    else:
        marks.append(time.perf_counter())
