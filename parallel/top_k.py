"""Divergence of a student from a teacher of which a few tokens' log-probs are known, such as an engine's top k."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rc.parallel.arguments import check_tensors, one_of
from megatron_rc.parallel.divergence import DEFAULT_BETA, check_kind_of_divergence, check_mask_of
from megatron_rc.parallel.groups import Group
from megatron_rc.parallel.linear import LinearOptions
from megatron_rc.parallel.linear_divergence import check_output_layer
from megatron_rc.parallel.log_probs import IGNORED_LABEL, CallSpec, check_settings
from megatron_rc.parallel.selected import Selected, SelectedSpec, Summed, linear_selected_logits, selected_logits
from megatron_rc.parallel.softmax import arithmetic
from megatron_rc.parallel.support import Support, check_support

TAILS = ("sampled", "rest", "none")
# The columns, beside the teacher's ids, that each tail needs of the student.
_SUMMED: dict[str, Summed] = {"sampled": "all", "rest": "others", "none": "none"}
# The teacher's probability of any other token is 1 minus a sum of float32 numbers, and so known to about this much.
LEAST_REST = 1e-8
MOST_MASS = 1 + 1e-3  # a larger sum of a position's probabilities is no rounding error
RATIO_LIMIT = 20.0  # q/p of a sampled token is exp(min(log q - log p, 20)), as the ratios of the correction


def top_k_divergence(
    logits: Tensor,
    teacher_ids: Tensor,
    teacher_offsets: Tensor,
    teacher_log_probs: Tensor,
    tp_group: Group | None = None,
    *,
    tail: str,
    kind: str = "reverse_kl",
    beta: float | None = None,
    labels: Tensor | None = None,
    teacher_label_log_probs: Tensor | None = None,
    vocab_size: int | None = None,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    inplace_backward: bool = False,
) -> Tensor:
    """Divergence of the student p from the teacher q at each token, from log q of the few tokens K of the position.

    The kinds are those of :func:`~megatron_rc.parallel.divergence.vocab_parallel_divergence`, each a sum over tokens,
    D = Σ_v f(p_v, q_v). The tail says what stands for the tokens that are not in K:

    - ``sampled``: Σ_{v ∈ K} f(p_v, q_v), and if the token y that the student sampled is not in K, f(p_y, q_y) / p_y.
      Its mean over y ~ p is D of the whole vocabulary, and the mean of its gradient is D's gradient. For a y of another
      policy importance weights restore that. In the second term q/p is at most e²⁰.
    - ``rest``: the divergence of distributions over the tokens of K and one event more, "any other token", whose
      probability to the teacher is 1 - Σ_{v ∈ K} q_v (at least 1e-8). It is at most D, and 0 if D is.
    - ``none``: the divergence of the two distributions given that the token is in K: p and q with the sum 1 over K. It
      says nothing about the probability of K, and its gradient leaves that as it is.

    The limits are those of :func:`~megatron_rc.parallel.divergence.vocab_parallel_divergence`.

    Args:
        logits: [..., v/tp], the student's, any float dtype; as for
            :func:`~megatron_rc.parallel.divergence.vocab_parallel_divergence`.
        teacher_ids: [n], int64, the tokens K of all positions, one position after the other: distinct indices into the
            whole vocabulary, equal on all ranks of ``tp_group``, in any order.
        teacher_offsets: [tokens + 1], int64: position i, in the order of the flattened leading dimensions, has the ids
            from ``teacher_offsets[i]`` to ``teacher_offsets[i + 1]``. With no ids ``rest`` and ``none`` are 0.
        teacher_log_probs: [n], float, log q of these tokens in the teacher's distribution over the whole vocabulary,
            nats; no gradient.
        tp_group: the ranks that hold the other vocabulary rows.
        tail: see above.
        kind: ``reverse_kl``, ``forward_kl`` or ``jsd``.
        beta: β of ``jsd``. Default: 0.5.
        labels: [...], int64, the sampled tokens, for the tail ``sampled`` alone.
        teacher_label_log_probs: [...], float, log q of the sampled tokens, for ``sampled`` alone; no gradient. Not read
            where the token is in K.
        vocab_size: rows at and above it are padding and have probability 0. Default: all rows count.
        mask: [...], bool, True if the token counts; results and gradients of other tokens are 0. Default: all count;
            with labels, all but those of -100.
        temperature: divides the student's logits; > 0. The teacher's log-probs have the teacher's temperature.
        chunk_size: tokens that are worked on together; changes time and scratch, and results only by rounding.
        inplace_backward: the backward writes the gradient into the memory of the logits.

    Returns:
        [...], float32 (float64 for float64 logits), equal on all ranks of ``tp_group``, which must all use it alike.
        NaN at a counted position where an id comes twice, an id or a label is out of range, or the teacher's
        probabilities are NaN or have a sum above 1.001; everywhere if the offsets do not ascend from 0 to the number of
        ids.

    Memory: one chunk and its scratch, some numbers for each id, and in the backward the gradient. On a GPU the host
    waits for the device.

    Collectives over ``tp_group``, all in the forward: ``none`` one SUM of n numbers; ``rest`` one MAX of t and one SUM
    of t + n; ``sampled`` one MAX of t and one SUM of 2t + n.

    Raises:
        ValueError: another tail or kind, labels without the tail ``sampled`` or this without labels, shapes that do not
            fit, and the errors of :func:`~megatron_rc.parallel.divergence.vocab_parallel_divergence`.
    """
    call = _call_spec(tp_group, vocab_size, temperature, chunk_size, inplace_backward=inplace_backward)
    check_tensors({}, logits=logits)
    if not logits.is_floating_point() or not logits.dim():
        raise ValueError(
            f"logits are {logits.dtype} {tuple(logits.shape)}: expected floats, the vocabulary in the last dimension"
        )
    check_settings(call, logits.shape[-1])
    teacher = TopK.checked(
        ids=teacher_ids,
        offsets=teacher_offsets,
        log_probs=teacher_log_probs,
        labels=labels,
        label_log_probs=teacher_label_log_probs,
        mask=mask,
        tail=tail,
        kind=kind,
        beta=beta,
        tokens=logits.shape[:-1],
        device=logits.device,
    )
    entries = teacher.entries(call, logits.shape[-1])
    rows = logits.reshape(-1, logits.shape[-1])
    selected = selected_logits(rows, entries.support, SelectedSpec(call, _SUMMED[tail]))
    divergence = teacher.divergence(entries, selected)
    return divergence.to(arithmetic(logits.dtype)).view(logits.shape[:-1])


def linear_top_k_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_ids: Tensor,
    teacher_offsets: Tensor,
    teacher_log_probs: Tensor,
    tp_group: Group | None = None,
    *,
    tail: str,
    bias: Tensor | None = None,
    sequence_parallel: bool = False,
    gradient_accumulation: bool = False,
    kind: str = "reverse_kl",
    beta: float | None = None,
    labels: Tensor | None = None,
    teacher_label_log_probs: Tensor | None = None,
    vocab_size: int | None = None,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    chunk_size: int | None = None,
) -> Tensor:
    """The :func:`top_k_divergence` of softmax((hidden @ weightᵀ + bias) / temperature), without storing logits.

    Args:
        hidden: [..., h], the student's, any float dtype, equal on all ranks of ``tp_group``; with ``sequence_parallel``
            [s/tp, ..., h], this rank's slice of the first dimension.
        weight: [v/tp, h] of the same dtype: this rank's rows of the student's output layer.
        teacher_ids: [n], int64; this and all other arguments of :func:`top_k_divergence` are as there, with
            ``sequence_parallel`` of all slices.
        teacher_offsets: [tokens + 1], int64.
        teacher_log_probs: [n], float.
        tp_group: the ranks that hold the other vocabulary rows.
        tail: ``sampled``, ``rest`` or ``none``.
        bias: [v/tp].
        sequence_parallel: the hidden states are sliced over ``tp_group``, as Megatron's sequence parallelism does.
        gradient_accumulation: add the weight's gradient to ``weight.main_grad``, as in
            :func:`~megatron_rc.parallel.linear.linear_log_probs_and_entropy`.
        kind: ``reverse_kl``, ``forward_kl`` or ``jsd``.
        beta: β of ``jsd``. Default: 0.5.
        labels: [...], int64, for the tail ``sampled`` alone.
        teacher_label_log_probs: [...], float, for the tail ``sampled`` alone.
        vocab_size: rows at and above it are padding. Default: all rows count.
        mask: [...], bool.
        temperature: divides the logits; > 0.
        chunk_size: tokens that are multiplied together. Default: 256 on a CPU, 2048 on a GPU.

    Returns:
        [...], with ``sequence_parallel`` [s, ...]; differentiable in hidden, weight and bias.

    Memory: one chunk of logits and its scratch, and in the backward the gradients of hidden and weight. Collectives:
    those of :func:`top_k_divergence`, and for the products those of
    :func:`~megatron_rc.parallel.linear.linear_log_probs_and_entropy`. ``torch.autocast`` has no effect.

    Raises:
        ValueError: as :func:`top_k_divergence`, and shapes or dtypes of the output layer that do not fit together.
    """
    call = _call_spec(tp_group, vocab_size, temperature, chunk_size, inplace_backward=False)
    options = LinearOptions(call, sequence_parallel, gradient_accumulation)
    tokens = check_output_layer("", hidden, weight, bias, options)
    check_settings(call, weight.shape[0])
    teacher = TopK.checked(
        ids=teacher_ids,
        offsets=teacher_offsets,
        log_probs=teacher_log_probs,
        labels=labels,
        label_log_probs=teacher_label_log_probs,
        mask=mask,
        tail=tail,
        kind=kind,
        beta=beta,
        tokens=tokens,
        device=hidden.device,
    )
    entries = teacher.entries(call, weight.shape[0])
    rows = hidden.reshape(-1, hidden.shape[-1])
    spec = SelectedSpec(call, _SUMMED[tail])
    selected = linear_selected_logits(rows, weight, bias, entries.support, spec, options)
    divergence = teacher.divergence(entries, selected)
    return divergence.to(arithmetic(hidden.dtype)).view(tokens)


def _call_spec(
    tp_group: Group | None,
    vocab_size: int | None,
    temperature: float,
    chunk_size: int | None,
    *,
    inplace_backward: bool,
) -> CallSpec:
    """Return the CallSpec of a top-k divergence: the caller's settings; what only log-probs use is off."""
    return CallSpec(
        tp_group=tp_group,
        vocab_size=vocab_size,
        temperature=temperature,
        chunk_size=chunk_size,
        entropy=False,
        sum_squares=False,
        inplace_backward=inplace_backward,
        compile=False,
        separate_entropy=False,
        support_is_sorted=False,
    )


class Entries(NamedTuple):
    """The tokens whose logits are selected: K of each position, and behind them its sampled token, if there is one."""

    support: Support  # the ids; -1 for those that are not read
    of_k: Tensor  # [n] int64, the entry of each of the teacher's ids
    of_label: Tensor | None  # [t] int64, the entry of each position's sampled token; None without the tail "sampled"
    row_of_k: Tensor  # [n] int64, the position of each of the teacher's ids
    used: Tensor  # [t] bool, the position counts, and all its data are valid
    has_tail_sample: Tensor | None  # [t] bool, the sampled token is not in K; None without the tail "sampled"


@dataclass(frozen=True)
class TopK:
    """What a teacher says about t positions, and the divergence to make of it; checked."""

    ids: Tensor  # [n]
    offsets: Tensor  # [t + 1]
    log_probs: Tensor  # [n]
    labels: Tensor | None  # [t]; None without the tail "sampled"
    label_log_probs: Tensor | None  # [t]; None without the tail "sampled"
    counted: Tensor  # [t] bool
    tail: str
    kind: str
    beta: float

    @classmethod
    def checked(
        cls,
        *,
        ids: Tensor,
        offsets: Tensor,
        log_probs: Tensor,
        labels: Tensor | None,
        label_log_probs: Tensor | None,
        mask: Tensor | None,
        tail: str,
        kind: str,
        beta: float | None,
        tokens: torch.Size,
        device: torch.device,
    ) -> TopK:
        """Check a caller's arguments; ``tokens`` is the shape of the positions."""
        one_of("tail", tail, TAILS)
        check_kind_of_divergence("kind", kind, "beta", beta)
        check_tensors(
            {"labels": labels, "teacher_label_log_probs": label_log_probs, "mask": mask},
            teacher_ids=ids,
            teacher_offsets=offsets,
            teacher_log_probs=log_probs,
        )
        check_support(ids, offsets, tokens.numel(), of="tokens", name="teacher")
        if log_probs.shape != ids.shape or not log_probs.is_floating_point():
            raise ValueError(
                f"teacher_log_probs are {log_probs.dtype} {tuple(log_probs.shape)}: expected floats "
                f"{tuple(ids.shape)}, one for each of teacher_ids"
            )
        for name, value in (("labels", labels), ("teacher_label_log_probs", label_log_probs)):
            if (value is None) == (tail == "sampled"):
                remedy = "pass them" if value is None else "drop them"
                raise ValueError(f"tail={tail!r} and {name}: the sampled tokens are for tail='sampled' alone: {remedy}")
            if value is not None and value.shape != tokens:
                raise ValueError(f"{name} have shape {tuple(value.shape)}: expected {tuple(tokens)} of logits")
        check_mask_of("logits", tokens, mask)
        if mask is None:
            mask = torch.ones(tokens, dtype=torch.bool, device=device) if labels is None else labels != IGNORED_LABEL
        return cls(
            ids=ids.long(),
            offsets=offsets,
            log_probs=log_probs.detach().double(),
            labels=None if labels is None else labels.reshape(-1).long(),
            label_log_probs=None if label_log_probs is None else label_log_probs.detach().reshape(-1).double(),
            counted=mask.reshape(-1),
            tail=tail,
            kind=kind,
            beta=DEFAULT_BETA if beta is None else beta,
        )

    def entries(self, call: CallSpec, width: int) -> Entries:
        """The tokens whose logits are needed; ``width`` is the number of columns of this rank's logits."""
        support = call.support(self.ids, self.offsets, width)
        assert support is not None
        row = support.row_of_entries()
        used = self.counted & self._valid(support, row)
        if self.labels is None or self.label_log_probs is None:
            of_k = torch.arange(len(row), device=row.device)
            used_ids = torch.where(used[row], support.ids, -1)
            return Entries(replace(support, ids=used_ids), of_k, None, row, used, None)

        num_equal = torch.zeros_like(support.counts)
        is_in_k = num_equal.index_add_(0, row, (support.ids == self.labels[row]).to(num_equal.dtype)) > 0
        is_in_vocabulary = (self.labels >= 0) & (self.labels < support.vocab_size)
        used = used & is_in_vocabulary & (is_in_k | (self.label_log_probs.exp() <= MOST_MASS))
        has_tail_sample = used & ~is_in_k
        used_ids = torch.where(used[row], support.ids, -1)
        # Each position's label stands behind its ids, which move by one place for each position before.
        of_k = torch.arange(len(row), device=row.device) + row
        of_label = support.offsets[1:] + torch.arange(len(used), device=row.device)
        ids = used_ids.new_empty(len(row) + len(used))
        ids[of_k] = used_ids
        ids[of_label] = torch.where(has_tail_sample, self.labels, -1)
        positions = torch.arange(len(used) + 1, device=row.device)
        with_labels = replace(support, ids=ids, offsets=support.offsets + positions)
        return Entries(with_labels, of_k, of_label, row, used, has_tail_sample)

    def _valid(self, support: Support, row: Tensor) -> Tensor:
        """Whether each position's ids are distinct and in the vocabulary, and the sum of q at most 1, [t] bool."""
        ids = support.ids.clamp(-1, support.vocab_size)
        is_wrong = (ids < 0) | (ids == support.vocab_size)
        # Ids of all positions in one order: equal ids of one position become neighbours.
        keys, order = torch.add(ids, row, alpha=support.vocab_size + 2).sort()
        is_wrong[order[1:]] |= keys[1:] == keys[:-1]
        num_wrong = torch.zeros_like(support.counts).index_add_(0, row, is_wrong.to(support.counts.dtype))
        mass = self.log_probs.new_zeros(len(support.counts)).index_add_(0, row, self.log_probs.exp())
        # Written so that NaN is not at most 1.
        return (num_wrong == 0) & (mass <= MOST_MASS) & support.valid

    def divergence(self, entries: Entries, selected: Selected) -> Tensor:
        """The divergence of each position from the selected logits, [t] float64, in their graph."""
        row = entries.row_of_k
        used = entries.used
        num_tokens = len(used)
        x = selected.x[entries.of_k]
        has_no_mass = selected.has_no_mass[entries.of_k]
        log_q = torch.where(used[row], self.log_probs, 0)
        # Rows that do not count may hold anything.
        log_sum = torch.where(used, selected.log_sum, 0)

        if self.tail == "sampled":
            log_normalizer = log_sum
        else:
            log_k, k_is_empty = _log_sum_exp(x, has_no_mass, row, num_tokens)
            both = torch.logaddexp(log_k, log_sum)
            rest_is_empty = selected.is_empty if self.tail == "rest" else torch.ones_like(used)
            log_normalizer = torch.where(rest_is_empty, log_k, torch.where(k_is_empty, log_sum, both))
        if self.tail == "none":
            log_mass, _ = _log_sum_exp(log_q, log_q == -torch.inf, row, num_tokens)
            log_q = log_q - log_mass[row]

        terms = _terms(x - log_normalizer[row], has_no_mass, log_q, self)
        total = terms.value.new_zeros(num_tokens).index_add(0, row, terms.value)
        num_infinite = torch.zeros(num_tokens, dtype=torch.int64, device=row.device)
        num_infinite = num_infinite.index_add(0, row, terms.is_infinite.long())
        if self.tail == "rest":
            log_q_rest = self._log_rest(log_q, row, rest_is_empty)
            rest = _terms(log_sum - log_normalizer, rest_is_empty, log_q_rest, self)
            total = total + rest.value
            num_infinite = num_infinite + rest.is_infinite
        if entries.of_label is not None:
            sample = self._tail_sample(entries, selected, log_normalizer)
            total = total + sample.value
            num_infinite = num_infinite + sample.is_infinite

        is_infinite = (num_infinite > 0) & used
        if self.kind == "reverse_kl":
            # Its gradient would be infinite too, and is 0.
            total = torch.where(is_infinite, torch.inf, total)
        else:
            total = total + torch.where(is_infinite, torch.inf, 0)
        total = torch.where(used, total, 0)
        return torch.where(self.counted & ~used, torch.nan, total)

    def _log_rest(self, log_q: Tensor, row: Tensor, rest_is_empty: Tensor) -> Tensor:
        """The log of the teacher's probability of any other token, [t]; -inf where there is no other token."""
        mass = log_q.new_zeros(len(rest_is_empty)).index_add_(0, row, log_q.exp())
        # 1 - Σ q is known to about 1e-8, so that so little may be nothing.
        rest = (1 - mass).clamp(min=LEAST_REST)
        return torch.where(rest_is_empty & (rest <= LEAST_REST), 0, rest).log()

    def _tail_sample(self, entries: Entries, selected: Selected, log_normalizer: Tensor) -> _Terms:
        """f(p_y, q_y) / p_y of the sampled token y, [t], with the gradient (∂f/∂log p_y) / p_y · ∇log p_y.

        It is 0 where y is in K, and where the student gives y the probability 0, so that it is no sample of its.
        """
        assert entries.of_label is not None
        assert entries.has_tail_sample is not None
        assert self.label_log_probs is not None
        is_sample = entries.has_tail_sample & ~selected.has_no_mass[entries.of_label]
        log_p = torch.where(is_sample, selected.x[entries.of_label] - log_normalizer, 0)
        log_q = torch.where(is_sample, self.label_log_probs, 0)
        is_infinite = (log_q == -torch.inf) & (self.kind == "reverse_kl")
        log_ratio = log_q - log_p.detach()
        ratio = log_ratio.clamp(max=RATIO_LIMIT).exp()  # q/p
        log_ratio = torch.where(log_ratio == -torch.inf, 0, log_ratio)  # then q is 0, and log q is not needed

        if self.kind == "reverse_kl":
            value = -log_ratio
            slope = 1 - log_ratio
        elif self.kind == "forward_kl":
            value = ratio * log_ratio
            slope = -ratio
        else:
            log_mixture = torch.log1p(self.beta * (ratio - 1))  # log(m/p)
            value = self.beta * ratio * (log_ratio - log_mixture) - (1 - self.beta) * log_mixture
            slope = -(1 - self.beta) * log_mixture
        value = torch.where(is_sample, value + slope * (log_p - log_p.detach()), 0)
        return _Terms(value, is_infinite)


class _Terms(NamedTuple):
    """Summands of a divergence."""

    value: Tensor  # float64, finite, in the graph of log p
    is_infinite: Tensor  # bool, the summand is +inf, and its ``value`` anything


def _terms(log_p: Tensor, has_no_mass: Tensor, log_q: Tensor, teacher: TopK) -> _Terms:
    """f(p, q) of some events, one number each.

    Args:
        log_p: log p, differentiated; any finite number where ``has_no_mass`` is True, which says that p is 0.
        has_no_mass: bool.
        log_q: log q; may be -inf.
        teacher: says the kind, and β.
    """
    p = torch.where(has_no_mass, 0, torch.where(has_no_mass, 0, log_p).exp())
    q = log_q.exp()
    q_is_zero = log_q == -torch.inf
    log_q = torch.where(q_is_zero, 0, log_q)  # a number that is multiplied by 0
    if teacher.kind == "reverse_kl":
        return _Terms(p * (log_p - log_q), is_infinite=q_is_zero & (p > 0))
    if teacher.kind == "forward_kl":
        return _Terms(q * (log_q - log_p), is_infinite=has_no_mass & (q > 0))
    mixture = teacher.beta * q + (1 - teacher.beta) * p
    log_mixture = torch.where(mixture == 0, 1, mixture).log()
    value = teacher.beta * q * (log_q - log_mixture) + (1 - teacher.beta) * p * (log_p - log_mixture)
    return _Terms(value, is_infinite=torch.zeros_like(has_no_mass))


def _log_sum_exp(values: Tensor, has_no_mass: Tensor, row: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Log Σ exp of the values of each row, [num_rows], with a 0 in place of -inf; and whether it is -inf, bool.

    Args:
        values: [entries], differentiated.
        has_no_mass: [entries] bool, the value is -inf, whatever stands there.
        row: [entries] int64.
        num_rows: number of rows; a row may have no entry.
    """
    largest = values.new_full((num_rows,), -torch.inf)
    largest.scatter_reduce_(0, row, values.detach().masked_fill(has_no_mass, -torch.inf), "amax")
    origin = torch.where(largest == -torch.inf, 0, largest)
    exp = torch.where(has_no_mass, 0, torch.where(has_no_mass, 0, values - origin[row]).exp())
    total = exp.new_zeros(num_rows).index_add(0, row, exp)
    is_empty = total == 0
    log_sum = torch.where(is_empty, 1, total).log() + origin
    return torch.where(is_empty, 0, log_sum), is_empty
