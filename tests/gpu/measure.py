"""What a piece of work costs a GPU: kernel launches, waits of the host, bytes."""

from __future__ import annotations

import contextlib
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel")  # and those with more letters behind
_LEAD = 8_000_000  # cycles, 4 ms at 2 GHz: more than the host needs to ask for a forward and a backward
_SYNC = "called a synchronizing CUDA operation"


def costs(work: Callable[[], object]) -> dict[str, int]:
    """Launches, host synchronisations and peak bytes of the work, each measured in a call of its own after a first one.

    Copies from memory that is not pinned to the GPU wait as well, and count as synchronisations.
    """
    work()
    return {"launches": count_launches(work), "syncs": count_syncs(work), "peak_bytes": peak_bytes(work)}


def count_launches(work: Callable[[], object]) -> int:
    """Kernels that the host launches, copies and fills not counted."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
        work()
        torch.cuda.synchronize()
    found = sum(event.name.startswith(_LAUNCHES) for event in record.events())
    if not found:
        raise RuntimeError("the profiler saw no kernel: it cannot see this GPU's, or the work launches none")
    return found


def count_syncs(work: Callable[[], object]) -> int:
    """How often the host waits for the GPU."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with _sync_debug_mode("warn"):
            work()
    return sum(_SYNC in str(warning.message) for warning in caught)


def peak_bytes(work: Callable[[], object]) -> int:
    """Bytes that the work allocates at once beyond what there was; its result is dropped at its end."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@contextlib.contextmanager
def _sync_debug_mode(mode: str) -> Iterator[None]:
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def milliseconds(
    work: Callable[[Callable[[], None]], object], device: torch.device, turns: int = 11, *, ahead: bool = False
) -> list[float]:
    """The median milliseconds of each stretch of some work, whose end it tells by a call of its argument.

    By the GPU's own events, from when it begins until it and the host are done. Three more turns come before. What
    follows the last stretch is not measured.

    Args:
        work: the work.
        device: that works.
        turns: how many are measured.
        ahead: see :class:`Stopwatch`.
    """
    found = []
    for _ in range(turns + 3):
        with Stopwatch(device, ahead=ahead) as watch:
            work(watch.lap)
        found.append(watch.milliseconds)
    return [statistics.median(column) for column in zip(*found[3:], strict=True)]


class Stopwatch:
    """Milliseconds of the stretches of a block: by the GPU's own events, or by the clock where there is none.

    Args:
        device: that works.
        ahead: the GPU is kept busy before the block, so that the host asks for work before it is due, as it does in a
            step, and what is measured is the GPU alone. Not for work in which the host waits.

    Attributes:
        milliseconds: of each stretch, once the block has ended.
    """

    def __init__(self, device: torch.device, *, ahead: bool = False) -> None:
        self.milliseconds: list[float] = []
        self._on_gpu, self._ahead = device.type == "cuda", ahead
        self._marks: list[Any] = []

    def __enter__(self) -> Stopwatch:
        """Begin when nothing is left to do but to wait for the host."""
        if self._on_gpu:
            torch.cuda.synchronize()
            if self._ahead:
                torch.cuda._sleep(_LEAD)
        self.lap()
        return self

    def lap(self) -> None:
        """The end of a stretch, and the beginning of the next one."""
        if self._on_gpu:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def __exit__(self, *_: object) -> None:
        """Wait for the end, and read the times."""
        if self._on_gpu:
            torch.cuda.synchronize()
            self.milliseconds = [before.elapsed_time(after) for before, after in pairwise(self._marks)]
        else:
            self.milliseconds = [1e3 * (after - before) for before, after in pairwise(self._marks)]
