"""Choice of the softmax kernels: Triton's on a GPU that has Triton, else PyTorch's."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

from torch import Tensor

from megatron_rc.parallel import softmax as torch_kernels


def kernels_of(logits: Tensor) -> Any:
    """The module with ``row_statistics`` and ``write_gradient`` for these logits' device."""
    if not uses_triton(logits):
        return torch_kernels
    from megatron_rc.parallel import triton_kernels

    return triton_kernels


def uses_triton(logits: Tensor) -> bool:
    """Whether Triton's kernels take these logits: on a GPU, in contiguous rows, not float64."""
    return logits.is_cuda and logits.stride(-1) == 1 and logits.element_size() <= 4 and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
