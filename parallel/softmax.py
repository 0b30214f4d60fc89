"""Statistics and gradients of softmax over rows of local logits, one chunk of rows at a time.

A row holds the logits of one token over this rank's columns of the vocabulary. This module knows no other ranks: a
row's statistics are of the local columns, and can be merged over ranks. The scratch memory is two chunks in the
arithmetic's dtype, for any number of rows; compiled chunks need none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Number of logits in a chunk.
EAGER_ELEMENTS = 2**19  # on a CPU: small enough for its cache
_COMPILED_ELEMENTS = 2**22  # compiled: enough work to make the overhead of a call small
_GPU_ELEMENTS = 2**25  # on a GPU: enough work for all its processors
LEAST_ROWS = 8  # fewest rows of an eager chunk: the threads of a CPU divide a reduction by rows
# Smaller values of log π are raised to this one before they are multiplied by π = exp(log π), because -inf · 0 would be
# NaN. exp(-1e4) is 0 in float32 and in float64, so that the product is 0.
LOWEST_LOG_PI = -1e4


@dataclass(frozen=True)
class SoftmaxOptions:
    """The settings for the statistics and gradients of rows of logits, on one rank."""

    columns: int  # number of leading columns that are vocabulary; the others are padding
    inverse_temperature: float  # multiplies the logits
    entropy: bool  # compute the entropy
    squares: bool  # compute the sum of squared probabilities
    chunk_size: int | None  # rows of a chunk; None for a size that suits the device
    compile: bool  # run chunks through torch.compile
    # Allow logits of -inf, by another pass over the chunk; else they make Σ exp(x - m) (x - m) NaN.
    allow_minus_inf: bool

    def chunks(self, rows: Tensor) -> Iterator[tuple[slice, bool]]:
        """Yield (slice of the rows, whether to run it compiled) for each chunk; ``rows`` are [t, v/tp]."""
        width = max(rows.shape[1], 1)
        first_eager_row = 0
        if self.compile:
            size = self.chunk_size or max(1, _COMPILED_ELEMENTS // width)
            # Code is compiled for one shape. The rows left over, fewer than a chunk, run eagerly, not to compile again.
            first_eager_row = len(rows) // size * size
            for start in range(0, first_eager_row, size):
                yield slice(start, start + size), True

        elements = _GPU_ELEMENTS if rows.is_cuda else EAGER_ELEMENTS
        size = self.chunk_size or max(LEAST_ROWS, elements // width)
        for start in range(first_eager_row, len(rows), size):
            yield slice(start, min(start + size, len(rows))), False


# (log_normalizer, constant, log_pi_factor, pi_factor) of RowGradients for the rows of a chunk, [rows, 1] each.
Factors = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class RowGradients:
    """The factors from which d loss / d logits of each row is computed: [t] each, in the dtype of :func:`arithmetic`.

    gradient_v = π_v (constant + log_pi_factor · log π_v + pi_factor · π_v), except ``label_gradient`` in the label's
    column

    The factors contain the division by the temperature. The Triton kernel takes the fields by their names.
    """

    log_normalizer: Tensor  # temperature · log Σ exp(logits / temperature): log π = (logits - this) / temperature
    constant: Tensor  # factor of π
    log_pi_factor: Tensor | None  # factor of π log π; None without a gradient of the entropy
    pi_factor: Tensor | None  # factor of π²; None without a gradient of Σπ²
    label_column: Tensor  # int64, the local column of the label; any in range if another rank has it
    owns_label: Tensor  # bool, this rank has the label's column, and the token counts
    label_gradient: Tensor  # the gradient in the label's column
    counted: Tensor  # bool; the gradient of all other rows is 0, whatever they contain

    def at(self, index: slice | Tensor) -> RowGradients:
        """Return the factors of the rows at ``index``."""
        selected: dict[str, Any] = {}
        for name, value in vars(self).items():
            selected[name] = None if value is None else value[index]
        return RowGradients(**selected)

    def factors(self, part: slice) -> Factors:
        """Return (log_normalizer, constant, log_pi_factor, pi_factor) of the rows in ``part``, [rows, 1] each."""
        log_normalizer = self.log_normalizer[part].unsqueeze(1)
        constant = self.constant[part].unsqueeze(1)
        log_pi_factor = None if self.log_pi_factor is None else self.log_pi_factor[part].unsqueeze(1)
        pi_factor = None if self.pi_factor is None else self.pi_factor[part].unsqueeze(1)
        return log_normalizer, constant, log_pi_factor, pi_factor


def row_statistics(logits: Tensor, options: SoftmaxOptions) -> Tensor:
    """Return the softmax statistics of each row over its local columns, which can be merged over ranks.

    Args:
        logits: [t, v/tp] of any float dtype; read once, not written to.
        options: ``entropy`` and ``squares`` say which statistics are needed.

    Returns:
        [2 to 4, t] in the dtype of :func:`arithmetic`. The entries, with x the logits divided by the temperature:

        - m, the maximum of the logits, not divided by the temperature; -inf without a column
        - Σ exp(x - m / temperature)
        - with ``entropy``, Σ exp(x - m / temperature) (x - m / temperature)
        - with ``squares``, Σ exp(x - m / temperature)²
    """
    num_statistics = 2 + options.entropy + options.squares
    statistics = torch.zeros(num_statistics, len(logits), dtype=arithmetic(logits.dtype), device=logits.device)
    if not options.columns or not len(logits):
        statistics[0] = -torch.inf
        return statistics

    scratch = _Scratch(options, statistics.dtype)
    for part, runs_compiled in options.chunks(logits):
        chunk = logits[part, : options.columns]
        if runs_compiled:
            statistics[:, part] = _compiled(_chunk_statistics)(
                chunk, options.inverse_temperature, options.entropy, options.squares
            )
        else:
            _eager_statistics(chunk, options, scratch, statistics[:, part])
    return statistics


def write_gradient(logits: Tensor, out: Tensor, gradients: RowGradients, options: SoftmaxOptions) -> None:
    """Write d loss / d logits to ``out``; it is 0 in padding columns and in rows that do not count.

    Args:
        logits: [t, v/tp] of any float dtype; read once.
        out: like the logits; may be the logits themselves.
        gradients: the factors of the t rows.
        options: as for :func:`row_statistics`.
    """
    out[:, options.columns :] = 0
    if not options.columns or not len(logits):
        return

    scratch = _Scratch(options, gradients.log_normalizer.dtype)
    for part, runs_compiled in options.chunks(logits):
        chunk = logits[part, : options.columns]
        chunk_out = out[part, : options.columns]
        factors = gradients.factors(part)
        if runs_compiled:
            _compiled(_chunk_gradient)(chunk, chunk_out, factors, options.inverse_temperature)
        else:
            _eager_gradient(chunk, chunk_out, factors, options, scratch)
    _zero_rows(out, ~gradients.counted)

    # The label's column has a term of its own. By index: scatter makes a float32 copy of all of a bfloat16 tensor.
    label_cells = (torch.arange(len(out), device=out.device), gradients.label_column)
    out[label_cells] = torch.where(gradients.owns_label, gradients.label_gradient.to(out.dtype), out[label_cells])


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in with values of ``dtype``: float64 for float64, else float32."""
    return torch.promote_types(dtype, torch.float32)


class _Scratch:
    """Two buffers for the intermediate values of a chunk; all chunks of one call use the same two."""

    def __init__(self, options: SoftmaxOptions, dtype: torch.dtype) -> None:
        self._columns = options.columns
        self._dtype = dtype
        self._buffers: Tensor | None = None

    def of(self, chunk: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two buffers in the chunk's shape; the first chunk must have the most rows."""
        # Allocated at the first eager chunk, because compiled chunks need none.
        if self._buffers is None:
            self._buffers = torch.empty(2, len(chunk), self._columns, dtype=self._dtype, device=chunk.device)
        return self._buffers[0, : len(chunk)], self._buffers[1, : len(chunk)]


def _as_arithmetic(chunk: Tensor, out: Tensor) -> Tensor:
    """Return the chunk in the dtype of ``out``: the chunk itself, or a copy in ``out`` if it has another dtype.

    Without this, operations on the chunk and a float32 tensor would allocate such a copy.
    """
    return chunk if chunk.dtype == out.dtype else out.copy_(chunk)


def _scaled_difference(chunk: Tensor, origin: Tensor, options: SoftmaxOptions, out: Tensor) -> Tensor:
    """Write (chunk - origin) / temperature to ``out``, and return it; ``origin`` is [rows, 1]."""
    torch.sub(chunk, origin, out=out)
    if options.inverse_temperature != 1:
        out.mul_(options.inverse_temperature)
    return out


def _eager_statistics(chunk: Tensor, options: SoftmaxOptions, scratch: _Scratch, out: Tensor) -> None:
    """Write the statistics of a chunk's rows to ``out``, [2 to 4, rows], as :func:`row_statistics` returns them."""
    shifted_buffer, exp_buffer = scratch.of(chunk)
    chunk = _as_arithmetic(chunk, shifted_buffer)
    maximum = chunk.amax(1)
    shifted = _scaled_difference(chunk, maximum.unsqueeze(1), options, shifted_buffer)
    if options.allow_minus_inf:
        shifted.clamp_(min=LOWEST_LOG_PI)
    exp = torch.exp(shifted, out=exp_buffer)
    # From here on the buffers are overwritten: each holds its values until their last use.
    values = [maximum, exp.sum(1)]
    if options.entropy:
        values.append(shifted.mul_(exp).sum(1))
    if options.squares:
        values.append(exp.square_().sum(1))
    torch.stack(values, out=out)


def _eager_gradient(chunk: Tensor, out: Tensor, factors: Factors, options: SoftmaxOptions, scratch: _Scratch) -> None:
    """Write the gradient at a chunk's logits to ``out``, which may be the chunk: see :class:`RowGradients`.

    The labels' columns get no term of their own here.
    """
    log_pi_buffer, pi_buffer = scratch.of(chunk)
    log_normalizer, factor, log_pi_factor, pi_factor = factors
    log_pi = _scaled_difference(_as_arithmetic(chunk, log_pi_buffer), log_normalizer, options, log_pi_buffer)
    pi = torch.exp(log_pi, out=pi_buffer)
    if log_pi_factor is not None:
        factor = log_pi.clamp_(min=LOWEST_LOG_PI).mul_(log_pi_factor).add_(factor)
    if pi_factor is not None:
        factor = torch.addcmul(factor, pi, pi_factor, out=log_pi_buffer)
    if out.dtype == pi.dtype:
        torch.mul(pi, factor, out=out)
    else:
        out.copy_(pi.mul_(factor))


def _zero_rows(rows: Tensor, flags: Tensor) -> None:
    """Write 0 to the rows whose flag, [t] bool, is True."""
    if rows.is_cuda:
        # nonzero() would make the host wait for the GPU, to learn the number of flagged rows.
        rows.masked_fill_(flags.unsqueeze(1), 0)
    else:
        # Writes to the flagged rows only.
        rows.index_fill_(0, flags.nonzero().squeeze(1), 0)


def _chunk_statistics(chunk: Tensor, inverse_temperature: float, entropy: bool, squares: bool) -> Tensor:
    """Return the statistics of a chunk's rows, [2 to 4, rows], as :func:`row_statistics` describes them.

    It computes the same as :func:`_eager_statistics`, in a form that ``torch.compile`` fuses to one pass over it.
    """
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
    """Write π (constant + log_pi_factor · log π + pi_factor · π) of a chunk to ``out``, which may be the chunk itself.

    It computes the same as :func:`_eager_gradient`, in a form that ``torch.compile`` fuses to one pass over the chunk.
    """
    log_normalizer, factor, log_pi_factor, pi_factor = factors
    log_pi = ((chunk.to(log_normalizer.dtype) - log_normalizer) * inverse_temperature).clamp(min=LOWEST_LOG_PI)
    pi = log_pi.exp()
    if log_pi_factor is not None:
        factor = factor + log_pi_factor * log_pi
    if pi_factor is not None:
        factor = factor + pi_factor * pi
    out.copy_(pi * factor)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function compiled by ``torch.compile``, which then compiles it once for each shape."""
    compiled: Callable[..., Any] = torch.compile(function, dynamic=False)
    return compiled
