"""Choice of the softmax kernels: Triton's on a GPU that has Triton, else PyTorch's."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

from torch import Tensor

from megatron_rc.parallel import softmax as torch_kernels
from megatron_rc.parallel.softmax import RowGradients, SoftmaxOptions


def row_statistics(logits: Tensor, options: SoftmaxOptions) -> Tensor:
    """:func:`megatron_rc.parallel.softmax.row_statistics`, by the kernels that suit the device."""
    found: Tensor = _kernels(logits).row_statistics(logits, options)
    return found


def write_gradient(logits: Tensor, out: Tensor, gradients: RowGradients, options: SoftmaxOptions) -> None:
    """:func:`megatron_rc.parallel.softmax.write_gradient`, by the kernels that suit the device."""
    _kernels(logits).write_gradient(logits, out, gradients, options)


def _kernels(logits: Tensor) -> Any:
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
