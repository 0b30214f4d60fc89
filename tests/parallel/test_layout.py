"""Cuts of sequences over context-parallel ranks, and sums over the pieces."""

import numpy as np
import pytest
import torch

from megatron_rc.parallel import SequenceLayout
from megatron_rc.parallel.layout import shard_positions


@pytest.mark.parametrize("split", ["zigzag", "contiguous"])
@pytest.mark.parametrize("cp_size", [1, 4])
def test_padded_shards_restore_the_whole(cp_size, split):
    full = torch.arange(3 * 16 * 2).view(3, 16, 2)
    layouts = [SequenceLayout.padded(3, 16 // cp_size, cp_rank=r, cp_size=cp_size, split=split) for r in range(cp_size)]
    shards = [layout.cut(full) for layout in layouts]
    assert torch.equal(layouts[0].restore(shards), full)
    for layout, shard in zip(layouts, shards, strict=True):
        assert torch.equal(full[torch.arange(3).unsqueeze(1), layout.positions()], shard)


@pytest.mark.parametrize("split", ["zigzag", "contiguous"])
@pytest.mark.parametrize("cp_size", [1, 2])
def test_packed_shards_restore_the_input_order(cp_size, split):
    lengths = [8, 0, 4, 12]
    full = torch.arange(24)
    local = torch.tensor([0, 8, 8, 12, 24]) // cp_size
    layouts = [SequenceLayout.packed(local, cp_rank=r, cp_size=cp_size, split=split) for r in range(cp_size)]
    shards = [layout.cut(full) for layout in layouts]
    assert torch.equal(layouts[0].restore(shards), full)
    sums = sum(layout.sum_sequences(shard) for layout, shard in zip(layouts, shards, strict=True))
    assert sums.tolist() == [float(piece.sum()) for piece in full.split(lengths)]
    for layout in layouts:
        assert layout.expand(torch.tensor([5, 6, 7, 8])).tolist() == [
            value for value, length in zip([5, 6, 7, 8], lengths, strict=True) for _ in range(length // cp_size)
        ]


def test_zigzag_is_megatrons():
    assert shard_positions(8, 0, 2).tolist() == [0, 1, 6, 7]
    assert shard_positions(8, 1, 2).tolist() == [2, 3, 4, 5]
    assert shard_positions(8, 1, 2, "contiguous").tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_bounds_of_any_kind(kind):
    layout = SequenceLayout.packed(kind([0, 4, 12]), cp_rank=1, cp_size=2)
    assert layout.full_lengths == (8, 16)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SequenceLayout.padded(2, 3, cp_size=2), "3|6 tokens.*4 chunks"),
        (lambda: SequenceLayout.padded(2, 4, cp_rank=2, cp_size=2), "cp_rank=2"),
        (lambda: SequenceLayout.padded(2, 4, split="striped"), "split='striped'"),
        (lambda: SequenceLayout.packed([1, 4]), "local_cu_seqlens"),
        (lambda: SequenceLayout.packed([0, 4, 2]), "local_cu_seqlens"),
        (lambda: SequenceLayout.packed(torch.tensor([0.0, 2.7])), "local_cu_seqlens"),
        (lambda: SequenceLayout.padded(2, 8, cp_size=2).cut(torch.zeros(2, 8)), r"\(2, 8\).*\(2, 16\)"),
        (lambda: SequenceLayout.padded(2, 4).restore([]), "0 shards"),
        (lambda: SequenceLayout.padded(2, 4).expand(torch.zeros(3)), r"\(3,\)"),
    ],
)
def test_wrong_cuts_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("split", ["zigzag", "contiguous"])
def test_neighbours_are_next_positions_of_one_sequence(cp_size, split):
    """Sequences of many lengths, none at all, two chunks each under zigzag."""
    local = [0, 6, 2, 2, 0, 4, 8, 8, 2]
    bounds = [sum(local[:index]) for index in range(len(local) + 1)]
    for layout in (
        SequenceLayout.packed(bounds, cp_rank=0, cp_size=cp_size, split=split),
        SequenceLayout.padded(3, 8, cp_rank=0, cp_size=cp_size, split=split),
        SequenceLayout.padded(0, 8, cp_rank=0, cp_size=cp_size, split=split),
        SequenceLayout.packed([0], cp_rank=0, cp_size=cp_size, split=split),
    ):
        positions = layout.positions().view(-1)
        sequences = layout.sequence_index
        is_next = (positions[1:] == positions[:-1] + 1) & (sequences[1:] == sequences[:-1])
        last_has_none = torch.zeros(min(len(positions), 1), dtype=torch.bool)
        expected = torch.cat([is_next, last_has_none])
        assert torch.equal(layout.followed(torch.arange(len(positions))), expected)


@pytest.mark.parametrize("cp_rank", [0, 1])
@pytest.mark.parametrize("split", ["zigzag", "contiguous"])
def test_the_position_of_a_token_follows_from_its_place_in_the_shard(split, cp_rank):
    for layout in (
        SequenceLayout.packed([0, 0, 6, 8, 10], cp_rank=cp_rank, cp_size=2, split=split),
        SequenceLayout.padded(3, 8, cp_rank=cp_rank, cp_size=2, split=split),
    ):
        sequences = layout.sequence_index
        starts = layout.local_lengths.cumsum(0) - layout.local_lengths
        offsets = torch.arange(len(sequences)) - starts[sequences]
        assert torch.equal(layout.position_of(sequences, offsets), layout.positions().view(-1))
