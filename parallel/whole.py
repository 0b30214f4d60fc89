"""Numbers of whole sequences for tokens of a shard: means, and rows that hold every token of a sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.parallel.collectives import all_reduce_sum
from megatron_rc.parallel.groups import Group
from megatron_rc.parallel.layout import SequenceLayout


@dataclass(frozen=True)
class WholeSequences:
    """The whole sequences of the tokens that a shard holds.

    Every CP rank calls a method with its own tokens of the same sequences. Values at positions outside the mask change
    no bit of a result. No result has a gradient.

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
        sums = torch.stack([self.layout.sum_sequences(counted), self.layout.sum_sequences(self.mask)])
        total, tokens = all_reduce_sum(sums, self.cp).unbind()
        return self.layout.expand((total / tokens.clamp(min=1)).to(values.dtype))

    def rows(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The values and the mask of all tokens of the sequences, in their order, on every rank of ``cp``.

        Returns:
            [n, s] float64, 0 outside the mask, and [n, s] bool; s is the length of the longest sequence, with
            its padding, at least 1.

        Collectives: one SUM of [2, n, s] doubles over ``cp``.
        """
        counted = torch.where(self.mask, values.detach(), 0)
        local = torch.stack([counted.double(), self.mask.double()]).flatten(1)
        shape = self.layout.num_sequences, self.layout.longest
        rows = local.new_zeros(2, shape[0] * shape[1]).index_copy_(1, self._places, local)
        found, mask = all_reduce_sum(rows, self.cp).view(2, *shape).unbind()
        return found, mask > 0

    def cut(self, rows: Tensor) -> Tensor:
        """This rank's tokens of [n, s] rows as :meth:`rows` gives them, of the layout's local shape."""
        return rows.flatten()[self._places].view(self.layout.shape)

    @property
    def _places(self) -> Tensor:
        return self.layout.row_places.to(self.mask.device, non_blocking=True)
