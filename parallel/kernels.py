"""Choice of the code that reads rows of logits: Triton kernels on a GPU that has Triton, else PyTorch operations."""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType

from torch import Tensor

from megatron_rc.parallel import softmax


def kernels_of(logits: Tensor) -> ModuleType:
    """Return the module whose ``row_statistics`` and ``write_gradient`` are to be called for these logits, [t, v/tp].

    It is :mod:`megatron_rc.parallel.triton_kernels` or :mod:`megatron_rc.parallel.softmax`, which have both functions.
    """
    if not uses_triton(logits):
        return softmax

    # Imported here, because the module needs Triton, which machines without a GPU do not have.
    from megatron_rc.parallel import triton_kernels

    return triton_kernels


def uses_triton(logits: Tensor) -> bool:
    """Return whether the Triton kernels accept these logits: on a GPU, each row contiguous, not float64."""
    # The kernels compute in float32, so that they would round float64.
    fits_float32 = logits.element_size() <= 4
    return logits.is_cuda and logits.stride(-1) == 1 and fits_float32 and _has_triton()


@functools.cache
def _has_triton() -> bool:
    """Return whether Triton is installed, without importing it; looked up once."""
    return importlib.util.find_spec("triton") is not None
