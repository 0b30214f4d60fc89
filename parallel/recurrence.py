"""Recurrences over the tokens of whole sequences that are split over CP ranks: sums so far, minima, discounting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rc.parallel.collectives import sum_each
from megatron_rc.parallel.groups import Group
from megatron_rc.parallel.layout import SequenceLayout


class Algebra(NamedTuple):
    """The two operations of a recurrence; ``scale`` distributes over ``join``, as products over sums.

    ``scale(nothing, x)`` is ``nothing`` and ``join(nothing, x)`` is x; ``scale(same, x)`` is x.
    """

    join: Callable[[Tensor, Tensor], Tensor]
    scale: Callable[[Tensor, Tensor], Tensor]
    nothing: float
    same: float


SUMS = Algebra(torch.add, torch.mul, 0.0, 1.0)
MINIMA = Algebra(torch.minimum, torch.add, torch.inf, 0.0)


@dataclass(frozen=True)
class Recurrence:
    """H_t = join(offset_t, scale(coefficient_t, H)), with the H of the token before t, or of the one after it.

    Before a sequence's first token, or after its last one, H is ``algebra.nothing``. A token with the coefficient
    ``algebra.same`` and the offset ``algebra.nothing`` is skipped. Both tensors are of the layout's local shape.
    """

    layout: SequenceLayout
    coefficients: Tensor
    offsets: Tensor
    backward: bool = False  # H of the token after t
    algebra: Algebra = SUMS


def neighbouring_values(recurrences: Sequence[Recurrence], cp: Group | None) -> list[Tensor]:
    """For each recurrence and token t the H of the token before t (after it, if backward): float64, the local shape.

    A chunk of consecutive tokens maps the H outside of it to the H at its end: by one coefficient and one offset. CP
    ranks exchange these two numbers for each chunk. Inside a chunk the tokens' maps are joined in log2(length) rounds,
    without a division, and no sequence changes another one's bits. ``cp`` holds the other chunks,
    unless a layout has a group of its own.

    Collectives: one SUM over each CP group, of two doubles for each recurrence and chunk of a sequence. Gradient: none.
    """
    chunks, joined = [], []
    for one in recurrences:
        # A backward recurrence is a forward one over the tokens in reverse.
        chunks.append(_in_order(one, one.layout.chunk_index.to(one.offsets.device, non_blocking=True)))
        joined.append(_joined(one, chunks[-1]))
    maps = []
    for one, chunk, pair in zip(recurrences, chunks, joined, strict=True):
        # A chunk's map is the joined map at its end; only the rank that holds the chunk adds it.
        ends = torch.where(_is_new(chunk).roll(-1).unsqueeze(1), torch.stack(pair, dim=1), 0.0)
        whole = ends.new_zeros(one.layout.num_sequences * one.layout.num_chunks, 2)
        maps.append(whole.index_add_(0, chunk, ends))
    exchanged = sum_each(maps, [one.layout.cp(cp) for one in recurrences])
    found = []
    for one, chunk, (coefficient, offset), whole in zip(recurrences, chunks, joined, exchanged, strict=True):
        outside = _outside(one, whole)[chunk]
        value = one.algebra.join(offset, one.algebra.scale(coefficient, outside))
        found.append(_in_order(one, torch.where(_is_new(chunk), outside, value.roll(1))).view(one.layout.shape))
    return found


def _in_order(one: Recurrence, values: Tensor) -> Tensor:
    """The values of the tokens, flat, in the recurrence's order; the same again restores the order."""
    return values.flatten().flip(0) if one.backward else values.flatten()


def _is_new(chunk: Tensor) -> Tensor:
    """Whether a token is the first one of its chunk."""
    return torch.cat([chunk.new_ones(min(len(chunk), 1), dtype=torch.bool), chunk[1:] != chunk[:-1]])


def _joined(one: Recurrence, chunk: Tensor) -> tuple[Tensor, Tensor]:
    """For each token the joined map of its chunk's tokens up to it, as (coefficient, offset)."""
    coefficient, offset = (_in_order(one, values.detach()).double() for values in (one.coefficients, one.offsets))
    longest = max(one.layout.full_lengths, default=0) // one.layout.num_chunks
    join, scale, step = one.algebra.join, one.algebra.scale, 1
    while step < longest:
        same = chunk[step:] == chunk[:-step]
        further = join(offset[step:], scale(coefficient[step:], offset[:-step]))
        product = scale(coefficient[step:], coefficient[:-step])
        offset = torch.cat([offset[:step], torch.where(same, further, offset[step:])])
        coefficient = torch.cat([coefficient[:step], torch.where(same, product, coefficient[step:])])
        step *= 2
    return coefficient, offset


def _outside(one: Recurrence, maps: Tensor) -> Tensor:
    """The H outside of each chunk that its first token needs, [sequences · chunks], from the maps of all chunks."""
    coefficients, offsets = maps.view(one.layout.num_sequences, one.layout.num_chunks, 2).unbind(2)
    outside = torch.full_like(offsets, one.algebra.nothing)
    order = list(range(one.layout.num_chunks))
    for before, chunk in pairwise(reversed(order) if one.backward else order):
        mapped = one.algebra.scale(coefficients[:, before], outside[:, before])
        outside[:, chunk] = one.algebra.join(offsets[:, before], mapped)
    return outside.flatten()
