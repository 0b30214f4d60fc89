"""Softmax over the tokens that the engine kept at each position, such as by top-p: statistics and gradients of rows.

A row holds the logits of one position over this rank's columns of the vocabulary, which are called local. The kept
tokens of all rows are one list of ids, with offsets that say where each row's ids begin and end (CSR form); an entry is
one id of the list. Only the logits of entries are gathered, so that nothing here has the logits' size. This module
knows no other ranks: its statistics can be merged over ranks, as those of :mod:`megatron_rc.parallel.softmax`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from megatron_rc.parallel.softmax import LOWEST_LOG_PI, RowGradients, SoftmaxOptions, arithmetic

BLOCK_ENTRIES = 2**18  # entries of a block of rows on a CPU: their logits are gathered while the cache has the rows
# Sums over kept tokens are taken relative to the largest logit of the row. If such a sum is smaller than this, squares
# in it lose digits in float32, and the largest kept logit is looked for.
LEAST_RELATIVE_SUM = 1e-8


def check_support(
    ids: Tensor | None, offsets: Tensor | None, tokens: int, *, of: str = "labels", name: str = "support"
) -> None:
    """Check the shapes and dtypes of a caller's kept tokens; None for both means that there are none.

    The arguments are called ``name``_ids and ``name``_offsets, and the tokens ``of``, in messages.

    Raises:
        ValueError: one of them without the other, anything but lists of integers, or a number of offsets that does not
            fit the number of ``tokens``.
    """
    if ids is None and offsets is None:
        return
    for argument, value in ((f"{name}_ids", ids), (f"{name}_offsets", offsets)):
        if value is None:
            raise ValueError(f"{argument} is None: pass {name}_ids and {name}_offsets together")
        if value.dim() != 1 or value.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{argument} is {value.dtype} {tuple(value.shape)}: expected a list of int64, or int32")
    if offsets is not None and len(offsets) != tokens + 1:
        raise ValueError(
            f"{name}_offsets has {len(offsets)} numbers: expected {tokens + 1}, one more than there are {of}"
        )


def host_waits_for(tensor: Tensor) -> bool:
    """Return whether the host would wait for a value of the tensor: True on a GPU, where values are not looked at."""
    return tensor.is_cuda


@dataclass(frozen=True)
class Support:
    """The kept tokens of some rows of logits."""

    ids: Tensor  # [entries], ids in the whole vocabulary, those of a row behind those of the row before
    offsets: Tensor  # [rows + 1], int64, ascending from 0 to the number of entries
    valid: Tensor  # bool, one value; False if the caller's offsets, or on a GPU the promised order, were wrong
    vocab_size: int  # number of ids in the whole vocabulary
    first_id: int  # id of the first local column
    is_sorted: bool  # the caller's word that the ids of each row ascend, and none comes twice

    @classmethod
    def make(cls, ids: Tensor, offsets: Tensor, vocab_size: int, first_id: int, *, is_sorted: bool = False) -> Support:
        """Make a support from a caller's ids and offsets; on a GPU without a look at their values.

        ``is_sorted`` is the caller's word that the ids of each row ascend, without an id that comes twice, and lie in
        the vocabulary. A GPU then sorts nothing, and ``valid`` is False where the word is wrong. A CPU looks at the ids
        in any case, and sorts them if needed. Wrong offsets make ``valid`` False everywhere.
        """
        offsets = offsets.long()
        valid = (offsets[0] == 0) & (offsets[-1] == len(ids)) & (offsets.diff() >= 0).all()
        if len(offsets) == 1:
            # Without rows, no entry belongs to one.
            ids = ids[:0]
        # Wrong offsets could be indices out of range: instead the last row gets all entries, and the others none.
        offsets = torch.where(valid, offsets, 0)
        # By fill_, because the assignment of a number would copy it to a GPU, and the host would wait.
        offsets[-1:].fill_(len(ids))
        support = cls(
            ids=ids,
            offsets=offsets,
            valid=valid,
            vocab_size=vocab_size,
            first_id=first_id,
            is_sorted=is_sorted,
        )

        # A CPU looks at the ids later, and sorts them where they are not sorted.
        if is_sorted and host_waits_for(ids) and len(ids):
            ascends = (support._keys(support.row_of_entries()).diff() > 0).all()
            in_vocabulary = support._ends_in_vocabulary(ids).all()
            support = replace(support, valid=valid & ascends & in_vocabulary)
        return support

    @cached_property
    def counts(self) -> Tensor:
        """Number of entries of each row, [rows]."""
        return self.offsets.diff()

    @property
    def has_kept_tokens(self) -> Tensor:
        """Whether each row has kept tokens, [rows] bool; the others count the whole vocabulary."""
        return self.counts > 0

    @cached_property
    def _offsets_on_host(self) -> list[int]:
        return list(self.offsets.tolist())

    def permuted(self, positions: Tensor) -> Support:
        """The rows in another order: row r of the result is the row ``positions[r]`` of this support."""
        counts = self.counts[positions]
        offsets = _offsets_of(counts)
        # All entries of a row move by the same distance: from their place in the new list to that in the old one.
        distance = self.offsets[positions] - offsets[:-1]
        old_place = distance.repeat_interleave(counts, output_size=len(self.ids))
        old_place += torch.arange(len(self.ids), device=self.ids.device)
        return replace(self, ids=self.ids[old_place], offsets=offsets)

    def at(self, parts: Sequence[slice]) -> Support:
        """The kept tokens of some rows, given as slices: first the rows of the first slice, then those of the next.

        The offsets are read on the host, unless one slice has all rows.
        """
        if [(part.start, part.stop) for part in parts] == [(0, len(self.counts))]:
            return self
        bounds = self._offsets_on_host
        ids = torch.cat([self.ids[bounds[part.start] : bounds[part.stop]] for part in parts])
        counts = torch.cat([self.counts[part] for part in parts])
        return replace(self, ids=ids, offsets=_offsets_of(counts))

    def blocks(self, rows: Tensor, options: SoftmaxOptions) -> Iterator[slice]:
        """Yield the slices of the rows to work on together, at least one: their entries need scratch memory.

        On a GPU all rows; on a CPU as many whole chunks (see :class:`~megatron_rc.parallel.softmax.SoftmaxOptions`) as
        have about :data:`BLOCK_ENTRIES` entries.
        """
        num_rows = len(rows)
        if num_rows == 0 or host_waits_for(rows):
            yield slice(0, num_rows)
            return

        first_chunk, _ = next(options.chunks(rows))
        rows_per_chunk = first_chunk.stop - first_chunk.start
        # The mean number of entries of a chunk is rows_per_chunk * len(ids) / num_rows.
        chunks_per_block = max(1, BLOCK_ENTRIES * num_rows // (rows_per_chunk * max(1, len(self.ids))))
        rows_per_block = rows_per_chunk * chunks_per_block
        for start in range(0, num_rows, rows_per_block):
            yield slice(start, min(start + rows_per_block, num_rows))

    def statistics(
        self, rows: Tensor, labels: Tensor, options: SoftmaxOptions, largest: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Statistics of each row over its kept local columns, in which an id that comes twice counts once.

        Args:
            rows: [rows, v/tp], the logits, of any float dtype.
            labels: [rows], indices into the whole vocabulary, of any value.
            options: ``entropy`` and ``squares`` say which statistics are needed.
            largest: [rows], the largest local logit of each row, where it is known; on a CPU only. The sums may then be
                relative to it, although it was not kept, which saves the search for the largest kept logit.

        Returns:
            The statistics, [2 to 4, rows], as :func:`~megatron_rc.parallel.softmax.row_statistics` returns them; m is
            -inf without a kept local column. And whether each label can be scored, [rows] bool: the row has no kept
            tokens, or the label is one of them and all lie in the vocabulary.
        """
        dtype = arithmetic(rows.dtype)
        if not len(self.ids):
            num_statistics = 2 + options.entropy + options.squares
            statistics = torch.zeros(num_statistics, len(rows), dtype=dtype, device=rows.device)
            statistics[0] = -torch.inf
            return statistics, self.valid.expand(len(rows))

        entries, scorable = self._look_up(labels)
        column, is_local = _local_columns(entries.ids, self.first_id, options)
        logits = _gathered(rows, entries.row, column).to(dtype)
        # An entry that does not count gets the probability 0.
        if is_local is not None:
            logits = torch.where(is_local, logits, -torch.inf)
        if entries.is_first is not None:
            logits = torch.where(entries.is_first, logits, -torch.inf)

        if largest is not None:
            if is_local is None:
                has_local_entry = self.has_kept_tokens
            else:
                has_local_entry = self._reduce_entries(is_local.to(dtype), "max", 0) > 0
            sums = self._sums(logits, entries.row, largest, options)
            # Written so that NaN is not large enough: the largest logit may be NaN, although no kept one is.
            is_large_enough = sums[0] >= LEAST_RELATIVE_SUM
            if bool((is_large_enough | ~has_local_entry).all()):
                maximum = torch.where(has_local_entry, largest, -torch.inf)
                return torch.stack([maximum, *sums]), scorable

        maximum = self._reduce_entries(logits, "max", -torch.inf)
        origin = torch.where(maximum == -torch.inf, 0, maximum)  # -inf minus -inf would be NaN
        sums = self._sums(logits, entries.row, origin, options)
        return torch.stack([maximum, *sums]), scorable

    def gradient(self, rows: Tensor, factors: RowGradients, options: SoftmaxOptions) -> KeptGradient:
        """The gradient in the kept local columns.

        It is computed before it is written, because the caller may write the gradient in all other columns over the
        logits.

        Args:
            rows: [rows, v/tp], the logits.
            factors: the factors of the gradient of each row.
            options: the settings for reading the logits.
        """
        row = self.row_of_entries()
        column, is_local = _local_columns(self.ids.long(), self.first_id, options)
        any_local = None
        if is_local is not None and len(row):
            if host_waits_for(rows):
                # The host does not know how many entries are local, so none can be removed. Each that is not local
                # becomes a copy of the first that is: it writes the same value to the same place once more.
                first_local = is_local.byte().argmax(keepdim=True)
                row = torch.where(is_local, row, row[first_local])
                column = torch.where(is_local, column, column[first_local])
                any_local = is_local.any()
            else:
                local_entries = is_local.nonzero().squeeze(1)
                row = row[local_entries]
                column = column[local_entries]

        logits = _gathered(rows, row, column).to(factors.log_normalizer.dtype)
        values = _entry_gradient(logits, row, factors, options)
        if host_waits_for(rows) or not bool(factors.counted.all()):
            values = torch.where(factors.counted.index_select(0, row), values, 0)
        return KeptGradient(
            row=row,
            column=column,
            values=values,
            any_local=any_local,
            label_column=factors.label_column,
            owns_label=factors.owns_label & self.has_kept_tokens,
            label_gradient=factors.label_gradient,
        )

    def _sums(self, logits: Tensor, row: Tensor, origin: Tensor, options: SoftmaxOptions) -> list[Tensor]:
        """Σ exp(x), with ``entropy`` Σ exp(x) x, with ``squares`` Σ exp(x)²: [rows] each.

        x is an entry's logit less its row's ``origin``, divided by the temperature. ``logits`` and ``row`` are of the
        entries, [entries]; ``origin`` is [rows].
        """
        # In place, because there may be many entries: the same memory holds the origins, then x, then exp(x) x.
        shifted = origin.index_select(0, row)
        torch.sub(logits, shifted, out=shifted)
        shifted.mul_(options.inverse_temperature).clamp_(min=LOWEST_LOG_PI)
        exp = shifted.exp()
        terms = [exp]
        if options.entropy:
            terms.append(shifted.mul_(exp))
        if options.squares:
            terms.append(exp.square())
        # In float64, because the entries of a row are added one after the other.
        return [self._reduce_entries(term.double(), "sum", 0).to(logits.dtype) for term in terms]

    def _look_up(self, labels: Tensor) -> tuple[_SortedEntries, Tensor]:
        """Return the entries sorted by id in each row, and whether each row's label can be scored, [rows] bool."""
        row = self.row_of_entries()
        ids = self.ids.long()
        keys = self._keys(row)
        is_first = None
        # Without a look at the ids, which the host would wait for, the caller's word decides.
        is_sorted = self.is_sorted if host_waits_for(keys) else self._are_sorted(keys, ids)
        if not is_sorted:
            # Only after the clamp is each key between those of the rows before and after, as the sort needs it.
            ids = ids.clamp(-1, self.vocab_size)
            keys = torch.add(ids, row, alpha=self._key_distance).sort().values
            is_first = torch.cat([keys.new_ones(1, dtype=torch.bool), keys[1:] != keys[:-1]])
            ids = torch.sub(keys, row, alpha=self._key_distance)

        label_rows = torch.arange(len(labels), device=keys.device)
        label_keys = labels.long().clamp(-1, self.vocab_size) + self._key_distance * label_rows
        place = torch.searchsorted(keys, label_keys).clamp_(max=len(keys) - 1)
        is_kept = keys[place] == label_keys
        is_kept &= self._ends_in_vocabulary(ids)
        scorable = (is_kept | ~self.has_kept_tokens) & self.valid
        return _SortedEntries(row, ids, is_first), scorable

    def _are_sorted(self, keys: Tensor, ids: Tensor) -> bool:
        """Return whether the ids of each row ascend, none comes twice, and all lie in the vocabulary."""
        return bool((keys[1:] > keys[:-1]).all()) and bool(self._ends_in_vocabulary(ids).all())

    def _ends_in_vocabulary(self, ids: Tensor) -> Tensor:
        """Whether the first and the last id of each row lie in the vocabulary, [rows] bool; True without an id.

        If the ``ids`` of the row ascend, all of them do then.
        """
        last_entry = len(ids) - 1
        lowest = ids[self.offsets[:-1].clamp(0, last_entry)]
        highest = ids[(self.offsets[1:] - 1).clamp(0, last_entry)]
        return (lowest >= 0) & (highest < self.vocab_size) | ~self.has_kept_tokens

    @property
    def _key_distance(self) -> int:
        """Distance between the keys of one id in two neighbouring rows: ids from -1 to the vocabulary's size fit in."""
        return self.vocab_size + 2

    def _keys(self, row: Tensor) -> Tensor:
        """A number for each entry that orders entries by their ``row``, and those of a row by id: [entries], int64."""
        return torch.add(self.ids.long(), row, alpha=self._key_distance)

    def row_of_entries(self) -> Tensor:
        """The row of each entry, [entries], int64."""
        return torch.repeat_interleave(self.counts, output_size=len(self.ids))

    def _reduce_entries(self, values: Tensor, reduction: str, initial: float) -> Tensor:
        """The "sum" or "max" of the ``values`` of each row's entries, [rows]; ``initial`` for a row without entries."""
        return torch.segment_reduce(values, reduction, offsets=self.offsets, initial=initial, unsafe=True)


@dataclass(frozen=True)
class _SortedEntries:
    """The entries of a support, with the ids of each row in ascending order."""

    row: Tensor  # [entries], int64, the row of each entry
    ids: Tensor  # [entries], int64; those outside of the vocabulary may be -1 or its size instead
    is_first: Tensor | None  # [entries], bool, False for an id that comes once more in its row; None: none does


@dataclass(frozen=True)
class KeptGradient:
    """The gradient at the logits in the kept local columns; the same column may come more than once."""

    row: Tensor  # [entries], int64
    column: Tensor  # [entries], int64
    values: Tensor  # [entries], in the arithmetic's dtype
    # bool, one value; False: no entry is local, and nothing may be written. None: all are local.
    any_local: Tensor | None
    label_column: Tensor  # [rows], int64, the local column of the label
    owns_label: Tensor  # [rows], bool, the row has kept tokens, and this rank has its label's column
    label_gradient: Tensor  # [rows], the gradient in the label's column

    def write(self, out: Tensor) -> None:
        """Write it to ``out``, [rows, v/tp], the gradient at the logits; other columns stay as they are."""
        if len(self.row):
            index = _memory_index(out, self.row, self.column)
            memory = _memory(out)
            values = self.values.to(out.dtype)
            # Without a local entry the places are arbitrary: write back what is there. The host cannot know.
            if self.any_local is not None:
                values = torch.where(self.any_local, values, memory[index])
            memory.index_copy_(0, index, values)

        # The label's column has a term of its own, and is written last.
        label_cells = (torch.arange(len(out), device=out.device), self.label_column)
        out[label_cells] = torch.where(self.owns_label, self.label_gradient.to(out.dtype), out[label_cells])


def _entry_gradient(logits: Tensor, row: Tensor, factors: RowGradients, options: SoftmaxOptions) -> Tensor:
    """Return the gradient at the logit of each entry, [entries], without the label's own term.

    The formula is that of :class:`~megatron_rc.parallel.softmax.RowGradients`:
    π (constant + log_pi_factor · log π + pi_factor · π).

    Args:
        logits: [entries], the logit of each entry; not written to.
        row: [entries], int64, the row of each entry.
        factors: the factors of the formula, one of each for a row.
        options: the settings for reading the logits.
    """
    # In place, because there may be many entries: only into tensors that were made here, and each after its last use.
    log_pi = logits.sub(factors.log_normalizer.index_select(0, row)).mul_(options.inverse_temperature)
    pi = log_pi.exp()
    # The factor in parentheses; ``pi_factor`` is part of it.
    factor_of_pi = factors.constant.index_select(0, row)
    if factors.log_pi_factor is not None:
        factor_of_pi += log_pi.clamp_(min=LOWEST_LOG_PI).mul_(factors.log_pi_factor.index_select(0, row))
    if factors.pi_factor is not None:
        factor_of_pi += factors.pi_factor.index_select(0, row).mul_(pi)
    return factor_of_pi.mul_(pi)


def _offsets_of(counts: Tensor) -> Tensor:
    """The offsets of rows with these numbers of entries: [rows + 1], from 0."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _local_columns(ids: Tensor, first_id: int, options: SoftmaxOptions) -> tuple[Tensor, Tensor | None]:
    """Return the local column of each id, and whether the id is local, each [entries].

    An id that is not local gets any column in range. None for the second if all ids are known to be local.
    """
    column = ids - first_id if first_id else ids
    if not host_waits_for(ids) and len(ids):
        lowest, highest = column.aminmax()
        if lowest >= 0 and highest < options.columns:
            return column, None

    in_range = column.clamp(0, max(options.columns, 1) - 1)
    # A shard that is all padding has no column, so that nothing is local.
    is_local = in_range == column if options.columns else torch.zeros_like(column, dtype=torch.bool)
    return in_range, is_local


def _memory(rows: Tensor) -> Tensor:
    """The memory of the rows as one dimension: indices of one dimension are several times as fast as those of two."""
    last_place = sum((size - 1) * stride for size, stride in zip(rows.shape, rows.stride(), strict=True))
    return rows.as_strided((last_place + 1,), (1,))


def _memory_index(rows: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Indices of the cells (row, column) in :func:`_memory`, [entries]."""
    place_in_row = column if rows.stride(1) == 1 else column * rows.stride(1)
    return torch.add(place_in_row, row, alpha=rows.stride(0))


def _gathered(rows: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """A copy of the logits in the cells (row, column), [entries]."""
    return _memory(rows).index_select(0, _memory_index(rows, row, column))
