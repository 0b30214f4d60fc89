"""Log-probs and entropy of tokens from logits that are split over the vocabulary, with the least memory.

The forward reads the logits once and keeps two numbers a token. The backward reads them once more and writes the
gradient. Both work on chunks of tokens, so that only the gradient is as large as the logits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rc.parallel.arguments import check_tensors
from megatron_rc.parallel.groups import Group
from megatron_rc.parallel.log_probs import (
    CallSpec,
    ForwardValues,
    ResultGradients,
    Target,
    check_call,
    combine,
    counted_tokens,
    gradient_factors,
    statistics_of,
    write_gradient,
)
from megatron_rc.parallel.support import Support, check_support


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
    support_ids: Tensor | None = None,
    support_offsets: Tensor | None = None,
    support_is_sorted: bool = False,
    entropy_over_support: bool = False,
) -> tuple[Tensor, ...]:
    """Log-prob of each label, and the entropy of each distribution, under softmax(logits / temperature).

        x = logits / temperature    log π(y) = x_y - log Σ_v exp(x_v)    H = -Σ_v π_v log π_v    Q = Σ_v π_v²

    With a support, log π and Q are those of the distribution that the engine sampled from by top-p, top-k or min-p:
    their sums run over the tokens that it kept at the position ("keep sampling mask", DeepSeek-V3.2, arXiv 2512.02556,
    section 3.1).

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
        support_ids: [n], int64, the kept tokens of all positions, one position after the other: indices into the whole
            vocabulary, equal on all ranks of ``tp_group``, in any order. An id that comes twice in a position counts
            once. Default: every position counts the whole vocabulary.
        support_offsets: [labels + 1], int64: position i, in the order of ``labels.flatten()``, has the ids from
            ``support_offsets[i]`` to ``support_offsets[i + 1]``. Without ids it counts the whole vocabulary.
        support_is_sorted: the ids of each position ascend, none comes twice, and all lie in the vocabulary. Nothing is
            sorted then. Where that is not so, all log-probs are NaN on a GPU; a CPU looks at the ids in any case.
        entropy_over_support: the entropy is over the kept tokens too. Default: over the whole vocabulary, so that a
            bonus on it also reaches the tokens that were not kept.

    Returns:
        (log_probs, entropy), or (log_probs, entropy, Q): each [...], float32 (float64 for float64 logits), equal on all
        ranks of ``tp_group``. A label out of range at a counted position gives a NaN log-prob, which the correction's
        ``check()`` reports. So does a label that is not among the position's kept tokens, and an id out of range there;
        all log-probs are NaN if the offsets do not ascend from 0 to the number of ids. All results are differentiable
        in the logits; every rank must use them alike.

    Memory: forward, one chunk in float32 and the statistics, of which 4 bytes a token and the results are held until
        the backward; backward, one chunk and the gradient. Logits whose leading dimensions are a transposed view of
        contiguous ones are read as they are; of any other view a copy is made. With a support also some numbers for
        each id: on a CPU of a block of about 262,144 ids, on a GPU of all. The support itself is held until the
        backward; for a transposed view a copy of its ids is made.

    Collectives: one MAX of t and one SUM of 3t (4t with Q) numbers over ``tp_group`` in the forward, none in the
    backward, none for a group of size 1. With a support and an entropy over the whole vocabulary: MAX of 2t, SUM of 4t
    (5t with Q).

    Raises:
        ValueError: shapes that do not fit, integer logits, a temperature or chunk size that is not positive, or logits
            whose width cannot be a shard of ``vocab_size`` (full-vocabulary logits for a shard, or the reverse); a
            support of other dtypes, or offsets of another length.
    """
    spec = CallSpec(
        tp_group=tp_group,
        vocab_size=vocab_size,
        temperature=temperature,
        chunk_size=chunk_size,
        entropy=True,
        sum_squares=sum_squares,
        inplace_backward=inplace_backward,
        compile=compile,
        separate_entropy=support_ids is not None and not entropy_over_support,
        support_is_sorted=support_is_sorted,
    )
    return _apply(logits, labels, mask, support_ids, support_offsets, spec)


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
    support_ids: Tensor | None = None,
    support_offsets: Tensor | None = None,
    support_is_sorted: bool = False,
) -> Tensor:
    """The log-probs of :func:`vocab_parallel_log_probs_and_entropy` alone, with less work.

    On a CPU only the kept tokens of a block of positions are read if every counted one has a support.

    Collectives: one MAX of t and one SUM of 2t numbers over ``tp_group`` in the forward.
    """
    spec = CallSpec(
        tp_group=tp_group,
        vocab_size=vocab_size,
        temperature=temperature,
        chunk_size=chunk_size,
        entropy=False,
        sum_squares=False,
        inplace_backward=inplace_backward,
        compile=compile,
        separate_entropy=False,
        support_is_sorted=support_is_sorted,
    )
    (log_probs,) = _apply(logits, labels, mask, support_ids, support_offsets, spec)
    return log_probs


def _apply(
    logits: Tensor, labels: Tensor, mask: Tensor | None, ids: Tensor | None, offsets: Tensor | None, spec: CallSpec
) -> tuple[Tensor, ...]:
    """Check the arguments of the public functions, and run the autograd function."""
    check_tensors({"mask": mask, "support_ids": ids, "support_offsets": offsets}, logits=logits, labels=labels)
    if not logits.is_floating_point():
        raise ValueError(f"logits are {logits.dtype}: expected a float dtype")
    if not logits.dim():
        raise ValueError("logits are a single number: expected the vocabulary in the last dimension")
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} differ before the vocabulary")
    check_call(labels, mask, spec, logits.shape[-1])
    check_support(ids, offsets, labels.numel())
    result: tuple[Tensor, ...] = _VocabSoftmax.apply(  # type: ignore[no-untyped-call]
        logits, labels, mask, ids, offsets, spec
    )
    return result


class _VocabSoftmax(torch.autograd.Function):
    """The autograd function, with closed forms, so that autograd keeps no large tensor but the logits.

    Rows are the logits of one token each, [t, v/tp]. If the logits' leading dimensions are transposed, rows and all
    other values of tokens are taken in the order of the memory, so that the logits need not be copied.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        mask: Tensor | None,
        ids: Tensor | None,
        offsets: Tensor | None,
        spec: CallSpec,
    ) -> tuple[Tensor, ...]:
        """Log-probs and, if the spec asks for them, entropy and Σπ², each like the labels.

        The kept tokens come as ``ids`` and ``offsets``.
        """
        # The leading dimensions, the one with the largest stride first: the order of the rows in memory.
        order = sorted(range(logits.dim() - 1), key=logits.stride, reverse=True)
        rows = as_rows(logits, order)
        label, counted = flat(order, labels, counted_tokens(labels, mask))
        target = Target.locate(label, counted, spec, rows.shape[1])
        support = _support_of_rows(ids, offsets, labels, order, spec, rows.shape[1])

        blocks = []
        for part in _blocks(rows, support, spec):
            support_of_part = None if support is None else support.at([part])
            blocks.append(statistics_of(rows[part], target.at(part), support_of_part, spec))
        statistics = torch.cat([block.values for block in blocks], dim=1)
        scorable = None if support is None else torch.cat([block.scorable for block in blocks])
        target = target.restricted_to(scorable)
        log_normalizers, results = combine(statistics, target, target.logits(rows), spec)

        # Back to the order of the labels' dimensions.
        shape_of_rows = [labels.shape[dim] for dim in order]
        inverse = sorted(range(len(order)), key=order.__getitem__)
        results = tuple(result.view(shape_of_rows).permute(inverse) for result in results)
        entropy = results[1] if spec.entropy else None
        squared_sum = results[2] if spec.sum_squares else None
        ctx.save_for_backward(logits, labels, mask, ids, offsets, scorable, log_normalizers, entropy, squared_sum)
        ctx.spec = spec
        ctx.order = order
        ctx.allow_minus_inf = any(block.allowed_minus_inf for block in blocks)
        ctx.set_materialize_grads(False)  # None, not zeros, for a result that the loss does not use
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients with respect to the logits: see :func:`~megatron_rc.parallel.log_probs.row_gradients`."""
        logits, labels, mask, ids, offsets, scorable, log_normalizers, entropy, squared_sum = ctx.saved_tensors
        spec: CallSpec = ctx.spec
        order: list[int] = ctx.order
        grad_logits = logits.detach() if spec.inplace_backward else torch.empty_like(logits)
        rows = as_rows(logits, order)
        grad_rows = as_rows(grad_logits, order)
        entropy, squared_sum, *flat_grads = flat(order, entropy, squared_sum, *grads)
        label, counted = flat(order, labels, counted_tokens(labels, mask))
        target = Target.locate(label, counted, spec, rows.shape[1]).restricted_to(scorable)
        support = _support_of_rows(ids, offsets, labels, order, spec, rows.shape[1])
        forward_values = ForwardValues(
            label_logits=target.logits(rows),
            log_normalizers=log_normalizers,
            entropy=entropy,
            sum_squares=squared_sum,
        )
        factors = gradient_factors(ResultGradients(*flat_grads), target, forward_values, support, spec)

        for part in _blocks(rows, support, spec):
            support_of_part = None if support is None else support.at([part])
            write_gradient(
                rows[part],
                grad_rows[part],
                factors.at(part),
                support_of_part,
                spec,
                allow_minus_inf=ctx.allow_minus_inf,
            )
        # Of some views no rows can be viewed: reshape made a copy, and the gradient is in it.
        if grad_rows.data_ptr() != grad_logits.data_ptr():
            in_order = grad_logits.permute(*order, -1)
            in_order.copy_(grad_rows.view(in_order.shape))
        return grad_logits, None, None, None, None, None


def _support_of_rows(
    ids: Tensor | None, offsets: Tensor | None, labels: Tensor, order: list[int], spec: CallSpec, width: int
) -> Support | None:
    """The kept tokens of the rows, in the order of the rows in memory; None without a support.

    ``ids`` and ``offsets`` are in the order of ``labels.flatten()``; ``width`` is v/tp. ``order`` has the logits'
    leading dimensions by falling stride.
    """
    support = spec.support(ids, offsets, width)
    is_in_order = order == list(range(len(order)))
    if support is None or is_in_order:
        return support
    # For each row in memory, its index in labels.flatten().
    (positions,) = flat(order, torch.arange(labels.numel(), device=labels.device).view(labels.shape))
    return support.permuted(positions)


def _blocks(rows: Tensor, support: Support | None, spec: CallSpec) -> Iterable[slice]:
    """The slices of rows whose statistics are made together: all rows at once without a support.

    A support is looked up for some rows at a time, while the cache has their logits.
    """
    if support is None:
        return [slice(0, len(rows))]
    return support.blocks(rows, spec.softmax_options(rows.shape[1], allow_minus_inf=False))


def as_rows(logits: Tensor, order: list[int]) -> Tensor:
    """The logits as rows, [t, v/tp], with the leading dimensions in this order: a view if possible."""
    return logits.detach().permute(*order, -1).reshape(-1, logits.shape[-1])


def flat(order: list[int], *values: Any) -> list[Any]:
    """Each tensor flattened to [t], with its dimensions in this order; None stays None."""
    return [None if value is None else value.permute(order).reshape(-1) for value in values]
