"""Reductions over the tokens of a block of rows: a row holds one number of each token, [n, length] or flat [t]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockReductions:
    """The reductions of a block, of all rows at once as a table: every operation costs a GPU's host time.

    Attributes:
        lengths: [n] int64, tokens of each sequence of a flat block [t]; None for a block [n, length].
    """

    lengths: Tensor | None = None

    def counts(self, flags: Sequence[Tensor]) -> Tensor:
        """Return for k rows of bools the number of tokens of each sequence that are True, [k, n]."""
        table = torch.stack([*flags])
        return table.sum(-1, dtype=torch.int32) if self.lengths is None else self._segments(table, "sum", 0.0)

    def sums(self, rows: Sequence[Tensor], num_squared: int) -> tuple[Tensor, Tensor]:
        """Return sums over sequences, and sums of squares over all tokens; every addition is made in float64.

        Args:
            rows: k rows of floats.
            num_squared: how many of the rows, the last ones, are squared.

        Returns:
            [k, n] and [num_squared] float64.
        """
        table = torch.empty(len(rows), *rows[0].shape, dtype=torch.float64, device=rows[0].device)
        torch.stack([*rows], out=table)
        sums = table.sum(-1) if self.lengths is None else self._segments(table, "sum", 0.0)
        # In place: a second table would be the largest part of the memory.
        return sums, table[-num_squared:].square_().flatten(1).sum(1)

    def totals(self, rows: Sequence[Tensor]) -> Tensor:
        """Return the sums of k rows over all tokens, [k] float64."""
        return torch.stack([*rows]).flatten(1).sum(1, dtype=torch.float64)

    def extremes(self, rows: Sequence[Tensor], left_out: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest and the smallest values of k rows over all tokens that are not left out, [k] each."""
        return extremes_of(rows, left_out)

    def largest(self, rows: Sequence[Tensor], left_out: Tensor) -> Tensor:
        """Return the largest values of each sequence's tokens, [k, n]; -inf of none."""
        table = torch.stack([*rows]).masked_fill(left_out, -torch.inf)
        return table.amax(-1) if self.lengths is None else self._segments(table, "max", -torch.inf)

    def smallest(self, rows: Sequence[Tensor], left_out: Tensor) -> Tensor:
        """Return the smallest values of each sequence's tokens, [k, n]; +inf of none."""
        table = torch.stack([*rows]).masked_fill(left_out, torch.inf)
        return table.amin(-1) if self.lengths is None else self._segments(table, "min", torch.inf)

    def _segments(self, table: Tensor, how: str, of_nothing: float) -> Tensor:
        """Reduce a table of flat rows, [k, t], over the segments that are sequences: [k, n] float64."""
        lengths = self.lengths
        if lengths is None or not table.numel():
            shape = (len(table), 0 if lengths is None else len(lengths))
            return table.new_full(shape, of_nothing, dtype=torch.float64)
        # The rows one after the other, as one long row: a reduction of one dimension is fast on a GPU.
        flat = table.double().flatten()
        return torch.segment_reduce(flat, how, lengths=lengths.repeat(len(table)), unsafe=True).view(len(table), -1)


@dataclass(frozen=True)
class CompiledReductions(BlockReductions):
    """The same reductions of blocks [n, length], one row after the other.

    ``torch.compile`` makes one loop of them, which reads each token once. Tables would be written to memory.
    """

    def counts(self, flags: Sequence[Tensor]) -> Tensor:
        """See :meth:`BlockReductions.counts`."""
        return torch.stack([row.sum(1, dtype=torch.int32) for row in flags])

    def sums(self, rows: Sequence[Tensor], num_squared: int) -> tuple[Tensor, Tensor]:
        """See :meth:`BlockReductions.sums`."""
        squares = [row.double().square().sum(1).sum() for row in rows[-num_squared:]]
        return torch.stack([row.sum(1, dtype=torch.float64) for row in rows]), torch.stack(squares)

    def totals(self, rows: Sequence[Tensor]) -> Tensor:
        """See :meth:`BlockReductions.totals`."""
        return torch.stack([row.sum(1, dtype=torch.float64).sum() for row in rows])

    def extremes(self, rows: Sequence[Tensor], left_out: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`BlockReductions.extremes`."""
        if not rows:
            return extremes_of(rows, left_out)
        largest = [row.masked_fill(left_out, -torch.inf).amax(1).amax() for row in rows]
        smallest = [row.masked_fill(left_out, torch.inf).amin(1).amin() for row in rows]
        return torch.stack(largest), torch.stack(smallest)


def extremes_of(rows: Sequence[Tensor], left_out: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest and the smallest value of each row, [k] each; -inf and +inf of no values.

    Args:
        rows: k tensors of the shape of ``left_out``.
        left_out: bool, what does not count.
    """
    if not rows or not left_out.numel():
        nothing = torch.zeros(len(rows), dtype=torch.float64, device=left_out.device)
        return nothing - torch.inf, nothing + torch.inf
    table = torch.stack([*rows]).flatten(1)
    flat = left_out.flatten()
    return table.masked_fill(flat, -torch.inf).amax(1), table.masked_fill(flat, torch.inf).amin(1)
