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
from megatron_rc.parallel.support import Support, host_waits_for

IGNORED_LABEL = -100


@dataclass(frozen=True)
class CallSpec:
    """The settings of one call of a public function of :mod:`megatron_rc.parallel.vocab` or ``linear``."""

    tp_group: Group | None  # the ranks that hold the other columns of the vocabulary
    vocab_size: int | None  # columns at and above it are padding; None: there is no padding
    temperature: float  # divides the logits
    chunk_size: int | None  # tokens that are worked on together; None: a size that suits the device
    entropy: bool  # compute the entropy
    sum_squares: bool  # compute Σπ², the sum of squared probabilities
    inplace_backward: bool  # write the gradient over the logits
    compile: bool  # run chunks through torch.compile
    separate_entropy: bool  # log-probs and Σπ² are over kept tokens, the entropy over the whole vocabulary
    support_is_sorted: bool  # the caller's word that the kept ids of each position ascend, and none comes twice

    def softmax_options(self, width: int, *, allow_minus_inf: bool) -> SoftmaxOptions:
        """The settings for reading this rank's logits; ``width`` is their number of columns, v/tp, with padding."""
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
            allow_minus_inf=allow_minus_inf,
        )

    def without_chunk_size(self) -> CallSpec:
        """These settings with chunks of a size that suits the device."""
        return replace(self, chunk_size=None)

    @property
    def num_statistics(self) -> int:
        """Number of rows of ``Statistics.values``."""
        # A separate entropy adds three rows in place of the one that it has otherwise.
        return 2 + self.entropy + self.sum_squares + 2 * self.separate_entropy

    def support(self, ids: Tensor | None, offsets: Tensor | None, width: int) -> Support | None:
        """The kept tokens of rows from a caller's ids and offsets; None if there are none.

        The rows are in the order of the offsets; ``width`` is the number of their local columns, v/tp.
        """
        if ids is None or offsets is None:
            return None
        return Support.make(
            ids,
            offsets,
            vocab_size=self.vocab_size or width * group_size(self.tp_group),
            first_id=group_rank(self.tp_group) * width,
            is_sorted=self.support_is_sorted,
        )


def counted_tokens(labels: Tensor, mask: Tensor | None) -> Tensor:
    """Whether each token counts, bool like the labels: the mask; without one, False for the label -100."""
    return labels != IGNORED_LABEL if mask is None else mask


def check_call(labels: Tensor, mask: Tensor | None, spec: CallSpec, width: int) -> None:
    """Check the settings, the mask and the labels' dtype; ``width`` is the number of columns of this rank's logits.

    Raises:
        ValueError: labels that are no integers, a mask that is not bool of the labels' shape, and the errors of
            :func:`check_settings`.
    """
    check_settings(spec, width)
    if mask is not None and (mask.shape != labels.shape or mask.dtype != torch.bool):
        raise ValueError(
            f"mask is {mask.dtype} {tuple(mask.shape)}: expected bool of the labels' {tuple(labels.shape)}"
        )
    if labels.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"labels are {labels.dtype}: expected int64, or int32")


def check_settings(spec: CallSpec, width: int) -> None:
    """Check the settings of a call against the number of columns of this rank's logits, ``width``.

    Raises:
        ValueError: a setting out of range, or a width that cannot be a shard of the vocabulary.
    """
    if not width:
        raise ValueError("logits have no columns: expected this rank's shard of the vocabulary in the last dimension")
    check_number("temperature", spec.temperature, lambda t: 0 < t < torch.inf, "must be positive, and finite")
    if spec.vocab_size is not None:
        check_integer("vocab_size", spec.vocab_size, least=1)
    if spec.chunk_size is not None:
        check_integer("chunk_size", spec.chunk_size, least=1)
    size = group_size(spec.tp_group)
    if spec.vocab_size is None:
        return
    # The whole logits on every rank would have as many columns of padding as of the vocabulary, or more. A small
    # vocabulary may have: Megatron pads by fewer than 128 columns a rank unless told otherwise. Whole logits of one
    # pass this check.
    num_columns = width * size
    padding = num_columns - spec.vocab_size
    if not 0 <= padding < max(spec.vocab_size, 128 * size):
        raise ValueError(
            f"logits of width {width} on {size} tensor-parallel ranks make {num_columns} columns, which is no "
            f"padding of vocab_size={spec.vocab_size}: pass each rank its own shard of the vocabulary"
        )


@dataclass(frozen=True)
class Target:
    """The labels of t tokens, and their columns among this rank's columns of the vocabulary; each [t]."""

    label: Tensor  # the index in the whole vocabulary, of any value
    column: Tensor  # int64, the local column; 0 if this rank does not own the label
    owns_label: Tensor  # bool, this rank has the label's column, and the token counts and has a log-prob
    has_log_prob: Tensor  # bool, the label lies in the whole vocabulary, and is a kept token if there are some
    counted: Tensor  # bool, the token counts

    @classmethod
    def locate(cls, labels: Tensor, counted: Tensor, spec: CallSpec, width: int) -> Target:
        """Find the local columns of labels that are indices into the whole vocabulary.

        Args:
            labels: [t], integers of any value.
            counted: [t], bool, the token counts.
            spec: the settings of the call.
            width: number of columns of this rank's logits, v/tp, with padding.
        """
        vocab_size = spec.vocab_size or width * group_size(spec.tp_group)
        is_in_vocabulary = (labels >= 0) & (labels < vocab_size)
        column = labels - group_rank(spec.tp_group) * width
        owns_label = is_in_vocabulary & counted & (column >= 0) & (column < width)
        return cls(
            label=labels,
            column=torch.where(owns_label, column, 0).long(),
            owns_label=owns_label,
            has_log_prob=is_in_vocabulary,
            counted=counted,
        )

    def restricted_to(self, scorable: Tensor | None) -> Target:
        """These labels, without a log-prob where ``scorable``, [t] bool, is False; None changes nothing."""
        if scorable is None:
            return self
        return replace(self, owns_label=self.owns_label & scorable, has_log_prob=self.has_log_prob & scorable)

    def at(self, index: slice | Tensor) -> Target:
        """The labels of some of the tokens."""
        selected = {name: value[index] for name, value in vars(self).items()}
        return Target(**selected)

    def logits(self, rows: Tensor) -> Tensor:
        """The logit of each label, [t], from the logits, [t, v/tp]; any number where this rank does not own it."""
        return rows.gather(1, self.column.unsqueeze(1)).squeeze(1)


@dataclass(frozen=True)
class Statistics:
    """The softmax statistics of t positions over this rank's columns, before they are merged over ranks.

    ``values[:, i]`` are the statistics of position i, as
    :func:`~megatron_rc.parallel.softmax.row_statistics` returns them: over the kept tokens of the position, or over the
    whole vocabulary if it has no kept tokens.

    With a separate entropy (see :class:`CallSpec`) a position has two such lists, one behind the other. The first is as
    above, without the entropy's number. The second is always over the whole vocabulary, and has three numbers: m,
    Σ exp(x - m) and the entropy's, Σ exp(x - m) (x - m).
    """

    values: Tensor  # [2 to 6, t]
    scorable: Tensor  # bool [t], False where the label has no log-prob, such as one that is no kept token
    allowed_minus_inf: bool  # over the whole vocabulary logits of -inf were allowed, which takes another pass


def statistics_of(rows: Tensor, target: Target, support: Support | None, spec: CallSpec) -> Statistics:
    """The statistics of rows of logits, [t, v/tp], over this rank's columns.

    The whole vocabulary is read if something needs it: a position without kept tokens, or a separate entropy.
    """
    if support is None:
        values, allowed_minus_inf = _vocabulary_statistics(rows, target.counted, spec)
        return Statistics(values, scorable=target.has_log_prob, allowed_minus_inf=allowed_minus_inf)

    options = spec.softmax_options(rows.shape[1], allow_minus_inf=True)
    kept_options = replace(options, entropy=options.entropy and not spec.separate_entropy)
    # A GPU is not asked whether all positions have kept tokens: the host would wait for the answer.
    needs_vocabulary = (
        spec.separate_entropy or host_waits_for(rows) or bool((target.counted & ~support.has_kept_tokens).any())
    )
    if not needs_vocabulary:
        kept_values, scorable = support.statistics(rows, target.label, kept_options)
        return Statistics(kept_values, scorable, allowed_minus_inf=False)

    # The pass over all columns comes first: the cache has the rows when the kept logits are gathered.
    vocabulary_values, allowed_minus_inf = _vocabulary_statistics(rows, target.counted, spec)
    largest = None if host_waits_for(rows) else vocabulary_values[0]
    kept_values, scorable = support.statistics(rows, target.label, kept_options, largest)
    if not spec.separate_entropy:
        values = torch.where(support.has_kept_tokens, kept_values, vocabulary_values)
        return Statistics(values, scorable, allowed_minus_inf)

    # Row 2 is the entropy's.
    without_entropy = torch.cat([vocabulary_values[:2], vocabulary_values[3:]])
    log_prob_values = torch.where(support.has_kept_tokens, kept_values, without_entropy)
    return Statistics(torch.cat([log_prob_values, vocabulary_values[:3]]), scorable, allowed_minus_inf)


def _vocabulary_statistics(rows: Tensor, counted: Tensor, spec: CallSpec) -> tuple[Tensor, bool]:
    """Return the statistics over all columns, [2 to 4, t], and whether logits of -inf were allowed.

    To allow them takes time, so that a CPU first tries without, and does so only if the entropy of a counted token is
    NaN. A GPU always allows them, because the host would wait for the outcome of the try.
    """
    kernels = kernels_of(rows)
    options = spec.softmax_options(rows.shape[1], allow_minus_inf=rows.is_cuda)
    values = kernels.row_statistics(rows, options)
    if rows.is_cuda or not spec.entropy or not bool((values[2].isnan() & counted).any()):
        return values, options.allow_minus_inf
    return kernels.row_statistics(rows, replace(options, allow_minus_inf=True)), True


def combine(
    statistics: Tensor, target: Target, label_logits: Tensor, spec: CallSpec
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Merge the statistics of all ranks to the results of the call.

    Args:
        statistics: this rank's, [2 to 6, t]: the ``values`` of :class:`Statistics`.
        target: the labels.
        label_logits: [t], the labels' logits, valid where this rank owns the label.
        spec: the settings of the call.

    Returns:
        The log-normalizers, temperature · log Σ exp(logits / temperature): [1, t], or with a separate entropy [2, t],
        that of the log-probs and that of the entropy. And the results, [t] each: log-probs, then entropy and Σπ² if
        they were asked for; 0 where the token does not count.

    Collectives: one MAX of t or 2t, one SUM of 2t to 5t numbers over ``tp_group``.
    """
    if spec.separate_entropy:
        log_prob_statistics, entropy_statistics = statistics.split([len(statistics) - 3, 3])
        maxima = all_reduce_max(torch.stack([log_prob_statistics[0], entropy_statistics[0]]), spec.tp_group)
        log_prob_sums = _sums_relative_to(maxima[0], log_prob_statistics, spec, entropy=False, squares=spec.sum_squares)
        entropy_sums = _sums_relative_to(maxima[1], entropy_statistics, spec, entropy=True, squares=False)
        local_sums = [log_prob_sums, entropy_sums]
    else:
        maxima = all_reduce_max(torch.stack([statistics[0]]), spec.tp_group)
        local_sums = [_sums_relative_to(maxima[0], statistics, spec, entropy=spec.entropy, squares=spec.sum_squares)]

    # The label's x comes from the one rank that owns it; the others add 0.
    label_x = (label_logits.to(maxima.dtype) - maxima[0]) / spec.temperature
    label_x = torch.where(target.owns_label, label_x, 0)
    sums = all_reduce_sum(torch.cat([label_x.unsqueeze(0), *local_sums]), spec.tp_group)
    label_x = sums[0]
    if spec.separate_entropy:
        log_prob_sums, entropy_sums = sums[1:].split([len(sums) - 3, 2])
        log_totals = torch.stack([log_prob_sums[0].log(), entropy_sums[0].log()])
    else:
        log_prob_sums = entropy_sums = sums[1:]
        log_totals = torch.stack([log_prob_sums[0].log()])

    # With x relative to the maximum: log π_y = x_y - log Σ exp(x), H = log Σ exp(x) - Σ exp(x) x / Σ exp(x).
    results = [torch.where(target.has_log_prob, label_x - log_totals[0], torch.nan)]
    if spec.entropy:
        results.append(log_totals[-1] - entropy_sums[1] / entropy_sums[0])
    if spec.sum_squares:
        results.append(log_prob_sums[-1] / log_prob_sums[0].square())
    log_normalizers = maxima + log_totals * spec.temperature
    return log_normalizers, tuple(torch.where(target.counted, result, 0) for result in results)


def _sums_relative_to(maximum: Tensor, statistics: Tensor, spec: CallSpec, *, entropy: bool, squares: bool) -> Tensor:
    """The sums of this rank's statistics, relative to the maximum over all ranks, so that they can be added over ranks.

    Args:
        maximum: [t], of the logits of all ranks.
        statistics: [2 to 4, t], as of :func:`~megatron_rc.parallel.softmax.row_statistics`, relative to this rank's
            maximum.
        spec: the settings of the call.
        entropy: the statistics have a row Σ exp(x) x.
        squares: the statistics have a row Σ exp(x)², the last.

    Returns:
        The rows of the statistics but the first, [1 to 3, t].
    """
    if group_size(spec.tp_group) == 1:
        return statistics[1:]

    local_maximum = statistics[0]
    sum_exp = statistics[1]
    # x becomes x + shift, so that exp(x) gets the factor exp(shift).
    shift = (local_maximum - maximum) / spec.temperature
    factor = shift.exp()
    sums = [sum_exp * factor]
    if entropy:
        sums.append((statistics[2] + shift * sum_exp) * factor)
    if squares:
        sums.append(statistics[-1] * factor.square())
    # A rank whose columns are all padding or -inf has a maximum of -inf and adds nothing; its shift is -inf or NaN.
    return torch.where(local_maximum != -torch.inf, torch.stack(sums), 0)


@dataclass(frozen=True)
class ResultGradients:
    """Gradients of the loss with respect to the results of the call, [t] each; None if the loss does not use a result.

    The fields are in the order of the results.
    """

    log_probs: Tensor | None
    entropy: Tensor | None = None
    sum_squares: Tensor | None = None


@dataclass(frozen=True)
class ForwardValues:
    """What the backward needs of the forward, beside the logits; the results are None if they were not asked for."""

    label_logits: Tensor  # [t], valid where this rank owns the label
    log_normalizers: Tensor  # [1 or 2, t], as combine() returns them
    entropy: Tensor | None  # [t]
    sum_squares: Tensor | None  # [t], Σπ²


@dataclass(frozen=True)
class GradientFactors:
    """The factors from which the gradient at rows of logits is computed.

    The gradient in all columns is written first, then that in the columns of each row's kept tokens, over it.
    """

    vocabulary: RowGradients  # for all columns; a row with a gradient in its kept columns alone is not ``counted``
    kept: RowGradients | None  # for the kept columns; used for rows with kept tokens alone; None without a support

    def at(self, index: slice | Tensor) -> GradientFactors:
        """The factors of some of the rows."""
        kept = None if self.kept is None else self.kept.at(index)
        return GradientFactors(self.vocabulary.at(index), kept)


def gradient_factors(
    grads: ResultGradients, target: Target, forward: ForwardValues, support: Support | None, spec: CallSpec
) -> GradientFactors:
    """The factors of the gradient at all rows of logits, from the gradients of the results.

    A result over the kept tokens has a gradient in their columns alone; a result over the whole vocabulary has one in
    all columns.
    """
    if support is None:
        vocabulary = row_gradients(grads, target, forward, forward.log_normalizers[0], spec)
        return GradientFactors(vocabulary, kept=None)

    has_kept = support.has_kept_tokens
    kept_grads = ResultGradients(
        log_probs=_at_rows(grads.log_probs, has_kept),
        entropy=None if spec.separate_entropy else _at_rows(grads.entropy, has_kept),
        sum_squares=_at_rows(grads.sum_squares, has_kept),
    )
    vocabulary_grads = ResultGradients(
        log_probs=_at_rows(grads.log_probs, ~has_kept),
        entropy=grads.entropy if spec.separate_entropy else _at_rows(grads.entropy, ~has_kept),
        sum_squares=_at_rows(grads.sum_squares, ~has_kept),
    )
    kept = row_gradients(kept_grads, target, forward, forward.log_normalizers[0], spec)
    vocabulary = row_gradients(vocabulary_grads, target, forward, forward.log_normalizers[-1], spec)
    if spec.separate_entropy and grads.entropy is not None:
        # The kept columns are written last, over those of the whole vocabulary, so that they need both gradients.
        return GradientFactors(vocabulary, _sum_in_kept_columns(kept, vocabulary, spec))

    vocabulary = replace(
        vocabulary,
        owns_label=vocabulary.owns_label & ~has_kept,
        counted=vocabulary.counted & ~has_kept,
    )
    return GradientFactors(vocabulary, kept)


def _at_rows(grad: Tensor | None, flags: Tensor) -> Tensor | None:
    """The gradient of the flagged rows, [t], and 0 for the others; None stays None."""
    return None if grad is None else torch.where(flags, grad, 0)


def _sum_in_kept_columns(kept: RowGradients, vocabulary: RowGradients, spec: CallSpec) -> RowGradients:
    """The factors of the sum of both gradients, by the probabilities π of the kept tokens.

    Over the whole vocabulary a kept token has the probability e^-d π, with the same d >= 0 for all of a row. So the
    gradient of the whole vocabulary, with its factors ``constant`` and ``log_pi_factor``, is there

        e^-d π (constant + log_pi_factor (log π - d))
            = π (e^-d (constant - log_pi_factor d) + e^-d log_pi_factor log π).
    """
    difference = (vocabulary.log_normalizer - kept.log_normalizer) / spec.temperature  # d
    share = (-difference).exp()  # e^-d
    constant = vocabulary.constant
    log_pi_factor = kept.log_pi_factor
    if vocabulary.log_pi_factor is not None:
        constant = constant - vocabulary.log_pi_factor * difference
        share_of_factor = share * vocabulary.log_pi_factor
        log_pi_factor = share_of_factor if log_pi_factor is None else log_pi_factor + share_of_factor
    return replace(
        kept,
        constant=kept.constant + share * constant,
        log_pi_factor=log_pi_factor,
        label_gradient=kept.label_gradient + vocabulary.label_gradient,
    )


def row_gradients(
    grads: ResultGradients, target: Target, forward: ForwardValues, log_normalizer: Tensor, spec: CallSpec
) -> RowGradients:
    """The factors of the gradient at each row of logits, from the gradients of the results.

        d log π_y / d x_v = [v = y] - π_v    d H / d x_v = -π_v (log π_v + H)    d Q / d x_v = 2 π_v (π_v - Q)

    x are the logits divided by the temperature, y is the label, H the entropy, and Q = Σπ².

    Args:
        grads: of the results over the columns that ``log_normalizer`` is of.
        target: the labels.
        forward: the forward's values.
        log_normalizer: [t], over all columns or over the kept ones.
        spec: the settings of the call.
    """

    def at_logits(grad: Tensor | None, counted: Tensor) -> Tensor | None:
        """The gradient in the arithmetic's dtype, divided by the temperature; 0 for tokens that do not count."""
        if grad is None:
            return None
        return torch.where(counted, grad.to(log_normalizer.dtype), 0) / spec.temperature

    of_log_prob = at_logits(grads.log_probs, target.counted & target.has_log_prob)
    if of_log_prob is None:
        of_log_prob = torch.zeros_like(log_normalizer)
    of_entropy = at_logits(grads.entropy, target.counted)
    of_sum_squares = at_logits(grads.sum_squares, target.counted)

    # The gradient of a row, but for [v = y], is π_v (constant + log_pi_factor log π_v + pi_factor π_v).
    constant = -of_log_prob
    log_pi_factor = None
    pi_factor = None
    if of_entropy is not None and forward.entropy is not None:
        constant = constant - of_entropy * forward.entropy
        log_pi_factor = -of_entropy
    if of_sum_squares is not None and forward.sum_squares is not None:
        constant = constant - 2 * of_sum_squares * forward.sum_squares
        pi_factor = 2 * of_sum_squares

    # In the label's column it is computed here, with [v = y].
    label_log_pi = (forward.label_logits.to(log_normalizer.dtype) - log_normalizer) / spec.temperature
    label_pi = label_log_pi.exp()
    label_factor = constant
    if log_pi_factor is not None:
        label_factor = label_factor + log_pi_factor * label_log_pi.clamp(min=LOWEST_LOG_PI)
    if pi_factor is not None:
        label_factor = label_factor + pi_factor * label_pi
    return RowGradients(
        log_normalizer=log_normalizer,
        constant=constant,
        log_pi_factor=log_pi_factor,
        pi_factor=pi_factor,
        label_column=target.column,
        owns_label=target.owns_label,
        label_gradient=of_log_prob + label_pi * label_factor,
        counted=target.counted,
    )


def write_gradient(
    rows: Tensor,
    out: Tensor,
    factors: GradientFactors,
    support: Support | None,
    spec: CallSpec,
    *,
    allow_minus_inf: bool,
) -> None:
    """Write the gradient at the logits to ``out``.

    Args:
        rows: [t, v/tp], the logits.
        out: like the logits; may be the logits themselves.
        factors: the factors of the t rows.
        support: the kept tokens of the t rows, if there are some.
        spec: the settings of the call.
        allow_minus_inf: the logits may be -inf, as :class:`Statistics` says.
    """
    options = spec.softmax_options(rows.shape[1], allow_minus_inf=allow_minus_inf)
    kept_gradient = None
    if support is not None and factors.kept is not None:
        # Before anything is written, because ``out`` may be the logits.
        kept_gradient = support.gradient(rows, factors.kept, options)

    # On a CPU the pass over all columns is left out if no row needs it.
    if support is None or host_waits_for(rows) or bool(factors.vocabulary.counted.any()):
        kernels_of(rows).write_gradient(rows, out, factors.vocabulary, options)
    else:
        out.zero_()
    if kept_gradient is not None:
        kept_gradient.write(out)
