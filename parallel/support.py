"""Log-probs over the tokens that an engine kept, such as by top-p: statistics and gradients of a few logits of a row.

The kept tokens of all positions are a list of ids with offsets (CSR form). Only their logits are gathered: nothing has
the logits' size. This module knows no other ranks; statistics can be merged over ranks, as those of whole rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from megatron_rc.parallel.softmax import LOWEST_LOG_PI, RowGradients, SoftmaxOptions, arithmetic

BLOCK_ENTRIES = 2**18  # ids of a block of rows on a CPU: their logits are gathered while the cache has the rows
# Sums over kept tokens are taken relative to the largest logit of the row. If such a sum is smaller than this, squares
# in it lose digits in float32, and the largest kept logit is looked for.
LEAST_RELATIVE_SUM = 1e-8


def check_support(ids: Tensor | None, offsets: Tensor | None, tokens: int) -> None:
    """Raise ValueError for ids and offsets that are not both lists of integers, or not of this many tokens."""
    if ids is None and offsets is None:
        return
    for name, value in (("support_ids", ids), ("support_offsets", offsets)):
        if value is None:
            raise ValueError(f"{name} is None: pass support_ids and support_offsets together")
        if value.dim() != 1 or value.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} is {value.dtype} {tuple(value.shape)}: expected a list of int64, or int32")
    if offsets is not None and len(offsets) != tokens + 1:
        raise ValueError(
            f"support_offsets has {len(offsets)} numbers: expected {tokens + 1}, one more than there are labels"
        )


@dataclass(frozen=True)
class Support:
    """The kept tokens of some rows of logits."""

    ids: Tensor  # [entries], ids in the whole vocabulary, those of a row behind those of the row before
    offsets: Tensor  # [rows + 1], int64, from 0 to the number of entries, ascending
    valid: Tensor  # bool, whether the caller's offsets were like this; if not, all log-probs are NaN
    vocabulary: int  # number of ids
    first: int  # id of the first local column
    is_sorted: bool  # the ids of each row ascend, and none comes twice

    @classmethod
    def make(cls, ids: Tensor, offsets: Tensor, vocabulary: int, first: int, *, is_sorted: bool = False) -> Support:
        """The kept tokens from a caller's ids and offsets, whose values are not read on the host.

        ``is_sorted``: the caller says that the ids of each row ascend and lie in the vocabulary, so that nothing is
        sorted. Where that is not so, ``valid`` is False on a GPU; on a CPU the ids are looked at in any case.
        """
        offsets = offsets.long()
        valid = (offsets[0] == 0) & (offsets[-1] == len(ids)) & (offsets.diff() >= 0).all()
        if len(offsets) == 1:
            ids = ids[:0]
        offsets = torch.where(valid, offsets, 0)
        # With any offsets no entry lies outside. To assign the number would copy it to a GPU, and the host would wait.
        offsets[-1:].fill_(len(ids))
        support = cls(ids, offsets, valid, vocabulary, first, is_sorted)
        if is_sorted and waits(ids) and len(ids):
            ascends = (support._keys(support._rows()).diff() > 0).all() & support._inside(ids).all()
            support = replace(support, valid=valid & ascends)
        return support

    @cached_property
    def counts(self) -> Tensor:
        """[rows]: number of entries of each row."""
        return self.offsets.diff()

    @property
    def supported(self) -> Tensor:
        """[rows], bool: the row has kept tokens; the other rows count the whole vocabulary."""
        return self.counts > 0

    @cached_property
    def _bounds(self) -> list[int]:
        return list(self.offsets.tolist())

    def permuted(self, positions: Tensor) -> Support:
        """The rows in another order: row r becomes the row that was ``positions[r]``."""
        counts = self.counts[positions]
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        moved = (self.offsets[positions] - offsets[:-1]).repeat_interleave(counts, output_size=len(self.ids))
        ids = self.ids[moved.add_(torch.arange(len(self.ids), device=self.ids.device))]
        return replace(self, ids=ids, offsets=offsets)

    def at(self, parts: Sequence[slice]) -> Support:
        """The kept tokens of slices of the rows. All rows need no look at the offsets on the host."""
        if [(part.start, part.stop) for part in parts] == [(0, len(self.counts))]:
            return self
        bounds = self._bounds
        ids = torch.cat([self.ids[bounds[part.start] : bounds[part.stop]] for part in parts])
        counts = torch.cat([self.counts[part] for part in parts])
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return replace(self, ids=ids, offsets=offsets)

    def blocks(self, rows: Tensor, options: SoftmaxOptions) -> Iterator[slice]:
        """Slices of the rows that are worked on together: all on a GPU; on a CPU whole chunks with some entries."""
        size = len(rows)
        if not waits(rows) and size:
            chunk = len(rows[next(options.chunks(rows))[0]])
            size = chunk * max(1, BLOCK_ENTRIES * len(rows) // (chunk * max(1, len(self.ids))))
        for start in range(0, max(1, len(rows)), max(1, size)):
            yield slice(start, min(start + size, len(rows)))

    def statistics(
        self, rows: Tensor, labels: Tensor, options: SoftmaxOptions, largest: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(the statistics of each row over its kept local columns, whether the row's label can be scored).

        The statistics: see :func:`~megatron_rc.parallel.softmax.row_statistics`; m is -inf without a kept local
        column. An id counts once, in any order. A label can be scored if the row has no ids, or if it is one of them
        and all lie in the vocabulary.

        ``largest``, [rows], is the largest local logit of each row, if it is known: m may then be that logit, although
        it is not kept, which saves the search for the largest kept one. On a CPU only.
        """
        dtype = arithmetic(rows.dtype)
        if not len(self.ids):
            count = 2 + options.entropy + options.squares
            nothing = torch.zeros(count, len(rows), dtype=dtype, device=rows.device)
            nothing[0] = -torch.inf
            return nothing, self.valid.expand(len(rows))

        row, ids, first, scored = self._sorted(labels)
        column, local = _local(ids, self.first, options)
        values = _gathered(rows, row, column).to(dtype)
        for counted in (local, first):
            if counted is not None:
                values = torch.where(counted, values, -torch.inf)

        if largest is not None:
            has_local = self.supported if local is None else self._reduced(local.to(dtype), "max", 0) > 0
            sums = self._sums(values, row, largest, options)
            # False for NaN, which the largest logit may be although no kept one is.
            if bool(((sums[0] >= LEAST_RELATIVE_SUM) | ~has_local).all()):
                origin = torch.where(has_local, largest, -torch.inf)
                return torch.stack([origin, *sums]), scored

        maximum = self._reduced(values, "max", -torch.inf)
        sums = self._sums(values, row, torch.where(maximum == -torch.inf, 0, maximum), options)
        return torch.stack([maximum, *sums]), scored

    def _sums(self, values: Tensor, row: Tensor, origin: Tensor, options: SoftmaxOptions) -> list[Tensor]:
        """[rows] each: Σ exp(x), and if asked for Σ exp(x) x and Σ exp(x)², with x the values less the row's origin.

        ``values`` and ``row``, [entries], are the kept logits and their rows.
        """
        shifted = origin.index_select(0, row)
        torch.sub(values, shifted, out=shifted)
        shifted.mul_(options.inverse_temperature).clamp_(min=LOWEST_LOG_PI)
        exp = shifted.exp()
        terms = [exp]
        if options.entropy:
            terms.append(shifted.mul_(exp))
        if options.squares:
            terms.append(exp.square())
        # In float64, because the entries of a row are added one after the other.
        return [self._reduced(term.double(), "sum", 0).to(values.dtype) for term in terms]

    def _sorted(self, labels: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """(row and id of each entry, whether it is the first with its id, whether each row's label can be scored).

        The ids ascend in each row, and are clamped to one outside of the vocabulary. Without an id that comes twice,
        the third is None.
        """
        row, span = self._rows(), self._span
        ids = self.ids.long()
        key = self._keys(row)
        first = None
        # Without a look at the ids, which the host would wait for, the caller's word decides.
        is_sorted = self.is_sorted if waits(key) else self._is_sorted(key, ids)
        if not is_sorted:
            ids = ids.clamp(-1, self.vocabulary)
            key = torch.add(ids, row, alpha=span).sort().values
            first = torch.cat([key.new_ones(1, dtype=torch.bool), key[1:] != key[:-1]])
            ids = torch.sub(key, row, alpha=span)
        own = labels.long().clamp(-1, self.vocabulary) + span * torch.arange(len(labels), device=key.device)
        kept = key[torch.searchsorted(key, own).clamp_(max=len(key) - 1)] == own
        kept &= self._inside(ids)
        return row, ids, first, (kept | ~self.supported) & self.valid

    def _is_sorted(self, key: Tensor, ids: Tensor) -> bool:
        """Whether the ids of each row ascend, none comes twice, and all lie in the vocabulary."""
        return bool((key[1:] > key[:-1]).all()) and bool(self._inside(ids).all())

    def _inside(self, ids: Tensor) -> Tensor:
        """[rows], bool: the first and the last id of the row lie in the vocabulary, or there is none."""
        lowest, highest = (ids[end.clamp(0, len(ids) - 1)] for end in (self.offsets[:-1], self.offsets[1:] - 1))
        return (lowest >= 0) & (highest < self.vocabulary) | ~self.supported

    @property
    def _span(self) -> int:
        """Distance of the keys of two rows: ids from -1 to the size of the vocabulary fit in between."""
        return self.vocabulary + 2

    def _keys(self, row: Tensor) -> Tensor:
        """[entries]: a number for each entry that ascends with its ``row``, and in a row with the id."""
        return torch.add(self.ids.long(), row, alpha=self._span)

    def _rows(self) -> Tensor:
        """[entries]: the row of each entry."""
        return torch.repeat_interleave(self.counts, output_size=len(self.ids))

    def _reduced(self, values: Tensor, kind: str, initial: float) -> Tensor:
        """[rows]: the values of each row's entries, reduced."""
        return torch.segment_reduce(values, kind, offsets=self.offsets, initial=initial, unsafe=True)

    def gradient(self, rows: Tensor, factors: RowGradients, options: SoftmaxOptions) -> KeptGradient:
        """The gradient in the kept local columns, from logits that may be overwritten afterwards."""
        row, exists = self._rows(), None
        column, local = _local(self.ids.long(), self.first, options)
        if local is not None and len(row) and waits(rows):
            # Each entry that is not local becomes a copy of one that is, if there is one.
            one = local.byte().argmax(keepdim=True)
            row, column = (torch.where(local, places, places[one]) for places in (row, column))
            exists = local.any()
        elif local is not None and len(row):
            source = local.nonzero().squeeze(1)
            row, column = row[source], column[source]
        logits = _gathered(rows, row, column).to(factors.offset.dtype)
        values = _entry_gradient(logits, row, factors, options)
        if waits(rows) or not bool(factors.counted.all()):
            values = torch.where(factors.counted.index_select(0, row), values, 0)
        return KeptGradient(row, column, values, exists, factors.column, factors.here & self.supported, factors.target)


@dataclass(frozen=True)
class KeptGradient:
    """The gradient in the kept local columns; the same column may come more than once."""

    row: Tensor  # [entries], int64
    column: Tensor  # [entries], int64
    values: Tensor  # [entries], in the arithmetic's dtype
    exists: Tensor | None  # bool, one number: False if no entry is a kept local column; None: all are
    label: Tensor  # [rows], int64, the local column of the label
    here: Tensor  # [rows], bool, the row has kept tokens, and its label is on this rank
    target: Tensor  # [rows], the gradient in the label's column

    def write(self, out: Tensor) -> None:
        """Write it to the gradient at the logits, over the values that the columns have."""
        if len(self.row):
            index = _cells(out, self.row, self.column)
            memory = _memory(out)
            values = self.values.to(out.dtype)
            if self.exists is not None:
                values = torch.where(self.exists, values, memory[index])
            memory.index_copy_(0, index, values)
        cells = (torch.arange(len(out), device=out.device), self.label)
        out[cells] = torch.where(self.here, self.target.to(out.dtype), out[cells])


def waits(tensor: Tensor) -> bool:
    """Whether the host would wait for a value of the tensor: on a GPU."""
    return tensor.is_cuda


def _entry_gradient(logits: Tensor, row: Tensor, factors: RowGradients, options: SoftmaxOptions) -> Tensor:
    """[entries]: π (constant + log_pi · log π + pi · π)."""
    log_pi = logits.sub(factors.offset.index_select(0, row)).mul_(options.inverse_temperature)
    pi = log_pi.exp()
    factor = factors.constant.index_select(0, row)
    if factors.log_pi is not None:
        factor += log_pi.clamp_(min=LOWEST_LOG_PI).mul_(factors.log_pi.index_select(0, row))
    if factors.pi is not None:
        factor += factors.pi.index_select(0, row).mul_(pi)
    return factor.mul_(pi)


def _local(ids: Tensor, first: int, options: SoftmaxOptions) -> tuple[Tensor, Tensor | None]:
    """(local column of each id, or any if it is not local; whether it is local, or None if all are)."""
    column = ids - first if first else ids
    if not waits(ids) and len(ids):
        lowest, highest = column.aminmax()
        if lowest >= 0 and highest < options.columns:
            return column, None
    inside = column.clamp(0, max(options.columns, 1) - 1)
    return inside, inside == column if options.columns else torch.zeros_like(column, dtype=torch.bool)


def _memory(rows: Tensor) -> Tensor:
    """The memory of the rows as one dimension: indices of one dimension are several times as fast as those of two."""
    last = sum((size - 1) * stride for size, stride in zip(rows.shape, rows.stride(), strict=True))
    return rows.as_strided((last + 1,), (1,))


def _cells(rows: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """[entries]: indices into :func:`_memory`."""
    column = column if rows.stride(1) == 1 else column * rows.stride(1)
    return torch.add(column, row, alpha=rows.stride(0))


def _gathered(rows: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """[entries]: the logits in these rows and columns, a copy."""
    return _memory(rows).index_select(0, _cells(rows, row, column))
