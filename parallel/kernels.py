"""Choice of the softmax kernels: Triton's on a GPU that has Triton, else PyTorch's."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

from torch import Tensor

from megatron_rc.parallel import softmax as torch_kernels


def kernels_of(logits: Tensor) -> Any:
    """The module whose ``row_statistics`` and ``write_gradient`` serve these logits: Triton's or PyTorch's."""
    if not uses_triton(logits):
        return torch_kernels
    # Imported here, because the module needs Triton, which machines without a GPU do not have.
    from megatron_rc.parallel import triton_kernels

    return triton_kernels


def uses_triton(logits: Tensor) -> bool:
    """Return whether Triton's kernels accept these logits: on a GPU, each row contiguous, not float64."""
    # The kernels compute in float32, so they would round float64 (8 bytes an element).
    return logits.is_cuda and logits.stride(-1) == 1 and logits.element_size() <= 4 and _has_triton()


@functools.cache
def _has_triton() -> bool:
    """Return whether Triton is installed, without importing it; looked up once."""
    return importlib.util.find_spec("triton") is not None
