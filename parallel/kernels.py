"""Choice of the softmax kernels: Triton's on a GPU that has Triton, else PyTorch's."""

from __future__ import annotations

import functools
import importlib.util

from torch import Tensor

from megatron_rc.parallel import softmax as torch_kernels
from megatron_rc.parallel.softmax import RowGradients, SoftmaxOptions


def row_statistics(logits: Tensor, options: SoftmaxOptions) -> Tensor:
    """:func:`megatron_rc.parallel.softmax.row_statistics`, by the kernels that suit the device."""
    if uses_triton(logits):
        from megatron_rc.parallel import triton_kernels

        return triton_kernels.row_statistics(logits, options)
    return torch_kernels.row_statistics(logits, options)


def write_gradient(logits: Tensor, out: Tensor, gradients: RowGradients, options: SoftmaxOptions) -> None:
    """:func:`megatron_rc.parallel.softmax.write_gradient`, by the kernels that suit the device."""
    if uses_triton(logits):
        from megatron_rc.parallel import triton_kernels

        triton_kernels.write_gradient(logits, out, gradients, options)
    else:
        torch_kernels.write_gradient(logits, out, gradients, options)


def uses_triton(logits: Tensor) -> bool:
    """Whether Triton's kernels take these logits: on a GPU, in contiguous rows, not float64."""
    return logits.is_cuda and logits.stride(-1) == 1 and logits.element_size() <= 4 and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
