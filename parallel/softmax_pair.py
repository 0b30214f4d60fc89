"""Divergences of two softmaxes over rows of local logits, one chunk of rows at a time: statistics and gradients.

A row holds the student's logits of one token over this rank's columns of the vocabulary; the row of the same index in a
second tensor holds the teacher's. This module knows no other ranks: a row's statistics are of the local columns, and
can be merged over ranks. All arithmetic is PyTorch's, on a GPU too. The scratch memory is three chunks.

In formulas x and y are the student's and the teacher's logits, divided by their temperatures; p and q are the two
probabilities, a = log p and b = log q.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rc.parallel.kept_columns import KeptColumns, kept_columns
from megatron_rc.parallel.softmax import arithmetic
from megatron_rc.parallel.support import Support

# Number of logits of one policy in a chunk.
CHUNK_ELEMENTS = 2**17  # on a CPU: the chunks of both policies and the scratch memory fit into its cache
_GPU_ELEMENTS = 2**24  # on a GPU: enough work for all its processors
_NUM_BUFFERS = 3  # scratch buffers, each of a chunk's shape


@dataclass(frozen=True)
class PairOptions:
    """The settings for reading the rows of both policies, on one rank."""

    kind: str  # one of megatron_rc.parallel.divergence.DIVERGENCES
    beta: float  # β of jsd; other kinds do not use it
    columns: int  # number of leading columns that are vocabulary; the others are padding
    temperature: float  # divides the student's logits
    teacher_temperature: float  # divides the teacher's logits
    chunk_size: int | None  # rows of a chunk; None: a size that suits the device
    is_alone: bool  # no other rank has columns of these rows

    @property
    def num_statistics(self) -> int:
        """Number of statistics of a row, as :func:`pair_statistics` returns them."""
        if self.kind != "jsd":
            return 5
        return 6 if self.is_alone else 4

    def rows_of_chunk(self, rows: Tensor, width: int) -> int:
        """Number of rows, of ``width`` columns each, that are worked on together."""
        elements = _GPU_ELEMENTS if rows.is_cuda else CHUNK_ELEMENTS
        return self.chunk_size or max(1, elements // max(width, 1))


@dataclass(frozen=True)
class PairFactors:
    """Numbers of each row from which the gradient at the student's logits is computed: [t] each."""

    log_normalizers: Tensor  # [2, t], of student and teacher: temperature · log Σ exp(logits / temperature)
    mean: Tensor  # reverse_kl: the divergence; jsd: Σ p (a - log m), m the mixture; forward_kl: not used
    grad: Tensor  # gradient of the loss with respect to the divergence, divided by the student's temperature
    counted: Tensor  # bool; the gradient of all other rows is 0, whatever they contain


@dataclass(frozen=True)
class _Part:
    """Some rows, and the columns over which their distributions are."""

    index: slice | Tensor  # the rows
    columns: int  # number of leading local columns; used without ``kept``
    kept: KeptColumns | None  # the columns of kept tokens; None: all columns that are vocabulary

    def logits(self, rows: Tensor) -> Tensor:
        """The logits of these rows, [rows of the part, columns of the part]; -inf in columns that do not count."""
        if self.kept is not None:
            return self.kept.gathered(rows[self.index])
        return rows[self.index, : self.columns]

    def write_gradient(self, out: Tensor, values: Tensor, factor: Tensor) -> None:
        """Write the gradient, values · factor, into these rows of ``out``; further columns of it stay as they are.

        Args:
            out: like the rows of all tokens.
            values: [rows of the part, columns of the part]; may be overwritten.
            factor: like ``values``, or [rows of the part, 1].
        """
        if self.kept is None and isinstance(self.index, slice):
            # A slice gives a view of ``out``: the product goes straight into it, rounded to its dtype.
            view = out[self.index, : self.columns]
            if view.dtype == values.dtype:
                torch.mul(values, factor, out=view)
            else:
                view.copy_(values.mul_(factor))
            return
        gradient = values.mul_(factor)
        if self.kept is not None:
            out[self.index] = self.kept.scattered(gradient, like=out)
        else:
            out[self.index, : self.columns] = gradient.to(out.dtype)


def _parts(rows: Tensor, counted: Tensor, support: Support | None, options: PairOptions) -> Iterator[_Part]:
    """Yield the rows chunk by chunk. With a support rows that do not count are left out.

    With a support the host reads the offsets and ``counted``, on a GPU too.
    """
    if support is None:
        size = options.rows_of_chunk(rows, options.columns)
        for start in range(0, len(rows), size):
            yield _Part(slice(start, min(start + size, len(rows))), options.columns, kept=None)
        return

    whole_vocabulary = (counted & ~support.has_kept_tokens).nonzero().squeeze(1)
    for index in whole_vocabulary.split(options.rows_of_chunk(rows, options.columns)):
        if len(index):
            yield _Part(index, options.columns, kept=None)

    with_kept = (counted & support.has_kept_tokens).nonzero().squeeze(1)
    if len(with_kept):
        most_kept = int(support.counts[with_kept].max())
        for index in with_kept.split(options.rows_of_chunk(rows, most_kept)):
            yield _Part(index, options.columns, kept_columns(support, index, options.columns))


def pair_statistics(
    rows: Tensor, teacher_rows: Tensor, counted: Tensor, support: Support | None, options: PairOptions
) -> tuple[Tensor, bool]:
    """Return the statistics of each row over its local columns, and whether they needed care for logits of -inf.

    Care takes another pass over each chunk, so that a CPU first tries without, and does so only if a counted row is
    NaN. A GPU always takes care, because the host would wait for the outcome of the try.

    Args:
        rows: [t, v/tp], the student's logits, of any float dtype; not written to.
        teacher_rows: [t, v/tp], the teacher's logits, of any float dtype; not written to.
        counted: [t] bool; the statistics of other rows are any numbers.
        support: the kept tokens of the t rows, over which both distributions are; None: the whole vocabulary.
        options: the settings.

    Returns:
        [num_statistics, t]: the largest logit of the student and of the teacher, not divided by the temperature,
        -inf without a column; Σ exp(x') and Σ exp(y'), relative to these; for reverse_kl Σ exp(x') (x' - y'), for
        forward_kl Σ exp(y') (y' - x'), for jsd on a rank alone the sums of :func:`mixture_statistics`. Where all logits
        of a policy are -inf, x' or y' is relative to 0.
    """
    careful = rows.is_cuda or support is not None
    statistics = _statistics(rows, teacher_rows, counted, support, options, careful=careful)
    if careful or options.kind == "jsd" or not bool((statistics[4].isnan() & counted).any()):
        return statistics, careful
    return _statistics(rows, teacher_rows, counted, support, options, careful=True), True


def _statistics(
    rows: Tensor,
    teacher_rows: Tensor,
    counted: Tensor,
    support: Support | None,
    options: PairOptions,
    *,
    careful: bool,
) -> Tensor:
    """The statistics of :func:`pair_statistics`; ``careful``: logits may be -inf."""
    dtype = pair_arithmetic(rows, teacher_rows)
    statistics = torch.zeros(options.num_statistics, len(rows), dtype=dtype, device=rows.device)
    statistics[:2] = -torch.inf
    if not options.columns:
        return statistics

    scratch = _Scratch(dtype)
    for part in _parts(rows, counted, support, options):
        x = part.logits(rows)
        y = part.logits(teacher_rows)
        buffers = scratch.of(x)
        statistics[:, part.index] = _chunk_statistics(x, y, buffers, options, careful=careful)
    return statistics


def mixture_statistics(
    rows: Tensor,
    teacher_rows: Tensor,
    log_normalizers: Tensor,
    counted: Tensor,
    support: Support | None,
    options: PairOptions,
) -> Tensor:
    """The sums of jsd over the local columns, [2, t]: Σ q (b - log m) and Σ p (a - log m), with m = β q + (1 - β) p.

    Args:
        rows: [t, v/tp], the student's logits.
        teacher_rows: [t, v/tp], the teacher's logits.
        log_normalizers: [2, t], over all ranks: see :class:`PairFactors`.
        counted: [t] bool; the sums of other rows are any numbers.
        support: as for :func:`pair_statistics`.
        options: the settings.
    """
    sums = torch.zeros(2, len(rows), dtype=log_normalizers.dtype, device=rows.device)
    if not options.columns:
        return sums
    scratch = _Scratch(log_normalizers.dtype)
    for part in _parts(rows, counted, support, options):
        x = part.logits(rows)
        y = part.logits(teacher_rows)
        normalizers = log_normalizers[:, part.index].unsqueeze(2)
        log_p, log_q, log_mixture = scratch.of(x)
        _log_probs(x, y, normalizers, log_p, log_q, options)
        floor = torch.finfo(log_p.dtype).tiny
        sums[:, part.index] = _mixture_sums(log_p.exp_(), log_q.exp_(), log_mixture, options, floor=floor)
    return sums


def write_pair_gradient(
    rows: Tensor,
    teacher_rows: Tensor,
    out: Tensor,
    factors: PairFactors,
    support: Support | None,
    options: PairOptions,
    *,
    careful: bool,
) -> None:
    """Write the gradient at the student's logits to ``out``; 0 in columns of padding and in rows that do not count.

    Args:
        rows: [t, v/tp], the student's logits.
        teacher_rows: [t, v/tp], the teacher's logits.
        out: like ``rows``; may be ``rows``.
        factors: the factors of the t rows.
        support: as for :func:`pair_statistics`.
        options: the settings.
        careful: logits may be -inf, as :func:`pair_statistics` says.
    """
    out[:, options.columns :] = 0
    if options.columns:
        scratch = _Scratch(factors.log_normalizers.dtype)
        gradient_of = _GRADIENTS[options.kind]
        for part in _parts(rows, factors.counted, support, options):
            x = part.logits(rows)
            y = part.logits(teacher_rows)
            chunk_factors = _ChunkFactors(
                normalizers=factors.log_normalizers[:, part.index].unsqueeze(2),
                mean=factors.mean[part.index].unsqueeze(1),
                grad=factors.grad[part.index].unsqueeze(1),
            )
            values, factor = gradient_of(x, y, chunk_factors, scratch.of(x), options, careful=careful)
            part.write_gradient(out, values, factor)
    _zero_rows(out, ~factors.counted)


def pair_arithmetic(rows: Tensor, teacher_rows: Tensor) -> torch.dtype:
    """The dtype to compute in: float64 if the logits of one policy are float64, else float32."""
    return arithmetic(torch.promote_types(rows.dtype, teacher_rows.dtype))


class _Scratch:
    """Buffers for the intermediate values of a chunk; all chunks of a call use the same memory."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._memory: Tensor | None = None

    def of(self, chunk: Tensor) -> tuple[Tensor, ...]:
        """The buffers in the chunk's shape."""
        size = _NUM_BUFFERS * chunk.numel()
        if self._memory is None or len(self._memory) < size:
            self._memory = torch.empty(size, dtype=self._dtype, device=chunk.device)
        return self._memory[:size].view(_NUM_BUFFERS, *chunk.shape).unbind()


def _as_arithmetic(chunk: Tensor, out: Tensor) -> Tensor:
    """The chunk in the dtype of ``out``: the chunk itself, or a copy in ``out`` if it has another dtype."""
    return chunk if chunk.dtype == out.dtype else out.copy_(chunk)


def _scaled_difference(chunk: Tensor, origin: Tensor, temperature: float, out: Tensor) -> Tensor:
    """Write (chunk - origin) / temperature to ``out``, and return it; ``origin`` is [rows, 1]."""
    torch.sub(_as_arithmetic(chunk, out), origin, out=out)
    return out if temperature == 1 else out.mul_(1 / temperature)


def _chunk_statistics(
    x: Tensor, y: Tensor, buffers: tuple[Tensor, ...], options: PairOptions, *, careful: bool
) -> Tensor:
    """The statistics of a chunk's rows, [num_statistics, rows], as :func:`pair_statistics` returns them."""
    student, teacher, third = buffers
    x = _as_arithmetic(x, student)
    y = _as_arithmetic(y, teacher)
    largest_x = x.amax(1)
    largest_y = y.amax(1)
    _scaled_difference(x, origin_of(largest_x).unsqueeze(1), options.temperature, student)
    _scaled_difference(y, origin_of(largest_y).unsqueeze(1), options.teacher_temperature, teacher)

    if options.kind == "jsd":
        p = student.exp_()
        q = teacher.exp_()
        sum_x = p.sum(1)
        sum_y = q.sum(1)
        statistics = torch.stack([largest_x, largest_y, sum_x, sum_y])
        if not options.is_alone:
            return statistics
        # The sums are those of the whole rows, so that p and q are known while the cache has them. Both stay multiplied
        # by the teacher's sum, and so are the sums over the mixture.
        p.mul_((sum_y / sum_x).unsqueeze(1))
        floor = (torch.finfo(q.dtype).tiny * sum_y).unsqueeze(1)
        return torch.cat([statistics, _mixture_sums(p, q, third, options, floor=floor) / sum_y])

    # ``first`` is the policy whose mean the divergence is.
    first, second = (student, teacher) if options.kind == "reverse_kl" else (teacher, student)
    second_sum = torch.exp(second, out=third).sum(1)
    difference = torch.sub(first, second, out=second)
    first_exp = torch.exp(first, out=third)
    if careful:
        # A token without probability adds 0, although the difference may be infinite or NaN.
        difference.masked_fill_(first_exp == 0, 0)
    first_sum = first_exp.sum(1)
    weighted_sum = difference.mul_(first_exp).sum(1)
    sums = [first_sum, second_sum] if options.kind == "reverse_kl" else [second_sum, first_sum]
    return torch.stack([largest_x, largest_y, *sums, weighted_sum])


def origin_of(largest: Tensor) -> Tensor:
    """The number that logits are taken relative to: the largest of them, or 0 if that is -inf."""
    return torch.where(largest == -torch.inf, 0, largest)


def _log_probs(x: Tensor, y: Tensor, normalizers: Tensor, log_p: Tensor, log_q: Tensor, options: PairOptions) -> None:
    """Write log p and log q of a chunk; ``normalizers`` is [2, rows, 1]."""
    _scaled_difference(x, normalizers[0], options.temperature, log_p)
    _scaled_difference(y, normalizers[1], options.teacher_temperature, log_q)


def _mixture_sums(p: Tensor, q: Tensor, log_mixture: Tensor, options: PairOptions, *, floor: Tensor | float) -> Tensor:
    """The sums of :func:`mixture_statistics` of a chunk's rows, [2, rows]; overwrites p, q and the scratch buffer.

    p and q may have a common factor for each row, which the sums then have too. ``floor`` is the smallest normal
    number, times this factor, [rows, 1]: it is added to both, so that they may be divisors with a finite quotient.
    """
    p.add_(floor)
    q.add_(floor)
    # b - log m is -log(m/q), and a - log m is -log(m/p).
    of_teacher = _log_mixture(p, q, 1 - options.beta, log_mixture).mul_(q).sum(1)
    of_student = _log_mixture(q, p, options.beta, log_mixture).mul_(p).sum(1)
    return torch.stack([of_teacher, of_student]).neg_()


def _log_mixture(first: Tensor, second: Tensor, share: float, out: Tensor) -> Tensor:
    """Write log((share · first + (1 - share) · second) / second) to ``out``, and return it; ``second`` is positive."""
    share_of_second = torch.full((), 1 - share, dtype=second.dtype, device=second.device)
    return torch.addcdiv(share_of_second, first, second, value=share, out=out).log_()


class _ChunkFactors(NamedTuple):
    """The fields of :class:`PairFactors` for the rows of a chunk."""

    normalizers: Tensor  # [2, rows, 1]
    mean: Tensor  # [rows, 1]
    grad: Tensor  # [rows, 1]


def _reverse_kl_gradient(
    x: Tensor, y: Tensor, factors: _ChunkFactors, buffers: tuple[Tensor, ...], options: PairOptions, *, careful: bool
) -> tuple[Tensor, Tensor]:
    """Return p and grad · (a - b - D), D the divergence, in buffers: the gradient is their product."""
    log_p, log_q, _ = buffers
    _log_probs(x, y, factors.normalizers, log_p, log_q, options)
    factor = torch.sub(log_p, log_q, out=log_q)
    p = log_p.exp_()
    if careful:
        factor.masked_fill_(p == 0, 0)
    return p, factor.sub_(factors.mean).mul_(factors.grad)


def _forward_kl_gradient(
    x: Tensor, y: Tensor, factors: _ChunkFactors, buffers: tuple[Tensor, ...], options: PairOptions, *, careful: bool
) -> tuple[Tensor, Tensor]:
    """Return p - q in a buffer, and grad, [rows, 1]: the gradient is their product."""
    log_p, log_q, _ = buffers
    _log_probs(x, y, factors.normalizers, log_p, log_q, options)
    return log_p.exp_().sub_(log_q.exp_()), factors.grad


def _jsd_gradient(
    x: Tensor, y: Tensor, factors: _ChunkFactors, buffers: tuple[Tensor, ...], options: PairOptions, *, careful: bool
) -> tuple[Tensor, Tensor]:
    """Return p and grad · (1 - β) (a - log m - mean), in buffers: the gradient is their product."""
    log_p, log_q, log_mixture = buffers
    _log_probs(x, y, factors.normalizers, log_p, log_q, options)
    p = log_p.exp_()
    q = log_q.exp_()
    # It may then be a divisor. Probabilities below 1e-30 alone are changed; for 0 the gradient is about 1e-37.
    p.add_(torch.finfo(p.dtype).tiny)
    # a - log m is -log(m/p).
    factor = _log_mixture(q, p, options.beta, log_mixture).add_(factors.mean)
    return p, factor.mul_(factors.grad * (options.beta - 1))


_GRADIENTS = {"reverse_kl": _reverse_kl_gradient, "forward_kl": _forward_kl_gradient, "jsd": _jsd_gradient}


def _zero_rows(rows: Tensor, flags: Tensor) -> None:
    """Write 0 to the rows whose flag, [t] bool, is True."""
    if rows.is_cuda:
        # nonzero() would make the host wait for the GPU, to learn the number of flagged rows.
        rows.masked_fill_(flags.unsqueeze(1), 0)
    else:
        # Writes to the flagged rows only.
        rows.index_fill_(0, flags.nonzero().squeeze(1), 0)
