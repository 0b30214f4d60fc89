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
_FORWARD_BLOCK = 8192
_BACKWARD_BLOCK = 4096
_LN2 = tl.constexpr(math.log(2))
_LOWEST = tl.constexpr(-1e4)  # two to this power is 0, and so is it times that power


def row_statistics(logits: Tensor, options: SoftmaxOptions) -> Tensor:
    """:func:`megatron_rc.parallel.softmax.row_statistics`; a logit of -inf adds nothing, even if all are -inf.

    The logits [t, v/tp] are float32, bfloat16 or float16 with contiguous rows; the padding is not read. ``chunk_size``,
    ``compile`` and ``holes`` have no effect. The result is float32. A NaN or inf among a row's logits makes all its
    sums NaN, but not always its maximum.
    """
    num_statistics = 2 + options.entropy + options.squares
    statistics = torch.zeros(num_statistics, len(logits), dtype=torch.float32, device=logits.device)
    if not options.columns or not len(logits):
        statistics[0] = -torch.inf
        return statistics
    block = _block(options.columns, _FORWARD_BLOCK)
    with torch.cuda.device_of(logits):
        _statistics_kernel[(len(logits),)](
            logits,
            statistics,
            logits.stride(0),
            len(logits),
            options.columns,
            options.inverse_temperature / math.log(2),
            ENTROPY=options.entropy,
            SQUARES=options.squares,
            BLOCK=block,
            num_warps=_warps(block),
        )
    return statistics


def write_gradient(logits: Tensor, out: Tensor, gradients: RowGradients, options: SoftmaxOptions) -> None:
    """:func:`megatron_rc.parallel.softmax.write_gradient`; rows that do not count are not read.

    The logits [t, v/tp] are float32, bfloat16 or float16; each row of them and of ``out`` is contiguous.
    """
    if not out.numel():
        return
    width = logits.shape[1]
    block = _block(width, _BACKWARD_BLOCK)
    blocks_per_row = triton.cdiv(width, block)
    # The kernel reads number i at address i, but masks and gradients of the caller may be slices or expanded.
    factors = {name: None if value is None else value.contiguous() for name, value in vars(gradients).items()}
    with torch.cuda.device_of(logits):
        # One axis of programs: only the first may exceed 65535. The blocks of a row are neighbours.
        _gradient_kernel[(len(logits) * blocks_per_row,)](
            logits,
            out,
            logits.stride(0),
            out.stride(0),
            blocks_per_row,
            width,
            options.columns,
            options.inverse_temperature / math.log(2),
            **factors,
            BLOCK=block,
            num_warps=_warps(block),
        )


def _block(columns: int, limit: int) -> int:
    """Columns of a block: a power of two, as Triton needs, that holds all columns, or the limit."""
    size: int = triton.next_power_of_2(columns)
    return min(size, limit)


def _warps(block: int) -> int:
    """Warps (groups of 32 threads) of a program: 16 columns a thread, in at most 8 warps."""
    return max(1, min(8, block // 512))


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _statistics_kernel(
    logits: tl.tensor,
    statistics: tl.tensor,
    stride: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    scale: tl.tensor,
    ENTROPY: tl.constexpr,
    SQUARES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the statistics of one row, by one program.

    ``scale`` multiplies the logits, so that exp(x) is 2 to the power of the scaled logit. ``statistics`` has ``rows``
    numbers for each statistic, one statistic after the other.
    """
    row = tl.program_id(0).to(tl.int64)  # 64 bits: the place of a logit may lie beyond 2³¹
    offsets = tl.arange(0, BLOCK)
    source = logits + row * stride + offsets
    maximum = tl.full([], -float("inf"), tl.float32)
    total = tl.full([], 0, tl.float32)
    expected = tl.full([], 0, tl.float32)
    squares = tl.full([], 0, tl.float32)
    # The last columns have their own load: with a mask that can end inside a vector, Triton loads logits one by one.
    end_of_whole_blocks = columns // BLOCK * BLOCK
    for start in range(0, end_of_whole_blocks, BLOCK):
        block = tl.load(source + start)
        maximum, total, expected, squares = _merged(
            block, maximum, total, expected, squares, scale, ENTROPY=ENTROPY, SQUARES=SQUARES
        )
    if end_of_whole_blocks < columns:
        is_column = end_of_whole_blocks + offsets < columns
        block = tl.load(source + end_of_whole_blocks, mask=is_column, other=-float("inf"))
        maximum, total, expected, squares = _merged(
            block, maximum, total, expected, squares, scale, ENTROPY=ENTROPY, SQUARES=SQUARES
        )
    target = statistics + row
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
    """The statistics with one more block of logits: (maximum, Σ exp, Σ exp · log2(exp), Σ exp²)."""
    block = block.to(tl.float32)
    maximum_before = maximum
    maximum = tl.maximum(maximum, tl.max(block, 0))
    origin = tl.where(maximum == -float("inf"), 0.0, maximum)  # -inf minus -inf is NaN
    # The sums so far are relative to the maximum before: each term gets the factor 2^shift, its exponent the shift.
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
    """Write the gradient of one block of one row, by one program; offset to counted are fields of RowGradients."""
    row = (tl.program_id(0) // blocks).to(tl.int64)  # 64 bits: the place of a logit may lie beyond 2³¹
    columns_here = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    counts = tl.load(counted + row) != 0
    inside = columns_here < width
    # Read the padding, without using it: the row's end is a multiple of a vector, the padding's start need not be.
    read = columns_here < tl.where(counts, width, 0)
    block = tl.load(logits + row * stride + columns_here, mask=read, other=0.0).to(tl.float32)
    power = (block - tl.load(offset + row)) * scale  # log2(π)
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
