"""Log-probs and entropy of tokens from the statistics of rows of logits, over all vocabulary shards; their gradients.

Logits (:mod:`megatron_rc.parallel.vocab`) and hidden states (:mod:`megatron_rc.parallel.linear`) share this.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rc.parallel.arguments import check_integer, check_number
from megatron_rc.parallel.collectives import all_reduce_max, all_reduce_sum
from megatron_rc.parallel.groups import Group, group_rank, group_size
from megatron_rc.parallel.kernels import kernels_of
from megatron_rc.parallel.softmax import LOWEST_LOG_PI, RowGradients, SoftmaxOptions
from megatron_rc.parallel.support import Support, waits

IGNORED_LABEL = -100


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
    entropy_apart: bool  # the log-probs and Σπ² are over kept tokens, the entropy over the whole vocabulary
    support_is_sorted: bool  # the caller's word that the kept ids of each position ascend, and none comes twice

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

    @property
    def num_statistics(self) -> int:
        """Number of rows of :class:`Statistics`."""
        return 2 + self.entropy + self.sum_squares + 2 * self.entropy_apart

    def support(self, ids: Tensor | None, offsets: Tensor | None, width: int) -> Support | None:
        """The kept tokens of rows in the order of the offsets, for a local shard of this width; None without."""
        if ids is None or offsets is None:
            return None
        vocabulary = self.vocab_size or width * group_size(self.tp_group)
        first = group_rank(self.tp_group) * width
        return Support.make(ids, offsets, vocabulary, first, is_sorted=self.support_is_sorted)


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


@dataclass(frozen=True)
class Target:
    """The labels' columns in the local shard; each [t]."""

    label: Tensor  # the index in the whole vocabulary
    column: Tensor  # int64, the local column; 0 if another rank has it
    here: Tensor  # bool, this rank has the column, and the token counts
    known: Tensor  # bool, the label has a log-prob: it lies in the whole vocabulary, and is a kept token
    counted: Tensor  # bool, the token counts

    @classmethod
    def find(cls, labels: Tensor, counted: Tensor, spec: CallSpec, width: int) -> Target:
        """The local columns of labels that are indices into the whole vocabulary."""
        known = (labels >= 0) & (labels < (spec.vocab_size or width * group_size(spec.tp_group)))
        column = labels - group_rank(spec.tp_group) * width
        here = known & counted & (column >= 0) & (column < width)
        return cls(labels, torch.where(here, column, 0).long(), here, known, counted)

    def within(self, scored: Tensor | None) -> Target:
        """The labels without a log-prob if ``scored``, bool [t], is False; None changes nothing."""
        return self if scored is None else replace(self, here=self.here & scored, known=self.known & scored)

    def at(self, index: slice | Tensor) -> Target:
        """The labels of a part of the tokens."""
        return Target(*(value[index] for value in vars(self).values()))

    def logits(self, rows: Tensor) -> Tensor:
        """[t]: the labels' logits; any value if another rank has the column."""
        return rows.gather(1, self.column.unsqueeze(1)).squeeze(1)


@dataclass(frozen=True)
class Statistics:
    """The statistics of rows over this rank's columns.

    ``values`` has the rows of :func:`~megatron_rc.parallel.softmax.row_statistics`, over the kept tokens of a position
    if there are any. If the entropy stands apart, they come without its row, and three rows over the whole vocabulary
    follow: m, Σ exp(x - m) and Σ exp(x - m) (x - m).
    """

    values: Tensor  # [2 to 6, t]
    scored: Tensor  # bool [t], the label is a kept token, or there are no kept tokens
    holes: bool  # logits of -inf were allowed


def statistics_of(rows: Tensor, target: Target, support: Support | None, spec: CallSpec) -> Statistics:
    """The statistics of rows of logits; on a CPU logits of -inf are only allowed if a counted entropy needs it."""
    if support is None:
        values, holes = _whole(rows, target.counted, spec)
        return Statistics(values, target.known, holes)
    options = spec.softmax_options(rows.shape[1], holes=True)
    of_kept = replace(options, entropy=options.entropy and not spec.entropy_apart)
    needs_whole = spec.entropy_apart or waits(rows) or bool((target.counted & ~support.supported).any())
    if not needs_whole:
        kept, scored = support.statistics(rows, target.label, of_kept)
        return Statistics(kept, scored, False)
    # The pass over all columns comes first: the cache has the rows when the kept logits are gathered.
    values, holes = _whole(rows, target.counted, spec)
    largest = None if waits(rows) else values[0]
    kept, scored = support.statistics(rows, target.label, of_kept, largest)
    without = values if not spec.entropy_apart else torch.cat([values[:2], values[3:]])
    merged = torch.where(support.supported, kept, without)
    return Statistics(torch.cat([merged, values[:3]]) if spec.entropy_apart else merged, scored, holes)


def _whole(rows: Tensor, counted: Tensor, spec: CallSpec) -> tuple[Tensor, bool]:
    """(statistics over the whole vocabulary, whether logits of -inf were allowed)."""
    # On a GPU the test would wait for the host.
    values = kernels_of(rows).row_statistics(rows, spec.softmax_options(rows.shape[1], holes=rows.is_cuda))
    if rows.is_cuda or not spec.entropy or not bool((values[2].isnan() & counted).any()):
        return values, rows.is_cuda
    return kernels_of(rows).row_statistics(rows, spec.softmax_options(rows.shape[1], holes=True)), True


def combine(statistics: Tensor, target: Target, chosen: Tensor, spec: CallSpec) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(offsets, (log-probs, and entropy and Σπ² if asked for), [t] each), over all ranks.

    An offset is log Σ exp(x) times the temperature: [1, t], or [2, t] if the entropy stands apart, with the entropy's
    behind the log-probs'. Results are 0 if the token does not count. ``statistics`` are this rank's, the values of
    :class:`Statistics`; ``chosen``, [t], are the labels' logits, valid for ``target.here``.

    Collectives: one MAX of t or 2t, one SUM of 2t to 5t numbers over ``tp_group``.
    """
    parts = statistics.split([len(statistics) - 3, 3]) if spec.entropy_apart else (statistics,)
    maxima = all_reduce_max(torch.stack([part[0] for part in parts]), spec.tp_group)
    chosen = torch.where(target.here, (chosen.to(maxima.dtype) - maxima[0]) / spec.temperature, 0)
    has = (spec.entropy and not spec.entropy_apart, spec.sum_squares), (True, False)
    sums = [_shifted(part, maxima[index], *has[index], spec) for index, part in enumerate(parts)]
    reduced = all_reduce_sum(torch.cat([chosen.unsqueeze(0), *sums]), spec.tp_group)
    (chosen,), own, *others = reduced.split([1, *map(len, sums)])
    of_entropy = others[0] if others else own
    log_totals = torch.stack([one[0].log() for one in (own, *others)])
    results = [torch.where(target.known, chosen - log_totals[0], torch.nan)]
    if spec.entropy:
        results.append(log_totals[-1] - of_entropy[1] / of_entropy[0])
    if spec.sum_squares:
        results.append(own[-1] / own[0].square())
    return maxima + log_totals * spec.temperature, tuple(torch.where(target.counted, one, 0) for one in results)


def _shifted(part: Tensor, maximum: Tensor, entropy: bool, squares: bool, spec: CallSpec) -> Tensor:
    """The sums of a rank's statistics, relative to the maximum over all ranks instead of its own."""
    local, *rest = part
    if group_size(spec.tp_group) == 1:
        return part[1:]
    # A rank whose columns are all padding or -inf has a maximum of -inf and adds nothing.
    present = local != -torch.inf
    shift = (local - maximum) / spec.temperature
    factor = shift.exp()
    if entropy:
        rest[1] = (rest[1] + shift * rest[0]) * factor
    if squares:
        rest[-1] = rest[-1] * factor.square()
    rest[0] = rest[0] * factor
    return torch.stack([torch.where(present, value, 0) for value in rest])


@dataclass(frozen=True)
class GradientFactors:
    """The factors of the gradient at the rows of logits."""

    whole: RowGradients  # over the whole vocabulary
    kept: RowGradients | None  # in the kept columns, of rows that have some; None without a support

    def at(self, index: slice | Tensor) -> GradientFactors:
        """The factors of a part of the rows."""
        return replace(self, whole=self.whole.at(index), kept=None if self.kept is None else self.kept.at(index))


def gradient_factors(
    grads: list[Tensor | None],
    target: Target,
    chosen: Tensor,
    offsets: Tensor,
    entropy: Tensor | None,
    squares: Tensor | None,
    support: Support | None,
    spec: CallSpec,
) -> GradientFactors:
    """The factors of all rows' gradients; the arguments: see :func:`row_gradients`, with both offsets."""
    if support is None:
        return GradientFactors(row_gradients(grads, target, chosen, offsets[0], entropy, squares, spec), None)

    def only(grad: Tensor | None, rows: Tensor) -> Tensor | None:
        return None if grad is None else torch.where(rows, grad, 0)

    supported, over_kept = support.supported, (True, not spec.entropy_apart, True)
    of_kept = [only(grad, supported) if own else None for grad, own in zip(grads, over_kept, strict=False)]
    of_whole = [only(grad, ~supported) if own else grad for grad, own in zip(grads, over_kept, strict=False)]
    kept = row_gradients(of_kept, target, chosen, offsets[0], entropy, squares, spec)
    whole = row_gradients(of_whole, target, chosen, offsets[-1], entropy, squares, spec)
    if spec.entropy_apart and grads[1] is not None:
        return GradientFactors(whole, _sum_in_kept_columns(kept, whole, spec))
    return GradientFactors(replace(whole, here=whole.here & ~supported, counted=whole.counted & ~supported), kept)


def _sum_in_kept_columns(kept: RowGradients, whole: RowGradients, spec: CallSpec) -> RowGradients:
    """The factors of the sum of both gradients, by the probabilities π of the kept tokens.

    Over the whole vocabulary a kept token has e^-d π, with the same d >= 0 for all of a row:
    e^-d π (constant + log_pi (log π - d)) = π (e^-d (constant - log_pi d) + e^-d log_pi log π).
    """
    difference = (whole.offset - kept.offset) / spec.temperature
    share = (-difference).exp()
    constant, log_pi = whole.constant, kept.log_pi
    if whole.log_pi is not None:
        constant = constant - whole.log_pi * difference
        log_pi = share * whole.log_pi if log_pi is None else log_pi + share * whole.log_pi
    return replace(kept, constant=kept.constant + share * constant, log_pi=log_pi, target=kept.target + whole.target)


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


def write_gradient(
    rows: Tensor, out: Tensor, factors: GradientFactors, support: Support | None, spec: CallSpec, holes: bool
) -> None:
    """The gradient at the logits [t, v/tp], written to ``out``: like the logits, or these."""
    options, kept = spec.softmax_options(rows.shape[1], holes), None
    if support is not None and factors.kept is not None:
        kept = support.gradient(rows, factors.kept, options)
    if support is None or waits(rows) or bool(factors.whole.counted.any()):
        kernels_of(rows).write_gradient(rows, out, factors.whole, options)
    else:
        out.zero_()
    if kept is not None:
        kept.write(out)
