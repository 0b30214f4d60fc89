"""A local shard in pieces that fit a cache, so that a pass over the tokens needs no scratch of the shard's size."""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product

import torch
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """Some consecutive tokens of a local shard.

    Values of a block are ``[rows, length]`` where its sequences have equally many tokens in it (always, in a padded
    shard), else flat ``[t]``.

    Attributes:
        index: slices that cut it out of a tensor of the shard's shape.
        first: the sequence of its first token.
        rows: number of sequences that it touches, from ``first`` on.
        start: place of its first token among the local tokens of that token's sequence.
        counts: tokens of each sequence in it; None for equal ones.
        shape: shape of its values.
    """

    index: tuple[slice, ...]
    first: int
    rows: int
    start: int
    counts: tuple[int, ...] | None
    shape: tuple[int, ...]

    @property
    def is_even(self) -> bool:
        """True where every sequence has equally many tokens in it, and values are ``[rows, length]``."""
        return self.counts is None

    def run_sizes(self, device: torch.device) -> Tensor:
        """[rows] int64, tokens of each sequence in it; sent to the device once."""
        if device not in self._sent:
            counts = self.counts if self.counts is not None else (self.shape[1],) * self.rows
            # The host does not wait until a GPU has done what it was given before.
            self._sent[device] = torch.tensor(counts).to(device, non_blocking=True)
        return self._sent[device]

    @functools.cached_property
    def _sent(self) -> dict[torch.device, Tensor]:
        return {}

    def take(self, tensor: Tensor) -> Tensor:
        """The block's part of a tensor of the shard's shape, as a view of shape :attr:`shape`."""
        return tensor[self.index].view(self.shape) if len(self.index) == 1 else tensor[self.index]

    def expand(self, per_sequence: Tensor) -> Tensor:
        """Each token's own value of ``[rows]``, in a shape that broadcasts against the block's values."""
        if self.is_even:
            return per_sequence.unsqueeze(1)
        sizes = self.run_sizes(per_sequence.device)
        return torch.repeat_interleave(per_sequence, sizes, output_size=self.shape[0])


def cut_padded(shape: tuple[int, ...], num_tokens: int) -> Iterator[Block]:
    """Blocks of a ``[b, s]`` shard: whole rows while they fit, else pieces of one row."""
    rows, length = shape
    if not length:
        return
    fitting = max(1, num_tokens // length)
    # Equal blocks where that does not make them much smaller.
    step = next((step for step in range(fitting, fitting // 2, -1) if rows % step == 0), fitting)
    width = min(length, num_tokens)
    for row, column in product(range(0, rows, step), range(0, length, width)):
        count, stop = min(step, rows - row), min(column + width, length)
        index = (slice(row, row + count), slice(column, stop))
        yield Block(index, row, count, column, None, (count, stop - column))


def cut_packed(local_lengths: Sequence[int], num_tokens: int) -> Iterator[Block]:
    """Blocks of a flat shard of sequences of these lengths, cut at every ``num_tokens`` tokens."""
    ends = list(accumulate(local_lengths))
    for low in range(0, ends[-1] if ends else 0, num_tokens):
        high = min(low + num_tokens, ends[-1])
        first, last = bisect_right(ends, low), bisect_left(ends, high)
        begins = [ends[i] - local_lengths[i] for i in range(first, last + 1)]
        parts = [min(end, high) - max(begin, low) for begin, end in zip(begins, ends[first : last + 1], strict=True)]
        index, start = (slice(low, high),), low - begins[0]
        if len(set(parts)) == 1:
            yield Block(index, first, len(parts), start, None, (len(parts), parts[0]))
        else:
            yield Block(index, first, len(parts), start, tuple(parts), (high - low,))
