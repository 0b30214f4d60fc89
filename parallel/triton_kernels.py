"""The functions of :mod:`megatron_rc.parallel.softmax` as Triton kernels, which read the logits once, without scratch.

The arithmetic is float32 with powers of two: the factor of the logits includes log2(e).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_rc.parallel.softmax import RowGradients, SoftmaxOptions

# Columns that a program works on at a time: many, to keep the memory busy, within 64 registers a thread.
_FORWARD_BLOCK, _BACKWARD_BLOCK = 8192, 4096
_LN2 = tl.constexpr(math.log(2))
_LOWEST = tl.constexpr(-1e4)  # two to this power is 0, and so is it times that power


def row_statistics(logits: Tensor, options: SoftmaxOptions) -> Tensor:
    """:func:`megatron_rc.parallel.softmax.row_statistics`; a logit of -inf adds nothing, even if all are -inf.

    The logits [t, v/tp] are float32, bfloat16 or float16 with contiguous rows; the padding is not read. ``chunk_size``,
    ``compile`` and ``holes`` have no effect. The result is float32. A NaN or inf among a row's logits makes all its
    sums NaN, but not always its maximum.
    """
    count = 2 + options.entropy + options.squares
    found = torch.zeros(count, len(logits), dtype=torch.float32, device=logits.device)
    if not options.columns or not len(logits):
        found[0] = -torch.inf
        return found
    block = _block(options.columns, _FORWARD_BLOCK)
    with torch.cuda.device_of(logits):
        _statistics_kernel[(len(logits),)](
            logits,
            found,
            logits.stride(0),
            len(logits),
            options.columns,
            options.inverse_temperature / math.log(2),
            ENTROPY=options.entropy,
            SQUARES=options.squares,
            BLOCK=block,
            num_warps=_warps(block),
        )
    return found


def write_gradient(logits: Tensor, out: Tensor, gradients: RowGradients, options: SoftmaxOptions) -> None:
    """:func:`megatron_rc.parallel.softmax.write_gradient`; rows that do not count are not read.

    The logits [t, v/tp] are float32, bfloat16 or float16; each row of them and of ``out`` is contiguous.
    """
    if not out.numel():
        return
    width = logits.shape[1]
    block = _block(width, _BACKWARD_BLOCK)
    blocks = triton.cdiv(width, block)
    # Masks and gradients of the caller may be slices or expanded.
    factors = {name: None if value is None else value.contiguous() for name, value in vars(gradients).items()}
    with torch.cuda.device_of(logits):
        # One axis of programs: only the first may exceed 65535. The blocks of a row are neighbours.
        _gradient_kernel[(len(logits) * blocks,)](
            logits,
            out,
            *(logits.stride(0), out.stride(0), blocks, width),
            options.columns,
            options.inverse_temperature / math.log(2),
            **factors,
            BLOCK=block,
            num_warps=_warps(block),
        )


def _block(columns: int, limit: int) -> int:
    size: int = triton.next_power_of_2(columns)
    return min(size, limit)


def _warps(block: int) -> int:
    return max(1, min(8, block // 512))


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _statistics_kernel(
    logits: tl.tensor,
    found: tl.tensor,
    stride: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    scale: tl.tensor,
    ENTROPY: tl.constexpr,
    SQUARES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The statistics of one row, by one program."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    source = logits + row * stride + offsets
    maximum = tl.full([], -float("inf"), tl.float32)
    total = tl.full([], 0, tl.float32)
    expected = tl.full([], 0, tl.float32)
    squares = tl.full([], 0, tl.float32)
    # The last columns have their own load: with a mask that can end inside a vector, Triton loads logits one by one.
    whole = columns // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        block = tl.load(source + start)
        maximum, total, expected, squares = _merged(
            block, maximum, total, expected, squares, scale, ENTROPY=ENTROPY, SQUARES=SQUARES
        )
    if whole < columns:
        block = tl.load(source + whole, mask=whole + offsets < columns, other=-float("inf"))
        maximum, total, expected, squares = _merged(
            block, maximum, total, expected, squares, scale, ENTROPY=ENTROPY, SQUARES=SQUARES
        )
    target = found + row
    tl.store(target, maximum)
    tl.store(target + rows, total)
    if ENTROPY:
        tl.store(target + 2 * rows, expected * _LN2)
    if SQUARES:
        tl.store(target + (2 + ENTROPY) * rows, squares)


@triton.jit  # type: ignore[untyped-decorator]
def _merged(
    block: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    expected: tl.tensor,
    squares: tl.tensor,
    scale: tl.tensor,
    ENTROPY: tl.constexpr,
    SQUARES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The statistics with one more block of logits; ``expected`` is in powers of two."""
    block = block.to(tl.float32)
    maximum_before = maximum
    maximum = tl.maximum(maximum, tl.max(block, 0))
    origin = tl.where(maximum == -float("inf"), 0.0, maximum)  # -inf minus -inf is NaN
    shift = _finite((maximum_before - origin) * scale)
    factor = tl.exp2(shift)
    shifted = (block - origin) * scale
    if ENTROPY:
        shifted = _finite(shifted)
    exp = tl.exp2(shifted)
    if ENTROPY:
        expected = factor * (expected + shift * total) + tl.sum(shifted * exp, 0)
    if SQUARES:
        squares = factor * factor * squares + tl.sum(exp * exp, 0)
    total = factor * total + tl.sum(exp, 0)
    return maximum, total, expected, squares


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_kernel(
    logits: tl.tensor,
    out: tl.tensor,
    stride: tl.tensor,
    out_stride: tl.tensor,
    blocks: tl.tensor,
    width: tl.tensor,
    columns: tl.tensor,
    scale: tl.tensor,
    offset: tl.tensor,
    constant: tl.tensor,
    log_pi: tl.tensor,
    pi: tl.tensor,
    column: tl.tensor,
    here: tl.tensor,
    target: tl.tensor,
    counted: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """The gradient of one block of one row, by one program."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns_here = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    counts = tl.load(counted + row) != 0
    inside = columns_here < width
    # Read the padding, without using it: the row's end is a multiple of a vector, the padding's start need not be.
    read = columns_here < tl.where(counts, width, 0)
    block = tl.load(logits + row * stride + columns_here, mask=read, other=0.0).to(tl.float32)
    power = (block - tl.load(offset + row)) * scale
    if log_pi is not None:
        power = _finite(power)
    probability = tl.exp2(power)
    factor = tl.load(constant + row)
    if log_pi is not None:
        factor += tl.load(log_pi + row) * _LN2 * power
    if pi is not None:
        factor += tl.load(pi + row) * probability
    gradient = tl.where((columns_here < columns) & counts, probability * factor, 0.0)
    label = tl.where(tl.load(here + row) != 0, tl.load(column + row), -1).to(tl.int32)
    gradient = tl.where(columns_here == label, tl.load(target + row), gradient)
    tl.store(out + row * out_stride + columns_here, gradient.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _finite(power: tl.tensor) -> tl.tensor:
    """The power, at least ``_LOWEST``: -inf times its power of two would be NaN. NaN stays NaN."""
    return tl.maximum(power, _LOWEST, propagate_nan=tl.PropagateNan.ALL)
