"""The logits of some tokens of each position, and the log of the sum of exp over the others or over all.

A position's tokens come as a list of ids (CSR form, see :mod:`megatron_rc.parallel.support`); an entry is one id of all
lists. From these numbers follow the log-probs of the entries, and of "any other token", in a few operations on
[entries] and [t] numbers. Only the logits themselves are large: the forward reads them once, and the backward writes
their gradient. Both start from logits (:func:`selected_logits`) or from hidden states (:func:`linear_selected_logits`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rc.parallel.collectives import all_reduce_max, all_reduce_sum
from megatron_rc.parallel.groups import group_size
from megatron_rc.parallel.kernels import kernels_of
from megatron_rc.parallel.linear import LinearOptions, WeightGradient, chunk_logits, no_autocast
from megatron_rc.parallel.log_probs import CallSpec
from megatron_rc.parallel.softmax import RowGradients, SoftmaxOptions, arithmetic
from megatron_rc.parallel.support import Support

# The columns that the log of the sum of exp is over.
Summed = Literal["all", "others", "none"]


class Selected(NamedTuple):
    """The results, equal on all ranks of TP; x are logits divided by the temperature.

    ``x`` and ``log_sum`` are float64, and differentiable in the logits. Where a value is -inf, a 0 stands in its place
    and its flag is True, so that no gradient becomes NaN.
    """

    x: Tensor  # [entries]
    has_no_mass: Tensor  # [entries] bool, the flag of x
    log_sum: Tensor  # [t], log Σ exp(x), over the columns that the spec's ``summed`` says; 0 for "none"
    is_empty: Tensor  # [t] bool, the flag of log_sum


@dataclass(frozen=True)
class SelectedSpec:
    """The settings of one call."""

    call: CallSpec  # the settings that log-probs have too
    summed: Summed

    def options(self, width: int, chunk_size: int | None) -> SoftmaxOptions:
        """The settings for reading rows of ``width`` local columns, v/tp, with padding."""
        return SoftmaxOptions(
            columns=self.call.softmax_options(width, allow_minus_inf=True).columns,
            inverse_temperature=1 / self.call.temperature,
            entropy=False,
            squares=False,
            chunk_size=chunk_size,
            compile=False,
            allow_minus_inf=True,
        )


@dataclass(frozen=True)
class _Cells:
    """The entries of some rows that are cells of this rank's logits, [cells] each."""

    entry: Tensor  # int64, index among the entries of the rows
    row: Tensor  # int64
    column: Tensor  # int64, among the local columns

    @classmethod
    def of(cls, support: Support, columns: int) -> _Cells:
        """The local cells; ``columns`` is the number of local columns that are vocabulary. A GPU's host waits."""
        column = support.ids.long() - support.first_id
        entry = ((column >= 0) & (column < columns)).nonzero().squeeze(1)
        return cls(entry=entry, row=support.row_of_entries()[entry], column=column[entry])

    def values(self, rows: Tensor, num_entries: int) -> Tensor:
        """The numbers of [t, v/tp] in these cells, [entries], in the arithmetic's dtype; 0 for other ranks' entries."""
        values = torch.zeros(num_entries, dtype=arithmetic(rows.dtype), device=rows.device)
        values[self.entry] = rows[self.row, self.column].to(values.dtype)
        return values


def _statistics(rows: Tensor, support: Support, spec: SelectedSpec, options: SoftmaxOptions) -> tuple[Tensor, Tensor]:
    """This rank's numbers: the logits of the local entries, [entries], and the statistics of the sum, [2, t].

    The statistics are the largest logit, not divided by the temperature, and Σ exp(x) relative to it, over the local
    columns; for "none" they are -inf and 0.
    """
    cells = _Cells.of(support, options.columns)
    entry_logits = cells.values(rows, len(support.ids))
    if spec.summed == "all":
        return entry_logits, kernels_of(rows).row_statistics(rows, options)

    statistics = torch.zeros(2, len(rows), dtype=entry_logits.dtype, device=rows.device)
    statistics[0] = -torch.inf
    if spec.summed == "others":
        for part, _ in options.chunks(rows):
            # Without its entries a row has exactly the mass of the other tokens, however little that is.
            others = rows[part].clone()
            cells_of_part = _Cells.of(support.at([part]), options.columns)
            others[cells_of_part.row, cells_of_part.column] = -torch.inf
            statistics[:, part] = kernels_of(others).row_statistics(others, replace(options, chunk_size=None))
    return entry_logits, statistics


def _merged(entry_logits: Tensor, statistics: Tensor, spec: SelectedSpec) -> Selected:
    """Merge the numbers of all ranks.

    Collectives over ``tp_group``: one MAX of t (not for "none"), one SUM of [entries], and t more unless "none".
    """
    group = spec.call.tp_group
    num_tokens = statistics.shape[1]
    if spec.summed == "none":
        entry_logits = all_reduce_sum(entry_logits, group)
        log_sum = torch.zeros(num_tokens, dtype=torch.float64, device=statistics.device)
    else:
        largest = all_reduce_max(statistics[0], group)
        shift = (statistics[0] - largest) / spec.call.temperature
        # A rank without a logit above -inf adds nothing.
        local_sum = torch.where(statistics[0] == -torch.inf, 0, statistics[1] * shift.exp())
        total, entry_logits = all_reduce_sum(torch.cat([local_sum, entry_logits]), group).split(
            [num_tokens, len(entry_logits)]
        )
        log_sum = largest.double() / spec.call.temperature + total.double().log()

    x = entry_logits.double() / spec.call.temperature
    has_no_mass = x == -torch.inf
    is_empty = log_sum == -torch.inf
    return Selected(
        x=torch.where(has_no_mass, 0, x),
        has_no_mass=has_no_mass,
        log_sum=torch.where(is_empty, 0, log_sum),
        is_empty=is_empty,
    )


@dataclass(frozen=True)
class _Gradients:
    """The gradients of the loss at the results of some rows, and what else their logits' gradient needs."""

    x: Tensor  # [entries]
    log_sum: Tensor  # [t]
    log_sum_value: Tensor  # [t], the result

    def at(self, positions: slice | Tensor, entries: Tensor) -> _Gradients:
        """Those of some of the rows; ``entries`` are the indices of their entries."""
        return _Gradients(self.x[entries], self.log_sum[positions], self.log_sum_value[positions])


def _write_gradient(
    rows: Tensor, out: Tensor, grads: _Gradients, support: Support, spec: SelectedSpec, options: SoftmaxOptions
) -> None:
    """Write the gradient at the logits, [t, v/tp], to ``out``, which may be the logits.

    d log_sum / d logits_v = exp(x_v - log_sum) / temperature, over the columns of the sum
    """
    temperature = spec.call.temperature
    cells = _Cells.of(support, options.columns)
    x = cells.values(rows, len(support.ids))[cells.entry].double() / temperature
    values = grads.x[cells.entry] / temperature
    if spec.summed == "all":
        share = (x - grads.log_sum_value[cells.row]).exp()
        values = values + share * grads.log_sum[cells.row] / temperature

    if spec.summed == "none":
        out.zero_()
    else:
        dtype = arithmetic(rows.dtype)
        no_label = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
        factors = RowGradients(
            log_normalizer=(grads.log_sum_value * temperature).to(dtype),
            constant=(grads.log_sum / temperature).to(dtype),
            log_pi_factor=None,
            pi_factor=None,
            label_column=no_label,
            owns_label=no_label.bool(),
            label_gradient=no_label.to(dtype),
            # A row without a gradient may hold anything.
            counted=grads.log_sum != 0,
        )
        kernels_of(rows).write_gradient(rows, out, factors, options)
    # Over the sum's gradient: the entries are not in "others", and ``values`` has their part of "all".
    out[cells.row, cells.column] = values.to(out.dtype)


def selected_logits(logits: Tensor, support: Support, spec: SelectedSpec) -> Selected:
    """The numbers of :class:`Selected` from logits, [t, v/tp], which may be a view of other memory.

    The entries of a row are distinct; entries whose id is negative are of no rank, and have x = 0.

    Memory: the backward makes the gradient, and some numbers for each entry and row.
    """
    return Selected(*_SelectedLogits.apply(logits, support, spec))  # type: ignore[no-untyped-call]


class _SelectedLogits(torch.autograd.Function):
    """The autograd function on logits."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, support: Support, spec: SelectedSpec) -> tuple[Tensor, ...]:
        """The fields of :class:`Selected`."""
        options = spec.options(rows.shape[1], spec.call.chunk_size)
        selected = _merged(*_statistics(rows.detach(), support, spec, options), spec)
        ctx.save_for_backward(rows, selected.log_sum)
        ctx.support = support
        ctx.spec = spec
        ctx.mark_non_differentiable(selected.has_no_mass, selected.is_empty)
        return tuple(selected)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient with respect to the logits."""
        rows, log_sum = ctx.saved_tensors
        spec: SelectedSpec = ctx.spec
        out = rows.detach() if spec.call.inplace_backward else torch.empty_like(rows)
        gradients = _Gradients(x=grads[0], log_sum=grads[2], log_sum_value=log_sum)
        options = spec.options(rows.shape[1], spec.call.chunk_size)
        _write_gradient(rows.detach(), out, gradients, ctx.support, spec, options)
        return out, None, None


def linear_selected_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, support: Support, spec: SelectedSpec, options: LinearOptions
) -> Selected:
    """The numbers of :class:`Selected` from hidden states, [rows, h], chunk by chunk, without storing logits.

    Arguments and collectives of the products are those of
    :func:`~megatron_rc.parallel.linear.linear_log_probs_and_entropy`; ``support`` is of all slices.
    """
    with no_autocast(hidden.device):
        results = _LinearSelectedLogits.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, support, spec, options
        )
    return Selected(*results)


class _LinearSelectedLogits(torch.autograd.Function):
    """The autograd function on hidden states: one chunk of tokens at a time, without keeping logits."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        support: Support,
        spec: SelectedSpec,
        options: LinearOptions,
    ) -> tuple[Tensor, ...]:
        """The fields of :class:`Selected`."""
        softmax_options = spec.options(weight.shape[0], chunk_size=None)
        entry_logits = torch.zeros(len(support.ids), dtype=arithmetic(rows.dtype), device=rows.device)
        statistics = entry_logits.new_zeros(2, len(support.counts))
        for part in options.chunks(rows):
            slices = options.slices(part, rows)
            logits = chunk_logits(options.gather(rows.detach()[part]), weight, bias)
            logits_of_entries, statistics_of_chunk = _statistics(logits, support.at(slices), spec, softmax_options)
            entry_logits[_entries_at(support, slices)] = logits_of_entries
            statistics[:, options.positions(part, rows)] = statistics_of_chunk
            del logits  # before the next chunk's are made

        selected = _merged(entry_logits, statistics, spec)
        ctx.save_for_backward(rows, weight, bias, selected.log_sum)
        ctx.support = support
        ctx.spec = spec
        ctx.options = options
        ctx.mark_non_differentiable(selected.has_no_mass, selected.is_empty)
        return tuple(selected)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients with respect to hidden, weight and bias; the logits of each chunk are computed again."""
        rows, weight, bias, log_sum = ctx.saved_tensors
        support: Support = ctx.support
        spec: SelectedSpec = ctx.spec
        options: LinearOptions = ctx.options
        gradients = _Gradients(x=grads[0], log_sum=grads[2], log_sum_value=log_sum)
        softmax_options = spec.options(weight.shape[0], chunk_size=None)
        rows = rows.detach()

        with no_autocast(rows.device):
            weight_gradient = WeightGradient(weight, bias, ctx.needs_input_grad, options.gradient_accumulation)
            grad_hidden = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
            for part in options.chunks(rows):
                slices = options.slices(part, rows)
                gathered_rows = options.gather(rows[part])
                logits = chunk_logits(gathered_rows, weight, bias)
                gradients_of_chunk = gradients.at(options.positions(part, rows), _entries_at(support, slices))
                _write_gradient(logits, logits, gradients_of_chunk, support.at(slices), spec, softmax_options)
                weight_gradient.add(logits, gathered_rows)
                if grad_hidden is not None:
                    grad_hidden[part] = options.scatter(logits @ weight)
                del logits  # before the next chunk's are made

            # Each rank's product is over its own vocabulary rows; scatter has already summed slices.
            if grad_hidden is not None and not options.sliced and group_size(spec.call.tp_group) > 1:
                dist.all_reduce(grad_hidden, group=spec.call.tp_group)
        grad_weight, grad_bias = weight_gradient.results()
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _entries_at(support: Support, slices: list[slice]) -> Tensor:
    """The indices of the entries of some rows, in the order of ``support.at(slices)``, int64."""
    all_entries = torch.arange(len(support.ids), device=support.ids.device)
    return replace(support, ids=all_entries).at(slices).ids
