"""Whole sequences from the shards of all CP ranks: means over them, and rows that hold all their tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.parallel.collectives import all_reduce_sum
from megatron_rc.parallel.groups import Group
from megatron_rc.parallel.layout import SequenceLayout


@dataclass(frozen=True)
class WholeSequences:
    """Reductions and exchanges over the whole sequences of which each CP rank holds a part.

    Every CP rank calls a method with its own tokens of the same sequences. Values at positions outside the mask change
    no bit of a result, even if they are NaN. No result has a gradient.

    Attributes:
        mask: bool, of the layout's local shape: the tokens that count.
        layout: the cut of the sequences.
        cp: the group that holds the other slices.
    """

    mask: Tensor
    layout: SequenceLayout
    cp: Group | None

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the counted tokens of each token's sequence, at that token; 0 without a counted one.

        Collectives: one SUM of [2, n] doubles over ``cp``.
        """
        counted = torch.where(self.mask, values.detach(), 0)
        local_sums = torch.stack([self.layout.sum_sequences(counted), self.layout.sum_sequences(self.mask)])
        totals, num_counted = all_reduce_sum(local_sums, self.cp).unbind()
        means = totals / num_counted.clamp(min=1)
        return self.layout.expand(means.to(values.dtype))

    def rows(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The values and the mask of all tokens of the sequences, in the tokens' order, on every rank of ``cp``.

        Returns:
            (values [n, s] float64, 0 outside the mask; mask [n, s] bool); s is the length of the longest sequence, with
            its padding, at least 1.

        Collectives: one SUM of [2, n, s] doubles over ``cp``.
        """
        counted = torch.where(self.mask, values.detach(), 0)
        local = torch.stack([counted.double(), self.mask.double()]).flatten(1)
        num_rows = self.layout.num_sequences
        num_columns = self.layout.longest
        # Each rank writes its own tokens, and leaves 0 at those of other ranks: the sum over the ranks has all.
        rows = local.new_zeros(2, num_rows * num_columns).index_copy_(1, self._row_places, local)
        all_values, all_masks = all_reduce_sum(rows, self.cp).view(2, num_rows, num_columns).unbind()
        return all_values, all_masks > 0

    def cut(self, rows: Tensor) -> Tensor:
        """This rank's tokens of [n, s] rows such as :meth:`rows` returns, in the layout's local shape."""
        return rows.flatten()[self._row_places].view(self.layout.shape)

    @property
    def _row_places(self) -> Tensor:
        """Index of each local token in flattened [n, s] rows: [t/cp] int64, on the mask's device."""
        return self.layout.row_places.to(self.mask.device, non_blocking=True)
