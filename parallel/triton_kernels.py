"""The functions of :mod:`megatron_rc.parallel.softmax` as Triton kernels, which read the logits once, without scratch.

The arithmetic is float32. Exponentials are computed as powers of two, as GPUs do it: exp(x) is 2 to the power of
x · log2(e), so that the factor by which the logits are multiplied includes log2(e) = 1 / ln(2).
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
_LN2 = tl.constexpr(math.log(2))  # makes a natural logarithm of one to base 2
_LOWEST_POWER = tl.constexpr(-1e4)  # 2 to this power is 0 in float32, and so is its product with this


def row_statistics(logits: Tensor, options: SoftmaxOptions) -> Tensor:
    """The statistics of each row over its local columns: see :func:`megatron_rc.parallel.softmax.row_statistics`.

    Args:
        logits: [t, v/tp], float32, bfloat16 or float16, each row contiguous; the padding is not read.
        options: ``chunk_size``, ``compile`` and ``allow_minus_inf`` have no effect.

    Returns:
        [2 to 4, t], float32. A logit of -inf adds nothing, even if all of a row are -inf. A NaN or inf among a row's
        logits makes all its sums NaN, but not always its maximum.
    """
    num_statistics = 2 + options.entropy + options.squares
    statistics = torch.zeros(num_statistics, len(logits), dtype=torch.float32, device=logits.device)
    if not options.columns or not len(logits):
        statistics[0] = -torch.inf
        return statistics

    block = _block(options.columns, _FORWARD_BLOCK)
    with torch.cuda.device_of(logits):
        # One program for each row.
        _statistics_kernel[(len(logits),)](
            logits,
            statistics,
            row_stride=logits.stride(0),
            rows=len(logits),
            columns=options.columns,
            scale=options.inverse_temperature / math.log(2),
            ENTROPY=options.entropy,
            SQUARES=options.squares,
            BLOCK=block,
            num_warps=_warps(block),
        )
    return statistics


def write_gradient(logits: Tensor, out: Tensor, gradients: RowGradients, options: SoftmaxOptions) -> None:
    """Write the gradient at the logits to ``out``: see :func:`megatron_rc.parallel.softmax.write_gradient`.

    Args:
        logits: [t, v/tp], float32, bfloat16 or float16, each row contiguous; rows that do not count are not read.
        out: like the logits; may be the logits themselves.
        gradients: the factors of the t rows.
        options: ``chunk_size``, ``compile`` and ``allow_minus_inf`` have no effect.
    """
    if not out.numel():
        return

    width = logits.shape[1]
    block = _block(width, _BACKWARD_BLOCK)
    blocks_per_row = triton.cdiv(width, block)
    # The kernel takes the fields of RowGradients by their names. It reads number i at address i, but the masks and
    # gradients of the caller may be slices or expanded.
    factors = {name: None if value is None else value.contiguous() for name, value in vars(gradients).items()}
    with torch.cuda.device_of(logits):
        # One program for each block of each row, the blocks of a row one after the other. All on one axis, because
        # only the first axis of a grid may be longer than 65535.
        _gradient_kernel[(len(logits) * blocks_per_row,)](
            logits,
            out,
            row_stride=logits.stride(0),
            out_row_stride=out.stride(0),
            blocks_per_row=blocks_per_row,
            width=width,
            columns=options.columns,
            scale=options.inverse_temperature / math.log(2),
            **factors,
            BLOCK=block,
            num_warps=_warps(block),
        )


def _block(columns: int, limit: int) -> int:
    """Number of columns of a block: a power of two, as Triton needs, that holds all ``columns``, or else the limit."""
    size: int = triton.next_power_of_2(columns)
    return min(size, limit)


def _warps(block: int) -> int:
    """Number of warps (groups of 32 threads) of a program for a block: 16 columns a thread, in at most 8 warps."""
    return max(1, min(8, block // 512))


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _statistics_kernel(
    logits: tl.tensor,
    statistics: tl.tensor,
    row_stride: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    scale: tl.tensor,
    ENTROPY: tl.constexpr,
    SQUARES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the statistics of one row, by one program, block by block of its columns.

    Args:
        logits: address of the first logit.
        statistics: address of the results: ``rows`` numbers for each statistic, one statistic after the other.
        row_stride: distance of the logits of two rows.
        rows: number of rows.
        columns: number of columns that are read, from the first.
        scale: multiplies the logits: log2(e) / temperature.
        ENTROPY: write Σ exp(x) x.
        SQUARES: write Σ exp(x)².
        BLOCK: number of columns of a block.
    """
    row = tl.program_id(0).to(tl.int64)  # 64 bits: the place of a logit may lie beyond 2³¹
    column_in_block = tl.arange(0, BLOCK)
    first_block = logits + row * row_stride + column_in_block
    maximum = tl.full([], -float("inf"), tl.float32)
    sum_exp = tl.full([], 0, tl.float32)
    sum_exp_log = tl.full([], 0, tl.float32)
    sum_exp_squared = tl.full([], 0, tl.float32)

    # The last columns have their own load: with a mask that can end inside a vector, Triton loads logits one by one.
    end_of_full_blocks = columns // BLOCK * BLOCK
    for start in range(0, end_of_full_blocks, BLOCK):
        block = tl.load(first_block + start)
        maximum, sum_exp, sum_exp_log, sum_exp_squared = _with_block(
            block, maximum, sum_exp, sum_exp_log, sum_exp_squared, scale, ENTROPY=ENTROPY, SQUARES=SQUARES
        )
    if end_of_full_blocks < columns:
        is_column = end_of_full_blocks + column_in_block < columns
        block = tl.load(first_block + end_of_full_blocks, mask=is_column, other=-float("inf"))
        maximum, sum_exp, sum_exp_log, sum_exp_squared = _with_block(
            block, maximum, sum_exp, sum_exp_log, sum_exp_squared, scale, ENTROPY=ENTROPY, SQUARES=SQUARES
        )

    result = statistics + row
    tl.store(result, maximum)
    tl.store(result + rows, sum_exp)
    if ENTROPY:
        tl.store(result + 2 * rows, sum_exp_log * _LN2)
    if SQUARES:
        tl.store(result + (2 + ENTROPY) * rows, sum_exp_squared)


@triton.jit  # type: ignore[untyped-decorator]
def _with_block(
    block: tl.tensor,
    maximum: tl.tensor,
    sum_exp: tl.tensor,
    sum_exp_log: tl.tensor,
    sum_exp_squared: tl.tensor,
    scale: tl.tensor,
    ENTROPY: tl.constexpr,
    SQUARES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The statistics of a row with one more block of its logits, [BLOCK].

    They are the maximum of the logits so far, and the sums Σ 2^p, Σ 2^p p and Σ (2^p)², where p is
    (logit - maximum) · scale, so that 2^p is exp(logit / temperature - maximum / temperature).
    """
    block = block.to(tl.float32)
    maximum_before = maximum
    maximum = tl.maximum(maximum, tl.max(block, 0))
    origin = tl.where(maximum == -float("inf"), 0.0, maximum)  # -inf minus -inf is NaN

    # The sums so far are relative to the maximum before: each p becomes p + shift, and 2^p gets the factor 2^shift.
    shift = _at_least_lowest((maximum_before - origin) * scale)
    factor = tl.exp2(shift)
    power = (block - origin) * scale
    if ENTROPY:
        power = _at_least_lowest(power)
    exp = tl.exp2(power)
    if ENTROPY:
        # Before sum_exp is, because this needs the sum without the block.
        sum_exp_log = factor * (sum_exp_log + shift * sum_exp) + tl.sum(power * exp, 0)
    if SQUARES:
        sum_exp_squared = factor * factor * sum_exp_squared + tl.sum(exp * exp, 0)
    sum_exp = factor * sum_exp + tl.sum(exp, 0)
    return maximum, sum_exp, sum_exp_log, sum_exp_squared


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_kernel(
    logits: tl.tensor,
    out: tl.tensor,
    row_stride: tl.tensor,
    out_row_stride: tl.tensor,
    blocks_per_row: tl.tensor,
    width: tl.tensor,
    columns: tl.tensor,
    scale: tl.tensor,
    log_normalizer: tl.tensor,
    constant: tl.tensor,
    log_pi_factor: tl.tensor,
    pi_factor: tl.tensor,
    label_column: tl.tensor,
    owns_label: tl.tensor,
    label_gradient: tl.tensor,
    counted: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write the gradient of one block of columns of one row, by one program.

    Args:
        logits: address of the first logit.
        out: address of the first gradient; may be that of the logits.
        row_stride: distance of the logits of two rows.
        out_row_stride: distance of the gradients of two rows.
        blocks_per_row: number of blocks of each row.
        width: number of columns of a row, with padding.
        columns: number of columns without padding; the gradient of the padding is 0.
        scale: multiplies the logits: log2(e) / temperature.
        log_normalizer: this and the next seven are the addresses of the fields of
            :class:`~megatron_rc.parallel.softmax.RowGradients`, one number for each row; None for a factor that is not
            needed.
        constant: see ``log_normalizer``.
        log_pi_factor: see ``log_normalizer``.
        pi_factor: see ``log_normalizer``.
        label_column: see ``log_normalizer``.
        owns_label: see ``log_normalizer``.
        label_gradient: see ``log_normalizer``.
        counted: see ``log_normalizer``.
        BLOCK: number of columns of a block.
    """
    row = (tl.program_id(0) // blocks_per_row).to(tl.int64)  # 64 bits: the place of a logit may lie beyond 2³¹
    column = tl.program_id(0) % blocks_per_row * BLOCK + tl.arange(0, BLOCK)
    row_counts = tl.load(counted + row) != 0
    is_in_row = column < width
    # Read the padding, without using it: the row's end is a multiple of a vector, the padding's start need not be.
    is_read = column < tl.where(row_counts, width, 0)
    block = tl.load(logits + row * row_stride + column, mask=is_read, other=0.0).to(tl.float32)

    power = (block - tl.load(log_normalizer + row)) * scale  # log2(π)
    if log_pi_factor is not None:
        power = _at_least_lowest(power)
    pi = tl.exp2(power)
    factor_of_pi = tl.load(constant + row)
    if log_pi_factor is not None:
        factor_of_pi += tl.load(log_pi_factor + row) * _LN2 * power
    if pi_factor is not None:
        factor_of_pi += tl.load(pi_factor + row) * pi
    gradient = tl.where((column < columns) & row_counts, pi * factor_of_pi, 0.0)

    # No column is -1: a row whose label is on another rank, or that does not count, has no label here.
    label = tl.where(tl.load(owns_label + row) != 0, tl.load(label_column + row), -1).to(tl.int32)
    gradient = tl.where(column == label, tl.load(label_gradient + row), gradient)
    tl.store(out + row * out_row_stride + column, gradient.to(out.dtype.element_ty), mask=is_in_row)


@triton.jit  # type: ignore[untyped-decorator]
def _at_least_lowest(power: tl.tensor) -> tl.tensor:
    """The power of two, raised to ``_LOWEST_POWER``: the product of -inf and 2^-inf would be NaN. NaN stays NaN."""
    return tl.maximum(power, _LOWEST_POWER, propagate_nan=tl.PropagateNan.ALL)
