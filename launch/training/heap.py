"""The C library's free memory, given back to the system now and then."""

from __future__ import annotations

import ctypes

_STEPS = 100  # between two calls, each of which takes about a millisecond


def trim_heap(step: int) -> None:
    """Give back what lies free between blocks that are in use; every so many steps.

    With glibc 2.36 a run on CPUs was seen to take some kilobytes more of the system in every step, while what it had in
    use stayed the same.
    """
    if step % _STEPS:
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim is not None:
        trim(0)
