"""Statistics and gradients of softmax over rows of local logits, one chunk of rows at a time.

This module knows no other ranks: a row's statistics are of the local columns, and can be merged over ranks. The scratch
is two chunks in the arithmetic's dtype, for any number of rows; compiled chunks need none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Elements of a chunk: fits a CPU's cache; worth a compiled call; fills a GPU.
EAGER_ELEMENTS, _COMPILED, _GPU = 2**19, 2**22, 2**25
LEAST_ROWS = 8  # of an eager chunk: threads share a reduction by rows
LOWEST_LOG_PI = -1e4  # exp of it is 0, and so is it times its exp


@dataclass(frozen=True)
class SoftmaxOptions:
    """The settings for reading rows of logits."""

    columns: int  # number of leading columns that are vocabulary; the rest is padding
    inverse_temperature: float  # multiplies the logits
    entropy: bool  # compute the entropy
    squares: bool  # compute the sum of squared probabilities
    chunk_size: int | None  # rows of a chunk; None for a size that suits the device
    compile: bool  # run chunks through torch.compile
    holes: bool  # allow logits of -inf, by another pass over the chunk; else they make Σ exp(x - m) (x - m) NaN

    def chunks(self, rows: Tensor) -> Iterator[tuple[slice, bool]]:
        """(slice of the rows, whether it is compiled) of each chunk; only whole chunks are compiled."""
        start, width = 0, max(rows.shape[1], 1)
        if self.compile:
            size = self.chunk_size or max(1, _COMPILED // width)
            start = len(rows) // size * size
            yield from ((slice(first, first + size), True) for first in range(0, start, size))
        size = self.chunk_size or max(LEAST_ROWS, (_GPU if rows.is_cuda else EAGER_ELEMENTS) // width)
        for first in range(start, len(rows), size):
            yield slice(first, min(first + size, len(rows))), False


Factors = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class RowGradients:
    """The factors of d loss / d logits of each row: [t] in the arithmetic's dtype, divided by the temperature.

    gradient_v = π_v (constant + log_pi · log π_v + pi · π_v), except ``target`` in the label's column
    """

    offset: Tensor  # log Σ exp of the row, times the temperature, so that log π = (logits - offset) / temperature
    constant: Tensor  # factor of π
    log_pi: Tensor | None  # factor of π log π; None without a gradient of the entropy
    pi: Tensor | None  # factor of π²; None without a gradient of Σπ²
    column: Tensor  # int64, the local column of the label; any value if another rank has it
    here: Tensor  # bool, this rank has the label's column, and the token counts
    target: Tensor  # the gradient in the label's column
    counted: Tensor  # bool; the gradient of all other rows is 0, whatever they contain

    def at(self, index: slice | Tensor) -> RowGradients:
        """The factors of a part of the rows."""
        parts: dict[str, Any] = {name: None if value is None else value[index] for name, value in vars(self).items()}
        return RowGradients(**parts)

    def factors(self, part: slice) -> Factors:
        """(offset, constant, log_pi, pi) of a part of the rows, [rows, 1] each."""
        log_pi = None if self.log_pi is None else self.log_pi[part].unsqueeze(1)
        pi = None if self.pi is None else self.pi[part].unsqueeze(1)
        return self.offset[part].unsqueeze(1), self.constant[part].unsqueeze(1), log_pi, pi


def row_statistics(logits: Tensor, options: SoftmaxOptions) -> Tensor:
    """The statistics of each row over its local columns; they can be merged over ranks.

    From logits [t, v/tp] of any float dtype, which are read once, to [2 to 4, t]: m = max of the logits; Σ exp(x - m),
    in which the logits are divided by the temperature, and so is m; Σ exp(x - m) (x - m), for the entropy;
    Σ exp(x - m)², for the squares. Without a column, m is -inf.
    """
    count = 2 + options.entropy + options.squares
    found = torch.zeros(count, len(logits), dtype=arithmetic(logits.dtype), device=logits.device)
    if not options.columns or not len(logits):
        found[0] = -torch.inf
        return found
    scratch = _Scratch(options, found.dtype)
    for part, compiles in options.chunks(logits):
        chunk = logits[part, : options.columns]
        if compiles:
            wanted = (options.inverse_temperature, options.entropy, options.squares)
            found[:, part] = _compiled(_chunk_statistics)(chunk, *wanted)
        else:
            _eager_statistics(chunk, options, scratch, found[:, part])
    return found


def write_gradient(logits: Tensor, out: Tensor, gradients: RowGradients, options: SoftmaxOptions) -> None:
    """The gradient at the logits [t, v/tp], which are read once, written to ``out``: like the logits, or these."""
    out[:, options.columns :] = 0
    if not options.columns or not len(logits):
        return
    scratch = _Scratch(options, gradients.offset.dtype)
    for part, compiles in options.chunks(logits):
        chunk, written, factors = logits[part, : options.columns], out[part, : options.columns], gradients.factors(part)
        if compiles:
            _compiled(_chunk_gradient)(chunk, written, factors, options.inverse_temperature)
        else:
            _eager_gradient(chunk, written, factors, options, scratch)
    _fill_rows(out, ~gradients.counted)
    # By index: scatter makes a float32 copy of all of a bfloat16 tensor.
    cells = (torch.arange(len(out), device=out.device), gradients.column)
    out[cells] = torch.where(gradients.here, gradients.target.to(out.dtype), out[cells])


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    """The dtype of arithmetic on values of ``dtype``: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


class _Scratch:
    """Two buffers of a chunk's shape, made when first asked for."""

    def __init__(self, options: SoftmaxOptions, dtype: torch.dtype) -> None:
        self._columns, self._dtype = options.columns, dtype
        self._buffers: Tensor | None = None

    def of(self, chunk: Tensor) -> tuple[Tensor, Tensor]:
        """Two buffers with as many rows as the chunk, which is no larger than the first one."""
        if self._buffers is None:
            self._buffers = torch.empty(2, len(chunk), self._columns, dtype=self._dtype, device=chunk.device)
        return self._buffers[0, : len(chunk)], self._buffers[1, : len(chunk)]


def _as_arithmetic(chunk: Tensor, out: Tensor) -> Tensor:
    """The chunk in the dtype of ``out``, there if it has another one: an operation on both would make a third copy."""
    return chunk if chunk.dtype == out.dtype else out.copy_(chunk)


def _log_pi(chunk: Tensor, offset: Tensor, options: SoftmaxOptions, out: Tensor) -> Tensor:
    """(chunk - offset) / temperature."""
    torch.sub(chunk, offset, out=out)
    if options.inverse_temperature != 1:
        out.mul_(options.inverse_temperature)
    return out


def _eager_statistics(chunk: Tensor, options: SoftmaxOptions, scratch: _Scratch, out: Tensor) -> None:
    one, two = scratch.of(chunk)
    chunk = _as_arithmetic(chunk, one)
    maximum = chunk.amax(1)
    shifted = _log_pi(chunk, maximum.unsqueeze(1), options, one)
    if options.holes:
        shifted.clamp_(min=LOWEST_LOG_PI)
    exp = torch.exp(shifted, out=two)
    values = [maximum, exp.sum(1)]
    if options.entropy:
        values.append(shifted.mul_(exp).sum(1))
    if options.squares:
        values.append(exp.square_().sum(1))
    torch.stack(values, out=out)


def _eager_gradient(chunk: Tensor, out: Tensor, factors: Factors, options: SoftmaxOptions, scratch: _Scratch) -> None:
    one, two = scratch.of(chunk)
    offset, factor, of_log_pi, of_pi = factors
    log_pi = _log_pi(_as_arithmetic(chunk, one), offset, options, one)
    pi = torch.exp(log_pi, out=two)
    if of_log_pi is not None:
        factor = log_pi.clamp_(min=LOWEST_LOG_PI).mul_(of_log_pi).add_(factor)
    if of_pi is not None:
        factor = torch.addcmul(factor, pi, of_pi, out=one)
    if out.dtype == pi.dtype:
        torch.mul(pi, factor, out=out)
    else:
        out.copy_(pi.mul_(factor))


def _fill_rows(values: Tensor, flags: Tensor) -> None:
    """Write 0 to the flagged rows."""
    if values.is_cuda:
        values.masked_fill_(flags.unsqueeze(1), 0)  # an index would be looked up on the host
    else:
        values.index_fill_(0, flags.nonzero().squeeze(1), 0)


def _chunk_statistics(chunk: Tensor, inverse_temperature: float, entropy: bool, squares: bool) -> Tensor:
    chunk = chunk.to(arithmetic(chunk.dtype))
    maximum = chunk.amax(1)
    shifted = ((chunk - maximum.unsqueeze(1)) * inverse_temperature).clamp(min=LOWEST_LOG_PI)
    exp = shifted.exp()
    values = [maximum, exp.sum(1)]
    if entropy:
        values.append((shifted * exp).sum(1))
    if squares:
        values.append(exp.square().sum(1))
    return torch.stack(values)


def _chunk_gradient(chunk: Tensor, out: Tensor, factors: Factors, inverse_temperature: float) -> None:
    offset, factor, of_log_pi, of_pi = factors
    log_pi = ((chunk.to(offset.dtype) - offset) * inverse_temperature).clamp(min=LOWEST_LOG_PI)
    pi = log_pi.exp()
    if of_log_pi is not None:
        factor = factor + of_log_pi * log_pi
    if of_pi is not None:
        factor = factor + of_pi * pi
    out.copy_(pi * factor)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function, dynamic=False)
    return compiled
