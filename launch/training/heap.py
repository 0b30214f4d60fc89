"""The C library's free memory, given back to the system now and then."""

from __future__ import annotations

import ctypes

_STEPS = 100  # between two calls, each of which takes about a millisecond


def trim_heap(step: int) -> None:
    """Give back what lies free between blocks that are in use; every so many steps.

    PyTorch's tensors on a CPU are aligned blocks. Up to release 2.38 glibc finds the gaps that these leave badly, and
    takes new memory instead: some kilobytes a step, for as long as a run lasts.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim is not None and step % _STEPS == 0:
        trim(0)
