"""Divergence of a student from a teacher at each token, from logits that are split over the vocabulary.

The forward reads both policies' logits once, and keeps three numbers a token; the backward reads them once more and
writes the student's gradient. Both work on chunks of tokens, so that only the gradient is as large as the logits.
Hidden states (:mod:`megatron_rc.parallel.linear_divergence`) share all but the outermost functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rc.parallel.arguments import check_number, check_tensors, one_of
from megatron_rc.parallel.collectives import all_reduce_max, all_reduce_sum
from megatron_rc.parallel.groups import Group, group_size
from megatron_rc.parallel.log_probs import CallSpec, check_settings
from megatron_rc.parallel.softmax_pair import (
    PairFactors,
    PairOptions,
    mixture_statistics,
    origin_of,
    pair_statistics,
    write_pair_gradient,
)
from megatron_rc.parallel.support import Support, check_support
from megatron_rc.parallel.vocab import as_rows, flat

DIVERGENCES = ("reverse_kl", "forward_kl", "jsd")
DEFAULT_BETA = 0.5  # of jsd


def vocab_parallel_divergence(
    logits: Tensor,
    teacher_logits: Tensor,
    tp_group: Group | None = None,
    *,
    kind: str = "reverse_kl",
    beta: float | None = None,
    vocab_size: int | None = None,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    teacher_temperature: float | None = None,
    chunk_size: int | None = None,
    inplace_backward: bool = False,
    support_ids: Tensor | None = None,
    support_offsets: Tensor | None = None,
    support_is_sorted: bool = False,
) -> Tensor:
    """Divergence of the student p from the teacher q at each token, in nats, differentiable in the student's logits.

        p = softmax(logits / temperature)    q = softmax(teacher_logits / teacher_temperature)

    - ``reverse_kl``: KL(p ‖ q) = Σ_v p_v log(p_v / q_v), the divergence of on-policy distillation (Gu et al. 2024,
      "MiniLLM"). The student avoids what the teacher would not say.
    - ``forward_kl``: KL(q ‖ p) = Σ_v q_v log(q_v / p_v), the divergence of Hinton et al. 2015, "Distilling the
      Knowledge in a Neural Network", without their factor temperature². The student covers all that the teacher says.
    - ``jsd``: β KL(q ‖ m) + (1 - β) KL(p ‖ m) with m = β q + (1 - β) p, 0 < β < 1: the generalised Jensen-Shannon
      divergence of Agarwal et al. 2024, "On-Policy Distillation of Language Models" (GKD). It is at most
      -β log β - (1 - β) log(1 - β). Divided by β it tends to the forward KL as β tends to 0; divided by 1 - β, to the
      reverse KL as β tends to 1.

    With a support both distributions are over the tokens that the engine kept at the position, and each has the sum 1
    there. So a token that was not kept adds nothing, whatever the teacher says about it.

    Limits: a token to which a policy gives the probability 0, by a logit of -inf or because it is rounded to 0, adds
    the limit of its term. So the reverse KL is infinite if the teacher gives 0 to a token that the student may say, and
    the forward KL if the student gives 0 to a token of the teacher. The gradient of an infinite reverse KL is infinite
    too, and is written as 0; that of the forward KL and of ``jsd`` is finite. Rounding may make a divergence of equal
    policies a little negative.

    Args:
        logits: [..., v/tp], the student's, any float dtype; rank r of ``tp_group`` holds rows r·v/tp to (r+1)·v/tp of
            the vocabulary. Not written to, unless ``inplace_backward``.
        teacher_logits: like ``logits``, any float dtype; not written to, no gradient. They are needed until the
            backward.
        tp_group: the ranks that hold the other vocabulary rows of both.
        kind: see above.
        beta: β of ``jsd``. Default: 0.5.
        vocab_size: rows at and above it are padding and have probability 0. Default: all rows count.
        mask: [...], bool, True if the token counts; results and gradients of other tokens are 0. Default: all count.
        temperature: divides the student's logits; > 0.
        teacher_temperature: divides the teacher's logits; > 0. Default: ``temperature``.
        chunk_size: tokens that are worked on together; changes time and scratch, and results only by rounding.
            Default: a size that suits the device.
        inplace_backward: the backward writes the gradient into the memory of the student's logits, so that nothing else
            may need them, and a second backward is an error.
        support_ids: [n], int64, the kept tokens of all positions; this and the next two arguments are as in
            :func:`~megatron_rc.parallel.vocab.vocab_parallel_log_probs_and_entropy`. Default: every position counts the
            whole vocabulary.
        support_offsets: [tokens + 1], int64, in the order of the flattened leading dimensions.
        support_is_sorted: the caller's word that the ids of each position ascend; nothing depends on it on a CPU.

    Returns:
        [...], float32 (float64 if the logits of one policy are float64), equal on all ranks of ``tp_group``, which must
        all use it alike. NaN where logits of a counted token are NaN; with a support also where an id of the position
        is out of range, and everywhere if the offsets do not ascend from 0 to the number of ids.

    Memory: forward, three chunks of float32 and some numbers for each token; backward, the same and the gradient.
    Logits whose leading dimensions are a transposed view of contiguous ones are read as they are. With a support the
    logits of a chunk's kept tokens are copied. On a GPU these are plain PyTorch operations.

    Collectives: one MAX of 2t and one SUM of 3t numbers over ``tp_group`` in the forward (``jsd``: one MAX of 2t, two
    SUMs of 2t), none in the backward, none for a group of size 1. With a support on a GPU the host waits for the
    device.

    Raises:
        ValueError: logits of different shapes, integer logits, another kind, a β that is out of range or not used, or
            the errors of :func:`~megatron_rc.parallel.vocab.vocab_parallel_log_probs_and_entropy`.
    """
    spec = make_spec(
        tp_group=tp_group,
        kind=kind,
        beta=beta,
        vocab_size=vocab_size,
        temperature=temperature,
        teacher_temperature=teacher_temperature,
        chunk_size=chunk_size,
        inplace_backward=inplace_backward,
        support_is_sorted=support_is_sorted,
    )
    _check(logits, teacher_logits, mask, spec)
    check_tensors({"support_ids": support_ids, "support_offsets": support_offsets})
    tokens = logits[..., 0].numel()
    check_support(support_ids, support_offsets, tokens, of="tokens")
    result: Tensor = _VocabDivergence.apply(  # type: ignore[no-untyped-call]
        logits, teacher_logits.detach(), mask, support_ids, support_offsets, spec
    )
    return result


@dataclass(frozen=True)
class DivergenceSpec:
    """The settings of one call of a divergence of whole vocabularies."""

    call: CallSpec  # the settings that log-probs have too; its temperature is the student's
    kind: str  # one of DIVERGENCES
    beta: float  # β of jsd
    teacher_temperature: float  # divides the teacher's logits

    def options(self, width: int, *, chunk_size: int | None) -> PairOptions:
        """The settings for reading rows of ``width`` local columns, v/tp, with padding."""
        return PairOptions(
            kind=self.kind,
            beta=self.beta,
            columns=self.call.softmax_options(width, allow_minus_inf=False).columns,
            temperature=self.call.temperature,
            teacher_temperature=self.teacher_temperature,
            chunk_size=chunk_size,
            is_alone=group_size(self.call.tp_group) == 1,
        )


def make_spec(
    *,
    tp_group: Group | None,
    kind: str,
    beta: float | None,
    vocab_size: int | None,
    temperature: float,
    teacher_temperature: float | None,
    chunk_size: int | None,
    inplace_backward: bool,
    support_is_sorted: bool,
) -> DivergenceSpec:
    """Return the settings of a call; ValueError for a kind, a β or a teacher's temperature that is wrong."""
    check_kind_of_divergence("kind", kind, "beta", beta)
    if teacher_temperature is None:
        teacher_temperature = temperature
    check_number(
        "teacher_temperature", teacher_temperature, lambda t: 0 < t < torch.inf, "must be positive, and finite"
    )
    call = CallSpec(
        tp_group=tp_group,
        vocab_size=vocab_size,
        temperature=temperature,
        chunk_size=chunk_size,
        entropy=False,
        sum_squares=False,
        inplace_backward=inplace_backward,
        compile=False,
        separate_entropy=False,
        support_is_sorted=support_is_sorted,
    )
    return DivergenceSpec(call, kind, DEFAULT_BETA if beta is None else beta, teacher_temperature)


def check_kind_of_divergence(kind_name: str, kind: object, beta_name: str, beta: object) -> None:
    """Raise ValueError unless ``kind`` is one of :data:`DIVERGENCES`, and ``beta`` is None or fits it.

    ``kind_name`` and ``beta_name`` are the names of the two arguments in the message.
    """
    one_of(kind_name, kind, DIVERGENCES)
    if beta is None:
        return
    if kind != "jsd":
        raise ValueError(f"{beta_name}={beta!r} does nothing with {kind_name}={kind!r}: drop it, or use 'jsd'")
    check_number(
        beta_name, beta, lambda x: 0 < x < 1, "must lie between 0 and 1; for its limits use forward_kl, reverse_kl"
    )


def _check(logits: Tensor, teacher_logits: Tensor, mask: Tensor | None, spec: DivergenceSpec) -> None:
    """Raise ValueError for arguments whose shapes or dtypes do not fit together."""
    check_tensors({"mask": mask}, logits=logits, teacher_logits=teacher_logits)
    for name, value in (("logits", logits), ("teacher_logits", teacher_logits)):
        if not value.is_floating_point():
            raise ValueError(f"{name} are {value.dtype}: expected a float dtype")
    if not logits.dim():
        raise ValueError("logits are a single number: expected the vocabulary in the last dimension")
    if logits.shape != teacher_logits.shape:
        raise ValueError(
            f"teacher_logits {tuple(teacher_logits.shape)} and logits {tuple(logits.shape)} differ: both policies need "
            "one vocabulary, padded and split alike"
        )
    check_mask_of("logits", logits.shape[:-1], mask)
    check_settings(spec.call, logits.shape[-1])


def check_mask_of(like: str, shape: torch.Size, mask: Tensor | None) -> None:
    """Raise ValueError unless the mask is None, or bool of this shape, that of the tokens of the argument ``like``."""
    if mask is not None and (mask.shape != shape or mask.dtype != torch.bool):
        raise ValueError(
            f"mask is {mask.dtype} {tuple(mask.shape)}: expected bool {tuple(shape)}, the tokens of {like}"
        )


@dataclass(frozen=True)
class DivergenceValues:
    """The results of a forward for t tokens, and what the backward needs of it beside the logits."""

    divergence: Tensor  # [t]; 0 for tokens that do not count
    log_normalizers: Tensor  # [2, t], of student and teacher: temperature · log Σ exp(logits / temperature)
    mean: Tensor  # [t], see PairFactors


def merged_values(statistics: Tensor, counted: Tensor, valid: Tensor, spec: DivergenceSpec) -> DivergenceValues:
    """Merge the statistics of all ranks; for jsd without the divergence, which needs another pass.

    Args:
        statistics: this rank's, [4 to 6, t], of :func:`~megatron_rc.parallel.softmax_pair.pair_statistics`.
        counted: [t] bool.
        valid: [t] bool, False where the kept tokens are wrong: the divergence is NaN.
        spec: the settings of the call.

    Collectives: one MAX of 2t, one SUM of 2t or 3t over ``tp_group``.
    """
    maxima = all_reduce_max(statistics[:2], spec.call.tp_group)
    of_student, of_teacher = origin_of(statistics[:2]) - origin_of(maxima)
    # x' becomes x' + shift, so that exp(x') gets the factor exp(shift).
    shift = torch.stack([of_student / spec.call.temperature, of_teacher / spec.teacher_temperature])
    # A rank whose columns are all padding or -inf adds nothing; neither does one whose logits are too small.
    factor = torch.where(statistics[:2] == -torch.inf, 0, shift.exp())
    sums = [statistics[2:4] * factor]
    if spec.kind != "jsd":
        first = 0 if spec.kind == "reverse_kl" else 1
        # Of x' - y', or of y' - x'.
        shift_of_difference = shift[first] - shift[1 - first]
        weighted_sum = statistics[4] + shift_of_difference * statistics[2 + first]
        sums.append(torch.where(factor[first] == 0, 0, weighted_sum * factor[first]).unsqueeze(0))
    totals = all_reduce_sum(torch.cat(sums), spec.call.tp_group)

    # These are few numbers: in float64 the divergence is as exact as the sums.
    log_totals = totals[:2].double().log()
    scaled = torch.stack([log_totals[0] * spec.call.temperature, log_totals[1] * spec.teacher_temperature])
    log_normalizers = (maxima + scaled).to(statistics.dtype)
    if spec.kind == "jsd":
        divergence = torch.zeros_like(log_normalizers[0])
    else:
        mean_difference = totals[2].double() / totals[first]
        divergence = (mean_difference - log_totals[first] + log_totals[1 - first]).to(statistics.dtype)
    divergence = torch.where(valid, divergence, torch.nan)
    divergence = torch.where(counted, divergence, 0)
    return DivergenceValues(divergence, log_normalizers, mean=divergence)


def mixed_values(
    values: DivergenceValues, statistics: Tensor, counted: Tensor, spec: DivergenceSpec
) -> DivergenceValues:
    """Add the divergence of jsd to the values, from this rank's :func:`mixture_statistics`, [2, t].

    Collectives: one SUM of 2t over ``tp_group``.
    """
    of_teacher, of_student = all_reduce_sum(statistics, spec.call.tp_group)
    divergence = spec.beta * of_teacher + (1 - spec.beta) * of_student
    # Where ids are wrong, it is NaN already.
    divergence = values.divergence + torch.where(counted, divergence, 0)
    return DivergenceValues(divergence, values.log_normalizers, mean=of_student)


def pair_factors(
    grad: Tensor, values: DivergenceValues, counted: Tensor, valid: Tensor, spec: DivergenceSpec
) -> PairFactors:
    """The factors of the gradient at all rows of logits, from that of the divergence, [t]."""
    has_gradient = counted & valid
    if spec.kind == "reverse_kl":
        has_gradient = has_gradient & (values.divergence != torch.inf)
    grad = torch.where(has_gradient, grad.to(values.mean.dtype), 0) / spec.call.temperature
    return PairFactors(values.log_normalizers, values.mean, grad, has_gradient)


def valid_positions(support: Support | None, counted: Tensor) -> Tensor:
    """Whether the kept tokens of each row can be used, [t] bool: the offsets are right, and all ids in the vocabulary.

    ``counted`` is [t].
    """
    if support is None:
        return torch.ones_like(counted)
    is_out_of_range = (support.ids < 0) | (support.ids >= support.vocab_size)
    num_out_of_range = torch.zeros_like(support.counts)
    num_out_of_range.index_add_(0, support.row_of_entries(), is_out_of_range.to(num_out_of_range.dtype))
    return (num_out_of_range == 0) & support.valid


class _VocabDivergence(torch.autograd.Function):
    """The autograd function, with closed forms, so that autograd keeps no large tensor but the logits.

    Rows are the logits of one token each, [t, v/tp], in the order of the student's memory: see
    :class:`megatron_rc.parallel.vocab._VocabSoftmax`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        teacher_logits: Tensor,
        mask: Tensor | None,
        ids: Tensor | None,
        offsets: Tensor | None,
        spec: DivergenceSpec,
    ) -> Tensor:
        """The divergence, of the shape of the tokens."""
        order = sorted(range(logits.dim() - 1), key=logits.stride, reverse=True)
        rows = _Rows(logits, teacher_logits, mask, ids, offsets, order, spec)
        options = spec.options(logits.shape[-1], chunk_size=spec.call.chunk_size)
        statistics, careful = pair_statistics(rows.student, rows.teacher, rows.counted, rows.support, options)
        values = merged_values(statistics, rows.counted, rows.valid, spec)
        if spec.kind == "jsd":
            mixture = statistics[4:]
            if not options.is_alone:
                mixture = mixture_statistics(
                    rows.student, rows.teacher, values.log_normalizers, rows.counted, rows.support, options
                )
            values = mixed_values(values, mixture, rows.counted, spec)

        ctx.save_for_backward(
            logits, teacher_logits, mask, ids, offsets, values.divergence, values.log_normalizers, values.mean
        )
        ctx.spec = spec
        ctx.order = order
        ctx.careful = careful
        # Back to the order of the logits' dimensions.
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return values.divergence.view([logits.shape[dim] for dim in order]).permute(inverse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient with respect to the student's logits."""
        logits, teacher_logits, mask, ids, offsets, *values_of_rows = ctx.saved_tensors
        spec: DivergenceSpec = ctx.spec
        order: list[int] = ctx.order
        values = DivergenceValues(*values_of_rows)
        rows = _Rows(logits, teacher_logits, mask, ids, offsets, order, spec)
        (grad,) = flat(order, grads[0])
        factors = pair_factors(grad, values, rows.counted, rows.valid, spec)

        grad_logits = logits.detach() if spec.call.inplace_backward else torch.empty_like(logits)
        grad_rows = as_rows(grad_logits, order)
        write_pair_gradient(
            rows.student,
            rows.teacher,
            grad_rows,
            factors,
            rows.support,
            spec.options(logits.shape[-1], chunk_size=spec.call.chunk_size),
            careful=ctx.careful,
        )
        # Of some views no rows can be viewed: reshape made a copy, and the gradient is in it.
        if grad_rows.data_ptr() != grad_logits.data_ptr():
            in_order = grad_logits.permute(*order, -1)
            in_order.copy_(grad_rows.view(in_order.shape))
        return grad_logits, None, None, None, None, None


class _Rows:
    """The arguments of a call as rows, [t, ...], whose leading dimensions are in the order of ``order``."""

    def __init__(
        self,
        logits: Tensor,
        teacher_logits: Tensor,
        mask: Tensor | None,
        ids: Tensor | None,
        offsets: Tensor | None,
        order: list[int],
        spec: DivergenceSpec,
    ) -> None:
        self.student = as_rows(logits, order)
        self.teacher = as_rows(teacher_logits, order)
        shape = logits.shape[:-1]
        if mask is None:
            mask = torch.ones(shape, dtype=torch.bool, device=logits.device)
        (self.counted,) = flat(order, mask)
        support = spec.call.support(ids, offsets, logits.shape[-1])
        if support is not None and order != sorted(order):
            positions = torch.arange(mask.numel(), device=logits.device).view(shape)
            support = support.permuted(*flat(order, positions))
        self.support = support
        self.valid = valid_positions(support, self.counted)
