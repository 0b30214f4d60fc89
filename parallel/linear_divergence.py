"""Divergence of a student from a teacher at each token, from hidden states and output layers, without logits.

The forward multiplies both policies' hidden states of a chunk of tokens, keeps the statistics and drops the logits. The
backward multiplies again, and overwrites each chunk of the student's logits with its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rc.parallel.arguments import check_tensors
from megatron_rc.parallel.divergence import (
    DivergenceSpec,
    DivergenceValues,
    check_mask_of,
    make_spec,
    merged_values,
    mixed_values,
    pair_factors,
    valid_positions,
)
from megatron_rc.parallel.groups import Group, group_size
from megatron_rc.parallel.linear import LinearOptions, WeightGradient, chunk_logits, no_autocast
from megatron_rc.parallel.log_probs import check_settings
from megatron_rc.parallel.softmax_pair import (
    PairFactors,
    mixture_statistics,
    pair_arithmetic,
    pair_statistics,
    write_pair_gradient,
)
from megatron_rc.parallel.support import Support, check_support


def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    tp_group: Group | None = None,
    *,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    sequence_parallel: bool = False,
    gradient_accumulation: bool = False,
    kind: str = "reverse_kl",
    beta: float | None = None,
    vocab_size: int | None = None,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    teacher_temperature: float | None = None,
    chunk_size: int | None = None,
    support_ids: Tensor | None = None,
    support_offsets: Tensor | None = None,
    support_is_sorted: bool = False,
) -> Tensor:
    """Divergence of the student from the teacher at each token; no logits are stored.

    Each policy is softmax((hidden @ weightᵀ + bias) / temperature) of its own tensors. The kinds, their formulas and
    limits are those of :func:`~megatron_rc.parallel.divergence.vocab_parallel_divergence`.

    Args:
        hidden: [..., h], the student's, any float dtype, equal on all ranks of ``tp_group``; with ``sequence_parallel``
            [s/tp, ..., h], this rank's slice of the first dimension.
        weight: [v/tp, h] of the same dtype: this rank's rows of the student's output layer.
        teacher_hidden: [..., h_T], the teacher's, of any size and float dtype, for the same tokens, sliced as
            ``hidden``; no gradient.
        teacher_weight: [v/tp, h_T] of the dtype of ``teacher_hidden``: the same rows of the teacher's output layer; no
            gradient.
        tp_group: the ranks that hold the other vocabulary rows of both.
        bias: [v/tp], the student's.
        teacher_bias: [v/tp], the teacher's.
        sequence_parallel: both hidden states are sliced over ``tp_group``, as Megatron's sequence parallelism does.
        gradient_accumulation: add the student's weight's gradient to ``weight.main_grad``, as in
            :func:`~megatron_rc.parallel.linear.linear_log_probs_and_entropy`.
        kind: ``reverse_kl``, ``forward_kl`` or ``jsd``.
        beta: β of ``jsd``. Default: 0.5.
        vocab_size: rows at and above it are padding and have probability 0. Default: all rows count.
        mask: [...], bool, with ``sequence_parallel`` [s, ...] of all slices; True if the token counts. Default: all.
        temperature: divides the student's logits; > 0.
        teacher_temperature: divides the teacher's logits; > 0. Default: ``temperature``.
        chunk_size: tokens that are multiplied together (over all ranks of ``tp_group`` with ``sequence_parallel``).
            Default: 256 on a CPU, 2048 on a GPU.
        support_ids: [n], int64, the kept tokens of all positions, with ``sequence_parallel`` of all slices; this and
            the next two arguments are as in :func:`~megatron_rc.parallel.divergence.vocab_parallel_divergence`.
        support_offsets: [tokens + 1], int64. On a GPU they are read on the host once in each pass.
        support_is_sorted: the caller's word that the ids of each position ascend.

    Returns:
        [...], with ``sequence_parallel`` [s, ...]; float32 (float64 if one policy is). Differentiable in hidden, weight
        and bias; hidden's gradient is complete (summed over ``tp_group``).

    ``torch.autocast`` has no effect here: the arithmetic follows the dtypes of the arguments.

    Memory: one chunk of logits of both policies and its scratch; in the backward also the gradients of hidden and
    weight.

    Collectives: forward, those of :func:`~megatron_rc.parallel.divergence.vocab_parallel_divergence`. Backward: one SUM
    of hidden's size over ``tp_group``. With ``sequence_parallel`` also a gather of each policy's chunk in each pass
    (``jsd`` on several ranks: twice in the forward), and instead of the SUM one reduce-scatter of each chunk.

    Raises:
        ValueError: shapes or dtypes that do not fit together, and the errors of
            :func:`~megatron_rc.parallel.divergence.vocab_parallel_divergence`.
    """
    spec = make_spec(
        tp_group=tp_group,
        kind=kind,
        beta=beta,
        vocab_size=vocab_size,
        temperature=temperature,
        teacher_temperature=teacher_temperature,
        chunk_size=chunk_size,
        inplace_backward=False,
        support_is_sorted=support_is_sorted,
    )
    options = LinearOptions(spec.call, sequence_parallel=sequence_parallel, gradient_accumulation=gradient_accumulation)
    tokens_shape = check_output_layer("", hidden, weight, bias, options)
    teacher_options = replace(options, gradient_accumulation=False)
    teacher_tokens_shape = check_output_layer("teacher_", teacher_hidden, teacher_weight, teacher_bias, teacher_options)
    if teacher_tokens_shape != tokens_shape:
        raise ValueError(
            f"teacher_hidden {tuple(teacher_hidden.shape)} and hidden {tuple(hidden.shape)} differ before the last "
            "dimension: expected the same tokens"
        )
    if weight.shape[0] != teacher_weight.shape[0]:
        raise ValueError(
            f"teacher_weight has {teacher_weight.shape[0]} rows and weight {weight.shape[0]}: both policies need one "
            "vocabulary, padded and split alike"
        )
    check_tensors({"mask": mask, "support_ids": support_ids, "support_offsets": support_offsets})
    check_mask_of("hidden", tokens_shape, mask)
    check_support(support_ids, support_offsets, tokens_shape.numel(), of="tokens")
    check_settings(spec.call, weight.shape[0])
    if mask is None:
        mask = torch.ones(tokens_shape, dtype=torch.bool, device=hidden.device)

    teacher = _OutputLayer(
        hidden=teacher_hidden.detach(),
        weight=teacher_weight.detach(),
        bias=None if teacher_bias is None else teacher_bias.detach(),
    )
    with no_autocast(hidden.device):
        result: Tensor = _LinearDivergence.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, teacher, mask, support_ids, support_offsets, spec, options
        )
    return result


@dataclass(frozen=True)
class _OutputLayer:
    """The hidden states of one policy on this rank, and its output layer."""

    hidden: Tensor  # [..., h]
    weight: Tensor  # [v/tp, h]
    bias: Tensor | None  # [v/tp]

    @property
    def rows(self) -> Tensor:
        """The hidden states as rows, [local tokens, h]."""
        return self.hidden.detach().reshape(-1, self.hidden.shape[-1])

    def logits(self, part: slice, options: LinearOptions) -> Tensor:
        """The logits of a chunk, [tokens of the chunk on all ranks, v/tp]; ``part`` is its slice of the rows."""
        return chunk_logits(options.gather(self.rows[part]), self.weight, self.bias)


def check_output_layer(
    prefix: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, options: LinearOptions
) -> torch.Size:
    """Return the shape of the tokens, of all slices; ValueError for an output layer whose parts do not fit together.

    ``prefix`` stands before the names of the arguments in messages.
    """
    check_tensors({f"{prefix}bias": bias}, **{f"{prefix}hidden": hidden, f"{prefix}weight": weight})
    if not hidden.is_floating_point() or hidden.dtype != weight.dtype:
        raise ValueError(
            f"{prefix}hidden is {hidden.dtype} and {prefix}weight {weight.dtype}: expected one float dtype"
        )
    if weight.dim() != 2 or not hidden.dim() or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{prefix}hidden {tuple(hidden.shape)} and {prefix}weight {tuple(weight.shape)} cannot be multiplied"
        )
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != weight.dtype):
        raise ValueError(f"{prefix}bias is {bias.dtype} {tuple(bias.shape)}: expected one number a row of the weight")

    tokens = list(hidden.shape[:-1])
    if options.sequence_parallel:
        if not tokens:
            raise ValueError("sequence_parallel needs hidden states with a sequence dimension in front")
        tokens[0] *= options.ranks
    if options.gradient_accumulation and not hasattr(weight, "main_grad"):
        raise ValueError("gradient_accumulation needs weight.main_grad, which Megatron's DDP makes")
    return torch.Size(tokens)


@dataclass(frozen=True)
class _Chunk:
    """Some tokens, with the logits of both policies."""

    part: slice  # of the local rows
    positions: slice | Tensor  # among all tokens
    logits: Tensor  # [tokens of the chunk, v/tp]
    teacher_logits: Tensor  # [tokens of the chunk, v/tp]
    support: Support | None


def _chunks(
    student: _OutputLayer, teacher: _OutputLayer, support: Support | None, options: LinearOptions
) -> Iterator[_Chunk]:
    """Multiply the hidden states chunk by chunk. Collectives: with sequence parallelism two gathers for each."""
    rows = student.rows
    for part in options.chunks(rows):
        yield _Chunk(
            part=part,
            positions=options.positions(part, rows),
            logits=student.logits(part, options),
            teacher_logits=teacher.logits(part, options),
            support=None if support is None else support.at(options.slices(part, rows)),
        )


class _LinearDivergence(torch.autograd.Function):
    """The autograd function: forward and backward one chunk of tokens at a time, without keeping logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher: _OutputLayer,
        mask: Tensor,
        ids: Tensor | None,
        offsets: Tensor | None,
        spec: DivergenceSpec,
        options: LinearOptions,
    ) -> Tensor:
        """The divergence, like the mask. Autograd keeps the arguments and a few numbers for each token."""
        student = _OutputLayer(hidden.detach(), weight.detach(), None if bias is None else bias.detach())
        support = spec.call.support(ids, offsets, weight.shape[0])
        counted = mask.reshape(-1)
        valid = valid_positions(support, counted)
        pair_options = spec.options(weight.shape[0], chunk_size=None)

        dtype = pair_arithmetic(hidden, teacher.hidden)
        statistics = hidden.new_empty(pair_options.num_statistics, mask.numel(), dtype=dtype)
        careful = False
        for chunk in _chunks(student, teacher, support, options):
            statistics[:, chunk.positions], chunk_was_careful = pair_statistics(
                chunk.logits, chunk.teacher_logits, counted[chunk.positions], chunk.support, pair_options
            )
            careful |= chunk_was_careful
            del chunk  # before the next chunk's logits are made
        values = merged_values(statistics, counted, valid, spec)

        if spec.kind == "jsd" and pair_options.is_alone:
            values = mixed_values(values, statistics[4:], counted, spec)
        elif spec.kind == "jsd":
            mixture = statistics.new_empty(2, mask.numel())
            for chunk in _chunks(student, teacher, support, options):
                mixture[:, chunk.positions] = mixture_statistics(
                    chunk.logits,
                    chunk.teacher_logits,
                    values.log_normalizers[:, chunk.positions],
                    counted[chunk.positions],
                    chunk.support,
                    pair_options,
                )
                del chunk
            values = mixed_values(values, mixture, counted, spec)

        ctx.save_for_backward(
            hidden,
            weight,
            bias,
            teacher.hidden,
            teacher.weight,
            teacher.bias,
            mask,
            ids,
            offsets,
            values.divergence,
            values.log_normalizers,
            values.mean,
        )
        ctx.spec = spec
        ctx.options = options
        ctx.careful = careful
        return values.divergence.view(mask.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients with respect to hidden, weight and bias."""
        with no_autocast(grads[0].device):
            return _gradients(ctx, grads[0])


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of the forward's arguments from ``grad``, that of the divergence; None for most.

    The logits of each chunk are computed again, and the student's are overwritten by their gradient.
    """
    hidden, weight, bias, *teacher_tensors, mask, ids, offsets, divergence, log_normalizers, mean = ctx.saved_tensors
    spec: DivergenceSpec = ctx.spec
    options: LinearOptions = ctx.options
    student = _OutputLayer(hidden.detach(), weight.detach(), None if bias is None else bias.detach())
    teacher = _OutputLayer(*teacher_tensors)
    support = spec.call.support(ids, offsets, weight.shape[0])
    counted = mask.reshape(-1)
    values = DivergenceValues(divergence, log_normalizers, mean)
    factors = pair_factors(grad.reshape(-1), values, counted, valid_positions(support, counted), spec)

    weight_gradient = WeightGradient(weight, bias, ctx.needs_input_grad, options.gradient_accumulation)
    rows = student.rows
    grad_hidden = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
    for part in options.chunks(rows):
        gathered_rows = options.gather(rows[part])
        logits = chunk_logits(gathered_rows, student.weight, student.bias)
        teacher_logits = teacher.logits(part, options)
        positions = options.positions(part, rows)
        chunk_support = None if support is None else support.at(options.slices(part, rows))
        chunk_factors = PairFactors(
            log_normalizers=factors.log_normalizers[:, positions],
            mean=factors.mean[positions],
            grad=factors.grad[positions],
            counted=factors.counted[positions],
        )
        # The gradient is written over the logits: no third tensor of their size.
        write_pair_gradient(
            logits,
            teacher_logits,
            logits,
            chunk_factors,
            chunk_support,
            spec.options(weight.shape[0], chunk_size=None),
            careful=ctx.careful,
        )
        grad_logits = logits
        del teacher_logits
        weight_gradient.add(grad_logits, gathered_rows)
        if grad_hidden is not None:
            grad_hidden[part] = options.scatter(grad_logits @ student.weight)
        del logits, grad_logits  # before the next chunk's are made

    if grad_hidden is not None:
        # Each rank's product is over its own vocabulary rows; scatter has already summed slices.
        if not options.sliced and group_size(spec.call.tp_group) > 1:
            dist.all_reduce(grad_hidden, group=spec.call.tp_group)
        grad_hidden = grad_hidden.view(hidden.shape)
    grad_weight, grad_bias = weight_gradient.results()
    return grad_hidden, grad_weight, grad_bias, None, None, None, None, None, None
