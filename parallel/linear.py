"""Log-probs and entropy from hidden states and the output layer's weight, without the logits.

The logits are about 100 times as large as the hidden states. So the forward multiplies a chunk of tokens, keeps its
statistics and drops its logits. The backward multiplies again and overwrites each chunk of logits with its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rc.parallel.arguments import check_tensors
from megatron_rc.parallel.groups import Group, group_size
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
from megatron_rc.parallel.softmax import arithmetic
from megatron_rc.parallel.support import check_support

# Tokens of a chunk: enough for an efficient matrix product, and on a GPU for few additions to the weight's gradient.
CHUNK_TOKENS = 256
GPU_CHUNK_TOKENS = 2048


def linear_log_probs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    tp_group: Group | None = None,
    *,
    bias: Tensor | None = None,
    sequence_parallel: bool = False,
    gradient_accumulation: bool = False,
    vocab_size: int | None = None,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    sum_squares: bool = False,
    compile: bool = False,
    support_ids: Tensor | None = None,
    support_offsets: Tensor | None = None,
    support_is_sorted: bool = False,
    entropy_over_support: bool = False,
) -> tuple[Tensor, ...]:
    """Log-prob of each label, and the entropy, under softmax((hidden @ weightᵀ + bias) / temperature).

    Args:
        hidden: [..., h], any float dtype, equal on all ranks of ``tp_group``; with ``sequence_parallel``
            [s/tp, ..., h], this rank's slice of the first dimension.
        weight: [v/tp, h] of the same dtype: this rank's rows of the output layer (or of the embedding it is tied to).
        labels: [...], int64, indices into the whole vocabulary; with ``sequence_parallel`` [s, ...], of all slices.
        tp_group: the ranks that hold the other vocabulary rows.
        bias: [v/tp].
        sequence_parallel: the hidden states are sliced over ``tp_group``, as Megatron's sequence parallelism does.
        gradient_accumulation: add the weight's gradient to ``weight.main_grad``, as Megatron's fused accumulation does,
            and set ``weight.grad_added_to_main_grad``; autograd gets zeros, which Megatron's hook expects.
        vocab_size: rows at and above it are padding; as in
            :func:`~megatron_rc.parallel.vocab.vocab_parallel_log_probs_and_entropy`. Default: all rows count.
        mask: bool, like ``labels``, True if the token counts. Default: False for the label -100.
        temperature: divides the logits; > 0.
        chunk_size: tokens that are multiplied together (over all ranks of ``tp_group`` with ``sequence_parallel``).
            Default: 256 on a CPU, 2048 on a GPU.
        sum_squares: return Σπ² too.
        compile: run the softmax of chunks through ``torch.compile``.
        support_ids: [n], int64, the tokens that the engine kept at each position, in the order of ``labels.flatten()``;
            with ``sequence_parallel`` of all slices. This and the next three arguments are as in
            :func:`~megatron_rc.parallel.vocab.vocab_parallel_log_probs_and_entropy`. Default: the whole vocabulary.
        support_offsets: [labels + 1], int64. On a GPU they are read on the host once in each pass.
        support_is_sorted: the ids of each position ascend, none comes twice, and all lie in the vocabulary.
        entropy_over_support: the entropy is over the kept tokens too. Default: over the whole vocabulary.

    Returns:
        (log_probs, entropy), or (log_probs, entropy, Σπ²), each like ``labels``, float32 (float64 for float64).
        Differentiable in hidden, weight and bias; hidden's gradient is complete (summed over ``tp_group``).

    ``torch.autocast`` has no effect here: the arithmetic follows the dtypes of the arguments.

    Memory: forward, one chunk of logits and its scratch; backward, the same and the gradients of hidden and weight
    (accumulated in float32 if the weight is below float32). With a support also some numbers for each id of a chunk.

    Collectives: forward, one MAX and one SUM as for logits. Backward: one SUM of hidden's size over ``tp_group``. With
    ``sequence_parallel`` instead one gather of each chunk in each pass and one reduce-scatter of it in the backward.

    Raises:
        ValueError: shapes or dtypes that do not fit together, and the errors of
            :func:`~megatron_rc.parallel.vocab.vocab_parallel_log_probs_and_entropy`.
    """
    spec = CallSpec(
        tp_group=tp_group,
        vocab_size=vocab_size,
        temperature=temperature,
        chunk_size=chunk_size,
        entropy=True,
        sum_squares=sum_squares,
        inplace_backward=False,
        compile=compile,
        separate_entropy=support_ids is not None and not entropy_over_support,
        support_is_sorted=support_is_sorted,
    )
    options = LinearOptions(spec, sequence_parallel, gradient_accumulation)
    _check(hidden, weight, bias, labels, mask, options)
    check_tensors({"support_ids": support_ids, "support_offsets": support_offsets})
    check_support(support_ids, support_offsets, labels.numel())
    with no_autocast(hidden.device):
        result: tuple[Tensor, ...] = _LinearSoftmax.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, labels, mask, support_ids, support_offsets, options
        )
    return result


def _check(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, mask: Tensor | None, options: LinearOptions
) -> None:
    """Raise ValueError for arguments whose shapes or dtypes do not fit together."""
    check_tensors({"bias": bias, "mask": mask}, hidden=hidden, weight=weight, labels=labels)
    if not hidden.is_floating_point() or hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype} and weight {weight.dtype}: expected one float dtype")
    if weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} cannot be multiplied")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != weight.dtype):
        raise ValueError(f"bias is {bias.dtype} {tuple(bias.shape)}: expected one number a row of the weight")

    labels_shape = list(hidden.shape[:-1])
    explanation = ""
    if options.sequence_parallel:
        if not labels_shape:
            raise ValueError("sequence_parallel needs hidden states with a sequence dimension in front")
        labels_shape[0] *= options.ranks
        explanation = " (all slices of the sequence)"
    if tuple(labels_shape) != tuple(labels.shape):
        raise ValueError(
            f"labels {tuple(labels.shape)} do not fit hidden {tuple(hidden.shape)}: expected {tuple(labels_shape)}"
            f"{explanation}"
        )

    if options.gradient_accumulation and not hasattr(weight, "main_grad"):
        raise ValueError("gradient_accumulation needs weight.main_grad, which Megatron's DDP makes")
    check_call(labels, mask, options.spec, weight.shape[0])


@dataclass(frozen=True)
class LinearOptions:
    """The settings of one call of :func:`linear_log_probs_and_entropy`, and its chunks of tokens.

    "Local rows" are this rank's hidden states, [rows, h]: of all tokens, or with sequence parallelism of its slice. In
    the second case a chunk has the same local rows of every rank's slice, so that its tokens are no neighbours.
    """

    spec: CallSpec
    sequence_parallel: bool
    gradient_accumulation: bool

    @property
    def sliced(self) -> bool:
        """Return whether other ranks hold the hidden states of other tokens, which must be gathered."""
        return self.sequence_parallel and group_size(self.spec.tp_group) > 1

    @property
    def ranks(self) -> int:
        """Number of ranks that the hidden states are spread over."""
        return group_size(self.spec.tp_group) if self.sliced else 1

    def chunks(self, rows: Tensor) -> Iterator[slice]:
        """Yield the slice of the local rows that each chunk takes."""
        default_size = GPU_CHUNK_TOKENS if rows.is_cuda else CHUNK_TOKENS
        rows_per_rank = max(1, (self.spec.chunk_size or default_size) // self.ranks)
        for start in range(0, len(rows), rows_per_rank):
            yield slice(start, min(start + rows_per_rank, len(rows)))

    def slices(self, part: slice, rows: Tensor) -> list[slice]:
        """The tokens of a chunk as slices of all tokens, one slice for each rank; ``part`` is its slice of ``rows``."""
        first_tokens = range(0, self.ranks * len(rows), len(rows))  # of each rank's slice of the sequence
        return [slice(first + part.start, first + part.stop) for first in first_tokens]

    def positions(self, part: slice, rows: Tensor) -> slice | Tensor:
        """The tokens of a chunk as an index into all tokens, in the order of :meth:`gather`."""
        if not self.sliced:
            return part
        slices = self.slices(part, rows)
        return torch.cat([torch.arange(tokens.start, tokens.stop, device=rows.device) for tokens in slices])

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, one rank after the other. Collectives: one all-gather if the ranks hold slices."""
        if not self.sliced:
            return rows
        gathered = rows.new_empty(self.ranks * len(rows), rows.shape[1])
        dist.all_gather_into_tensor(gathered, rows.contiguous(), group=self.spec.tp_group)
        return gathered

    def scatter(self, rows: Tensor) -> Tensor:
        """This rank's rows of the sum of all ranks' ``rows``, which are as :meth:`gather` returns them.

        Collectives: one reduce-scatter if the ranks hold slices; otherwise nothing is summed.
        """
        if not self.sliced:
            return rows
        local_rows = rows.new_empty(len(rows) // self.ranks, rows.shape[1])
        dist.reduce_scatter_tensor(local_rows, rows, group=self.spec.tp_group)
        return local_rows


def no_autocast(device: torch.device) -> torch.autocast:
    """A context without autocast: matrix products in the dtype of their arguments, float32 included."""
    return torch.autocast(device.type, enabled=False)


def chunk_logits(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The logits of a chunk of hidden states: [rows, v/tp]."""
    return rows @ weight.t() if bias is None else torch.addmm(bias, rows, weight.t())


class _LinearSoftmax(torch.autograd.Function):
    """The autograd function: forward and backward one chunk of tokens at a time, without keeping logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        mask: Tensor | None,
        ids: Tensor | None,
        offsets: Tensor | None,
        options: LinearOptions,
    ) -> tuple[Tensor, ...]:
        """Log-probs, entropy and, if asked for, Σπ², each like the labels.

        The kept tokens come as ``ids`` and ``offsets``. Autograd keeps the arguments and a few numbers for each token.
        """
        spec = options.spec
        rows = hidden.detach().reshape(-1, hidden.shape[-1])
        counted = counted_tokens(labels, mask).reshape(-1)
        target = Target.locate(labels.reshape(-1), counted, spec, weight.shape[0])
        support = spec.support(ids, offsets, weight.shape[0])

        # Each chunk's numbers are written to the places of its tokens.
        statistics = rows.new_empty(spec.num_statistics, labels.numel(), dtype=arithmetic(rows.dtype))
        label_logits = statistics.new_empty(labels.numel())
        scorable = None if support is None else torch.empty_like(counted)
        allow_minus_inf = False
        for part in options.chunks(rows):
            logits = chunk_logits(options.gather(rows[part]), weight, bias)
            positions = options.positions(part, rows)
            chunk_target = target.at(positions)
            chunk_support = None if support is None else support.at(options.slices(part, rows))
            chunk_statistics = statistics_of(logits, chunk_target, chunk_support, spec.without_chunk_size())
            statistics[:, positions] = chunk_statistics.values
            label_logits[positions] = chunk_target.logits(logits).to(label_logits.dtype)
            if scorable is not None:
                scorable[positions] = chunk_statistics.scorable
            allow_minus_inf |= chunk_statistics.allowed_minus_inf
            del logits  # before the next chunk's are made

        target = target.restricted_to(scorable)
        log_normalizers, results = combine(statistics, target, label_logits, spec)
        results = tuple(value.view(labels.shape) for value in results)
        entropy = results[1]
        squared_sum = results[2] if spec.sum_squares else None
        ctx.save_for_backward(
            hidden,
            weight,
            bias,
            labels,
            mask,
            ids,
            offsets,
            scorable,
            log_normalizers,
            label_logits,
            entropy,
            squared_sum,
        )
        ctx.options = options
        ctx.allow_minus_inf = allow_minus_inf
        ctx.device = hidden.device
        ctx.set_materialize_grads(False)  # None, not zeros, for a result that the loss does not use
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients with respect to hidden, weight and bias."""
        with no_autocast(ctx.device):
            return _gradients(ctx, grads)


def _gradients(ctx: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Gradients of the forward's arguments from ``grads``, those of its results; None for most.

    The logits of each chunk are computed again, and overwritten by their gradient.
    """
    hidden, weight, bias, labels, mask, ids, offsets, scorable, log_normalizers, label_logits, entropy, squared_sum = (
        ctx.saved_tensors
    )
    options: LinearOptions = ctx.options
    spec = options.spec.without_chunk_size()
    rows = hidden.detach().reshape(-1, hidden.shape[-1])
    counted = counted_tokens(labels, mask).reshape(-1)
    target = Target.locate(labels.reshape(-1), counted, spec, weight.shape[0]).restricted_to(scorable)
    support = spec.support(ids, offsets, weight.shape[0])
    entropy, squared_sum, *flat_grads = (
        None if value is None else value.reshape(-1) for value in (entropy, squared_sum, *grads)
    )
    forward_values = ForwardValues(
        label_logits=label_logits,
        log_normalizers=log_normalizers,
        entropy=entropy,
        sum_squares=squared_sum,
    )
    factors = gradient_factors(ResultGradients(*flat_grads), target, forward_values, support, spec)

    weight_gradient = WeightGradient(weight, bias, ctx.needs_input_grad, options.gradient_accumulation)
    grad_hidden = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
    for part in options.chunks(rows):
        gathered_rows = options.gather(rows[part])
        logits = chunk_logits(gathered_rows, weight, bias)
        chunk_factors = factors.at(options.positions(part, rows))
        chunk_support = None if support is None else support.at(options.slices(part, rows))
        # The gradient is written over the logits: no second tensor of their size.
        write_gradient(logits, logits, chunk_factors, chunk_support, spec, allow_minus_inf=ctx.allow_minus_inf)
        grad_logits = logits
        weight_gradient.add(grad_logits, gathered_rows)
        if grad_hidden is not None:
            grad_hidden[part] = options.scatter(grad_logits @ weight)
        del logits, grad_logits  # before the next chunk's are made

    if grad_hidden is not None:
        # Each rank's product is over its own vocabulary rows; scatter has already summed slices.
        if not options.sliced and group_size(options.spec.tp_group) > 1:
            dist.all_reduce(grad_hidden, group=options.spec.tp_group)
        grad_hidden = grad_hidden.view(hidden.shape)
    grad_weight, grad_bias = weight_gradient.results()
    return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


class WeightGradient:
    """The gradients of weight and bias, accumulated over chunks in at least float32.

    Args:
        weight: [v/tp, h].
        bias: [v/tp], or None.
        needed: whether each argument of the forward needs a gradient: hidden, weight, bias, ...
        gradient_accumulation: add the weight's gradient to ``weight.main_grad``, in the dtype that this has.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, needed: tuple[bool, ...], gradient_accumulation: bool
    ) -> None:
        self._weight = weight
        self._accumulates = gradient_accumulation
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self._grad_weight: Tensor | None = None
        if needed[1]:
            main_grad: Tensor | None = getattr(weight, "main_grad", None) if gradient_accumulation else None
            self._grad_weight = torch.zeros_like(weight, dtype=dtype) if main_grad is None else main_grad
        self._grad_bias: Tensor | None = None
        if bias is not None and needed[2]:
            self._grad_bias = torch.zeros_like(bias, dtype=dtype)

    def add(self, grad_logits: Tensor, hidden: Tensor) -> None:
        """Add one chunk, from its gradient at the logits, [t, v/tp], and its hidden states, [t, h]."""
        if self._grad_weight is not None:
            if self._grad_weight.dtype == hidden.dtype:
                self._grad_weight.addmm_(grad_logits.t(), hidden)
            else:
                # addmm_ needs one dtype, so that the product is a tensor of its own before it is added. Some rows of
                # the weight at a time: their product has a quarter of the elements of the chunk's logits.
                num_rows = max(1, grad_logits.numel() // (4 * hidden.shape[1]))
                rows_of_weight = self._grad_weight.split(num_rows)
                columns_of_logits = grad_logits.split(num_rows, dim=1)
                for grad_rows, grad_columns in zip(rows_of_weight, columns_of_logits, strict=True):
                    grad_rows += grad_columns.t() @ hidden
        if self._grad_bias is not None:
            self._grad_bias += grad_logits.sum(0, dtype=self._grad_bias.dtype)

    def results(self) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of (weight, bias) that autograd gets, in their dtype; None for those that need none."""
        grad_weight = self._grad_weight
        if grad_weight is not None:
            if self._accumulates:
                # Megatron's hook on the parameter must run, but adds nothing to main_grad.
                self._weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
                grad_weight = torch.zeros_like(self._weight)
            else:
                grad_weight = grad_weight.to(self._weight.dtype)
        grad_bias = None if self._grad_bias is None else self._grad_bias.to(self._weight.dtype)
        return grad_weight, grad_bias
