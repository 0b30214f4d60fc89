"""Recurrences over the tokens of whole sequences that are split over CP ranks: sums so far, minima, discounting.

A recurrence computes one number H for each token from the token's own numbers and the H of the token before it, such as
a sum of all tokens so far. Backward recurrences use the token after it, as discounted returns do.
"""

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
    """The two operations of a recurrence; ``scale`` distributes over ``join``, as products over sums."""

    join: Callable[[Tensor, Tensor], Tensor]
    scale: Callable[[Tensor, Tensor], Tensor]
    nothing: float  # join(nothing, x) is x, and scale(nothing, x) is nothing
    same: float  # scale(same, x) is x


SUMS = Algebra(torch.add, torch.mul, 0.0, 1.0)
MINIMA = Algebra(torch.minimum, torch.add, torch.inf, 0.0)


@dataclass(frozen=True)
class Recurrence:
    """The recurrence H_t = join(offset_t, scale(coefficient_t, H)) with the H of the token before (or after) t.

    Before a sequence's first token, or after its last one, H is ``algebra.nothing``. A token with the coefficient
    ``algebra.same`` and the offset ``algebra.nothing`` is skipped. Both tensors are of the layout's local shape.
    """

    layout: SequenceLayout
    coefficients: Tensor
    offsets: Tensor
    backward: bool = False  # use the H of the token after t
    algebra: Algebra = SUMS


def neighbouring_values(recurrences: Sequence[Recurrence], cp: Group | None) -> list[Tensor]:
    """The H of each token's neighbour: of the token before it, or after it if backward.

    A chunk is a run of consecutive tokens of a sequence that one CP rank holds. From the H just before the chunk, H at
    its last token is join(offset, scale(coefficient, H before)), with one coefficient and one offset for the whole
    chunk: its "map". CP ranks exchange these two numbers for each chunk. Inside a chunk the tokens' maps are joined in
    log2(length) rounds, without a division, and no sequence changes another one's bits.

    Args:
        recurrences: any number; they share one exchange.
        cp: the group that holds the other chunks, unless a recurrence's layout names a group of its own.

    Returns:
        For each recurrence a float64 tensor of its layout's local shape.

    Collectives: one SUM over each CP group, of two doubles for each recurrence and chunk of a sequence. Gradient: none.
    """
    chunks = []  # chunk of each token, in the recurrence's order
    token_maps = []  # (coefficient, offset) of each token, from the H before its chunk
    chunk_maps = []  # [sequences · chunks, 2]: coefficient and offset of each chunk; 0 for chunks of other ranks
    for recurrence in recurrences:
        layout = recurrence.layout
        # A backward recurrence is a forward one over the tokens in reverse.
        chunk = _in_order(recurrence, layout.chunk_index.to(recurrence.offsets.device, non_blocking=True))
        coefficient, offset = _maps_of_tokens(recurrence, chunk)
        # A chunk's map is that of its last token, behind which a new chunk begins.
        is_last = _is_first_of_chunk(chunk).roll(-1)
        last_maps = torch.where(is_last.unsqueeze(1), torch.stack([coefficient, offset], dim=1), 0.0)
        no_maps = last_maps.new_zeros(layout.num_sequences * layout.num_chunks, 2)
        chunks.append(chunk)
        token_maps.append((coefficient, offset))
        chunk_maps.append(no_maps.index_add_(0, chunk, last_maps))

    # Each chunk is on one rank, so that the sum over the ranks has the maps of all chunks.
    chunk_maps = sum_each(chunk_maps, [recurrence.layout.cp(cp) for recurrence in recurrences])

    neighbours = []
    for recurrence, chunk, (coefficient, offset), maps in zip(recurrences, chunks, token_maps, chunk_maps, strict=True):
        algebra = recurrence.algebra
        before_chunk = _before_chunks(recurrence, maps)[chunk]
        value = algebra.join(offset, algebra.scale(coefficient, before_chunk))
        neighbour = torch.where(_is_first_of_chunk(chunk), before_chunk, value.roll(1))
        neighbours.append(_in_order(recurrence, neighbour).view(recurrence.layout.shape))
    return neighbours


def _in_order(recurrence: Recurrence, values: Tensor) -> Tensor:
    """The values of local tokens, flat, in the recurrence's order; a second call restores the local order."""
    return values.flatten().flip(0) if recurrence.backward else values.flatten()


def _is_first_of_chunk(chunk: Tensor) -> Tensor:
    """Return whether each token is the first of its chunk, bool [t]; ``chunk``, [t], is the chunk of each token."""
    first_token = chunk.new_ones(min(len(chunk), 1), dtype=torch.bool)
    return torch.cat([first_token, chunk[1:] != chunk[:-1]])


def _maps_of_tokens(recurrence: Recurrence, chunk: Tensor) -> tuple[Tensor, Tensor]:
    """For each token the coefficient and the offset, [t] float64, that give its H from the H before its chunk.

    Each round joins a token's map with that of the token ``distance`` before it in the same chunk, and doubles the
    distance: after it the map reaches back over twice as many tokens.
    """
    join = recurrence.algebra.join
    scale = recurrence.algebra.scale
    coefficient = _in_order(recurrence, recurrence.coefficients.detach()).double()
    offset = _in_order(recurrence, recurrence.offsets.detach()).double()
    longest_chunk = max(recurrence.layout.full_lengths, default=0) // recurrence.layout.num_chunks
    distance = 1
    while distance < longest_chunk:
        in_same_chunk = chunk[distance:] == chunk[:-distance]
        joined_offset = join(offset[distance:], scale(coefficient[distance:], offset[:-distance]))
        joined_coefficient = scale(coefficient[distance:], coefficient[:-distance])
        new_offset = torch.where(in_same_chunk, joined_offset, offset[distance:])
        new_coefficient = torch.where(in_same_chunk, joined_coefficient, coefficient[distance:])
        offset = torch.cat([offset[:distance], new_offset])
        coefficient = torch.cat([coefficient[:distance], new_coefficient])
        distance *= 2
    return coefficient, offset


def _before_chunks(recurrence: Recurrence, chunk_maps: Tensor) -> Tensor:
    """The H just before each chunk (behind it, if backward), [sequences · chunks], from the maps of all chunks."""
    algebra = recurrence.algebra
    num_chunks = recurrence.layout.num_chunks
    coefficients, offsets = chunk_maps.view(recurrence.layout.num_sequences, num_chunks, 2).unbind(2)
    before = torch.full_like(offsets, algebra.nothing)
    order = list(range(num_chunks))
    if recurrence.backward:
        order.reverse()
    for previous, chunk in pairwise(order):
        scaled = algebra.scale(coefficients[:, previous], before[:, previous])
        before[:, chunk] = algebra.join(offsets[:, previous], scaled)
    return before.flatten()
