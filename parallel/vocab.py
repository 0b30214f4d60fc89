"""Log-probs and entropy of tokens from logits that are split over the vocabulary, with the least memory.

The forward reads the logits once and keeps two numbers a token. The backward reads them once more and writes the
gradient. Both work on chunks of tokens, so that only the gradient is as large as the logits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rc.parallel.arguments import check_integer, check_number, check_tensors
from megatron_rc.parallel.collectives import all_reduce_max, all_reduce_sum
from megatron_rc.parallel.groups import Group, group_rank, group_size
from megatron_rc.parallel.kernels import kernels_of
from megatron_rc.parallel.softmax import LOWEST_LOG_PI, RowGradients, SoftmaxOptions

IGNORED_LABEL = -100


def vocab_parallel_log_probs_and_entropy(
    logits: Tensor,
    labels: Tensor,
    tp_group: Group | None = None,
    *,
    vocab_size: int | None = None,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    sum_squares: bool = False,
    inplace_backward: bool = False,
    compile: bool = False,
) -> tuple[Tensor, ...]:
    """Log-prob of each label, and the entropy of each distribution, under softmax(logits / temperature).

        x = logits / temperature    log π(y) = x_y - log Σ_v exp(x_v)    H = -Σ_v π_v log π_v    Q = Σ_v π_v²

    Args:
        logits: [..., v/tp], any float dtype; rank r of ``tp_group`` holds rows r·v/tp to (r+1)·v/tp. Not written to,
            unless ``inplace_backward``. A logit of -inf is a probability of 0.
        labels: [...], int64, indices into the whole vocabulary, equal on all ranks of ``tp_group``.
        tp_group: the ranks that hold the other vocabulary rows.
        vocab_size: rows at and above it are padding and have probability 0. Default: all rows count.
        mask: [...], bool, True if the token counts; results and gradients of other tokens are 0, for any label.
            Default: False for the label -100.
        temperature: divides the logits; > 0.
        chunk_size: tokens that are worked on together; changes time and scratch, and results only by rounding.
            Default: a size that suits the device.
        sum_squares: return Q too, the probability that two samples agree (for an optimal token baseline and the
            collision entropy -log Q).
        inplace_backward: the backward writes the gradient into the memory of the logits, so that nothing else may need
            them, and a second backward is an error. For trainers whose logits fill the memory.
        compile: run the chunks through ``torch.compile`` (the first call takes seconds). For many calls on a CPU; a GPU
            with Triton ignores it.

    Returns:
        (log_probs, entropy), or (log_probs, entropy, Q): each [...], float32 (float64 for float64 logits), equal on all
        ranks of ``tp_group``. A label out of range at a counted position gives a NaN log-prob, which the correction's
        ``check()`` reports. All are differentiable in the logits; every rank must use the results alike.

    Memory: forward, one chunk in float32 and the statistics, of which 4 bytes a token and the results are held until
        the backward; backward, one chunk and the gradient. Logits whose leading dimensions are a transposed view of
        contiguous ones are read as they are; of any other view a copy is made.

    Collectives: one MAX of t and one SUM of 3t (4t with Q) numbers over ``tp_group`` in the forward, none in the
    backward, none for a group of size 1.

    Raises:
        ValueError: shapes that do not fit, integer logits, a temperature or chunk size that is not positive, or logits
            whose width cannot be a shard of ``vocab_size`` (full-vocabulary logits for a shard, or the reverse).
    """
    spec = CallSpec(tp_group, vocab_size, temperature, chunk_size, True, sum_squares, inplace_backward, compile)
    return _apply(logits, labels, mask, spec)


def vocab_parallel_log_probs(
    logits: Tensor,
    labels: Tensor,
    tp_group: Group | None = None,
    *,
    vocab_size: int | None = None,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    inplace_backward: bool = False,
    compile: bool = False,
) -> Tensor:
    """The log-probs of :func:`vocab_parallel_log_probs_and_entropy` alone, with less work.

    Collectives: one MAX of t and one SUM of 2t numbers over ``tp_group`` in the forward.
    """
    spec = CallSpec(tp_group, vocab_size, temperature, chunk_size, False, False, inplace_backward, compile)
    return _apply(logits, labels, mask, spec)[0]


@dataclass(frozen=True)
class CallSpec:
    """The settings of one call of a function of this module, or of :mod:`megatron_rc.parallel.linear`."""

    tp_group: Group | None
    vocab_size: int | None
    temperature: float
    chunk_size: int | None
    entropy: bool
    sum_squares: bool
    inplace_backward: bool
    compile: bool

    def softmax_options(self, width: int, holes: bool) -> SoftmaxOptions:
        """The settings for reading a local shard of this width; ``holes``: allow logits of -inf."""
        columns = width
        if self.vocab_size is not None:
            columns = min(max(self.vocab_size - group_rank(self.tp_group) * width, 0), width)
        return SoftmaxOptions(
            columns=columns,
            inverse_temperature=1 / self.temperature,
            entropy=self.entropy,
            squares=self.sum_squares,
            chunk_size=self.chunk_size,
            compile=self.compile,
            holes=holes,
        )

    def without_chunk_size(self) -> CallSpec:
        """These settings with chunks of a size that suits the device."""
        return replace(self, chunk_size=None)


def _apply(logits: Tensor, labels: Tensor, mask: Tensor | None, spec: CallSpec) -> tuple[Tensor, ...]:
    check_tensors({"mask": mask}, logits=logits, labels=labels)
    if not logits.is_floating_point():
        raise ValueError(f"logits are {logits.dtype}: expected a float dtype")
    if not logits.dim():
        raise ValueError("logits are a single number: expected the vocabulary in the last dimension")
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} differ before the vocabulary")
    check_call(labels, mask, spec, logits.shape[-1])
    result: tuple[Tensor, ...] = _VocabSoftmax.apply(logits, labels, mask, spec)  # type: ignore[no-untyped-call]
    return result


def counted_tokens(labels: Tensor, mask: Tensor | None) -> Tensor:
    """Bool, like the labels: the mask; without one, whether there is a label."""
    return labels != IGNORED_LABEL if mask is None else mask


def check_call(labels: Tensor, mask: Tensor | None, spec: CallSpec, width: int) -> None:
    """Raise ValueError for arguments that do not fit together; ``width`` is the local logits' width."""
    if not width:
        raise ValueError("logits have no columns: expected this rank's shard of the vocabulary in the last dimension")
    if mask is not None and (mask.shape != labels.shape or mask.dtype != torch.bool):
        raise ValueError(
            f"mask is {mask.dtype} {tuple(mask.shape)}: expected bool of the labels' {tuple(labels.shape)}"
        )
    if labels.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"labels are {labels.dtype}: expected int64, or int32")
    check_number("temperature", spec.temperature, lambda t: 0 < t < torch.inf, "must be positive, and finite")
    if spec.vocab_size is not None:
        check_integer("vocab_size", spec.vocab_size, least=1)
    if spec.chunk_size is not None:
        check_integer("chunk_size", spec.chunk_size, least=1)
    size = group_size(spec.tp_group)
    # Megatron pads the vocabulary by fewer than 128 rows a rank unless told otherwise.
    if spec.vocab_size is not None and not 0 <= width * size - spec.vocab_size < max(spec.vocab_size, 128 * size):
        raise ValueError(
            f"logits of width {width} on {size} tensor-parallel ranks make {width * size} rows, which is no "
            f"padding of vocab_size={spec.vocab_size}: pass each rank its own shard of the vocabulary"
        )


class _VocabSoftmax(torch.autograd.Function):
    """The autograd function, with closed forms, so that autograd keeps no large tensor but the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, mask: Tensor | None, spec: CallSpec) -> tuple[Tensor, ...]:
        order = sorted(range(logits.dim() - 1), key=logits.stride, reverse=True)
        rows = _as_rows(logits, order)
        label, counted = _flat(order, labels, counted_tokens(labels, mask))
        target = Target.find(label, counted, spec, logits.shape[-1])
        statistics, ctx.holes = statistics_of(rows, target.counted, spec)
        offset, results = combine(statistics, target, target.logits(rows), spec)
        shape = [labels.shape[dim] for dim in order]
        inverse = sorted(range(len(order)), key=order.__getitem__)
        results = tuple(result.view(shape).permute(inverse) for result in results)
        ctx.save_for_backward(logits, labels, mask, offset, *[*results[1:], None, None][:2])
        ctx.spec, ctx.order = spec, order
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        """Gradients with respect to the logits: see :func:`row_gradients`."""
        logits, labels, mask, offset, *results = ctx.saved_tensors
        spec: CallSpec = ctx.spec
        order: list[int] = ctx.order
        out = logits.detach() if spec.inplace_backward else torch.empty_like(logits)
        rows, written = _as_rows(logits, order), _as_rows(out, order)
        entropy, squares, *flat = _flat(order, *results, *grads)
        label, counted = _flat(order, labels, counted_tokens(labels, mask))
        target = Target.find(label, counted, spec, logits.shape[-1])
        factors = row_gradients(flat, target, target.logits(rows), offset, entropy, squares, spec)
        kernels_of(rows).write_gradient(rows, written, factors, spec.softmax_options(logits.shape[-1], ctx.holes))
        if written.data_ptr() != out.data_ptr():
            out.permute(*order, -1).copy_(written.view(out.permute(*order, -1).shape))
        return out, None, None, None


def statistics_of(rows: Tensor, counted: Tensor, spec: CallSpec) -> tuple[Tensor, bool]:
    """(statistics of the rows, whether logits of -inf were allowed): on a CPU only if a counted entropy needs it."""
    # On a GPU the test would wait for the host.
    statistics = kernels_of(rows).row_statistics(rows, spec.softmax_options(rows.shape[1], holes=rows.is_cuda))
    if rows.is_cuda or not spec.entropy or not bool((statistics[2].isnan() & counted).any()):
        return statistics, rows.is_cuda
    return kernels_of(rows).row_statistics(rows, spec.softmax_options(rows.shape[1], holes=True)), True


@dataclass(frozen=True)
class Target:
    """The labels' columns in the local shard; each [t]."""

    column: Tensor  # int64, the local column; 0 if another rank has it
    here: Tensor  # bool, this rank has the column, and the token counts
    known: Tensor  # bool, the label lies in the whole vocabulary
    counted: Tensor  # bool, the token counts

    @classmethod
    def find(cls, labels: Tensor, counted: Tensor, spec: CallSpec, width: int) -> Target:
        """The local columns of labels that are indices into the whole vocabulary."""
        known = (labels >= 0) & (labels < (spec.vocab_size or width * group_size(spec.tp_group)))
        column = labels - group_rank(spec.tp_group) * width
        here = known & counted & (column >= 0) & (column < width)
        return cls(torch.where(here, column, 0).long(), here, known, counted)

    def at(self, index: slice | Tensor) -> Target:
        """The labels of a part of the tokens."""
        return Target(self.column[index], self.here[index], self.known[index], self.counted[index])

    def logits(self, rows: Tensor) -> Tensor:
        """[t]: the labels' logits; any value if another rank has the column."""
        return rows.gather(1, self.column.unsqueeze(1)).squeeze(1)


def combine(statistics: Tensor, target: Target, chosen: Tensor, spec: CallSpec) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(log Σ exp(x) times the temperature, (log-probs, and entropy and Σπ² if asked for)), [t] each, over all ranks.

    Results are 0 if the token does not count. ``statistics`` are this rank's, of :func:`row_statistics`; ``chosen``,
    [t], are the labels' logits, valid for ``target.here``.

    Collectives: one MAX of t, one SUM of 2t to 4t numbers over ``tp_group``.
    """
    local, rest = statistics[0], list(statistics[1:])
    maximum = all_reduce_max(local, spec.tp_group)
    chosen = torch.where(target.here, (chosen.to(local.dtype) - maximum) / spec.temperature, 0)
    if group_size(spec.tp_group) > 1:
        # A rank whose columns are all padding or -inf has a maximum of -inf and adds nothing.
        present = local != -torch.inf
        shift = (local - maximum) / spec.temperature
        factor = shift.exp()
        if spec.entropy:
            rest[1] = (rest[1] + shift * rest[0]) * factor
        if spec.sum_squares:
            rest[-1] = rest[-1] * factor.square()
        rest[0] = rest[0] * factor
        rest = [torch.where(present, value, 0) for value in rest]
    chosen, total, *more = all_reduce_sum(torch.stack([chosen, *rest]), spec.tp_group).unbind()
    log_total = total.log()
    results = [torch.where(target.known, chosen - log_total, torch.nan)]
    if spec.entropy:
        results.append(log_total - more[0] / total)
    if spec.sum_squares:
        results.append(more[1] / total.square())
    return maximum + log_total * spec.temperature, tuple(torch.where(target.counted, one, 0) for one in results)


def row_gradients(
    grads: list[Tensor | None],
    target: Target,
    chosen: Tensor,
    offset: Tensor,
    entropy: Tensor | None,
    squares: Tensor | None,
    spec: CallSpec,
) -> RowGradients:
    """The factors of each row's gradient.

        d log π_y / d x_v = [v = y] - π_v    d H / d x_v = -π_v (log π_v + H)    d Q / d x_v = 2 π_v (π_v - Q)

    ``grads``, [t] each, are of the log-probs, the entropy and Q; None if the loss does not depend on it. ``chosen`` are
    the labels' logits, valid for ``target.here``; offset, entropy and Q (``squares``) are the forward's.
    """

    def scaled(grad: Tensor | None, counted: Tensor) -> Tensor | None:
        return None if grad is None else torch.where(counted, grad.to(offset.dtype), 0) / spec.temperature

    of_label = scaled(grads[0], target.counted & target.known)
    of_label = torch.zeros_like(offset) if of_label is None else of_label
    of_entropy = scaled(grads[1], target.counted) if spec.entropy else None
    of_squares = scaled(grads[2], target.counted) if spec.sum_squares else None
    constant, log_pi, pi = -of_label, None, None
    if of_entropy is not None and entropy is not None:
        constant, log_pi = constant - of_entropy * entropy, -of_entropy
    if of_squares is not None and squares is not None:
        constant, pi = constant - 2 * of_squares * squares, 2 * of_squares
    chosen_log_pi = (chosen.to(offset.dtype) - offset) / spec.temperature
    chosen_pi = chosen_log_pi.exp()
    factor = constant if log_pi is None else constant + log_pi * chosen_log_pi.clamp(min=LOWEST_LOG_PI)
    factor = factor if pi is None else factor + pi * chosen_pi
    return RowGradients(
        offset, constant, log_pi, pi, target.column, target.here, of_label + chosen_pi * factor, target.counted
    )


def _as_rows(logits: Tensor, order: list[int]) -> Tensor:
    """[t, v/tp], with the leading dimensions in this order: a view if possible."""
    return logits.detach().permute(*order, -1).reshape(-1, logits.shape[-1])


def _flat(order: list[int], *values: Any) -> list[Any]:
    """Each tensor as [t], with its dimensions in this order; None stays."""
    return [None if value is None else value.permute(order).reshape(-1) for value in values]
