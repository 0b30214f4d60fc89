"""Backward recurrences over whole sequences that are split over CP ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rc.parallel.collectives import all_reduce_sum
from megatron_rc.parallel.groups import Group
from megatron_rc.parallel.layout import SequenceLayout


def following_values(coefficients: Tensor, offsets: Tensor, layout: SequenceLayout, cp: Group | None) -> Tensor:
    """H_{t+1} at every token, for H_t = offset_t + coefficient_t · H_{t+1} and H = 0 after each sequence's end.

    A chunk of consecutive tokens maps the value after it to the value at its first token, linearly: by one coefficient
    and one offset. CP ranks exchange these two numbers for each chunk. Inside a chunk the tokens' maps are joined in
    log2(length) rounds, without a division. A token with coefficient 1 and offset 0 is skipped.

    Both arguments are of the layout's local shape, as is the result, in float64. ``cp`` holds the other chunks.

    Collectives: one SUM of [n, chunks of a sequence, 2] doubles over ``cp``. Gradient: none.
    """
    chunk = layout.chunk_index.to(coefficients.device, non_blocking=True)
    ends = torch.cat([chunk[1:] != chunk[:-1], chunk.new_ones(min(len(chunk), 1), dtype=torch.bool)])
    starts = torch.cat([ends[-1:], ends[:-1]])
    coefficient, offset = _joined(coefficients.detach().flatten().double(), offsets.detach().flatten().double(), layout)
    # A chunk's map is the joined map at its first token.
    pairs = torch.where(starts.unsqueeze(1), torch.stack([coefficient, offset], dim=1), 0.0)
    maps = offset.new_zeros(layout.num_sequences * layout.num_chunks, 2).index_add_(0, chunk, pairs)
    behind = _behind(all_reduce_sum(maps, cp), layout)[chunk]
    value = offset + coefficient * behind
    return torch.where(ends, behind, value.roll(-1)).view(layout.shape)


def _joined(coefficient: Tensor, offset: Tensor, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
    """For each token the joined map of the tokens from it to the end of its chunk, as (coefficient, offset)."""
    chunk = layout.chunk_index.to(offset.device, non_blocking=True)
    longest, step = max(layout.full_lengths, default=0) // layout.num_chunks, 1
    while step < longest:
        same = chunk[step:] == chunk[:-step]
        further = offset[:-step] + coefficient[:-step] * offset[step:]
        product = coefficient[:-step] * coefficient[step:]
        offset = torch.cat([torch.where(same, further, offset[:-step]), offset[-step:]])
        coefficient = torch.cat([torch.where(same, product, coefficient[:-step]), coefficient[-step:]])
        step *= 2
    return coefficient, offset


def _behind(maps: Tensor, layout: SequenceLayout) -> Tensor:
    """The value after each chunk, [sequences · chunks], from the maps of all chunks."""
    coefficients, offsets = maps.view(layout.num_sequences, layout.num_chunks, 2).unbind(2)
    behind = torch.zeros_like(offsets)
    for chunk in range(layout.num_chunks - 1, 0, -1):
        behind[:, chunk - 1] = offsets[:, chunk] + coefficients[:, chunk] * behind[:, chunk]
    return behind.flatten()
