"""Attention of packed sequences without Transformer Engine: each attends to itself alone, on any number of CP ranks."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from megatron_rc.launch.training.models import local_layers
from megatron_rc.parallel import SequenceLayout

LENGTHS = [4, 12, 8]  # of whole sequences; each splits into four chunks


@pytest.mark.parametrize("size", [1, 2])
def test_packed_sequences_attend_to_themselves_alone(size, monkeypatch):
    """The ranks' shards, put together, are the attention of every sequence by itself."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(sum(LENGTHS), heads, width, generator=generator, dtype=torch.float64)
        for heads, width in ((4, 8), (2, 8), (2, 6))
    )
    layouts = [layout_of(rank, size) for rank in range(size)]
    shards = {whole.shape[-1]: torch.cat([layout.cut(whole) for layout in layouts]) for whole in (key, value)}
    region = SimpleNamespace(gather_from_sequence_parallel_region=lambda part, group: shards[part.shape[-1]])
    monkeypatch.setattr(local_layers, "tensor_parallel", region)
    monkeypatch.setattr(local_layers, "group_size", lambda _: size)
    attention = local_layers.LocalAttention(
        SimpleNamespace(kv_channels=8), 1, None, "self", pg_collection=SimpleNamespace(cp=None)
    )
    found = []
    for rank, layout in enumerate(layouts):
        monkeypatch.setattr(local_layers, "group_rank", lambda _, rank=rank: rank)
        packed = local_layers.PackedTokens.of(layout, torch.device("cpu"))
        parts = (layout.cut(whole) for whole in (query, key, value))
        found.append(attention(*parts, packed_seq_params=packed))
    alone = [attend(*parts) for parts in zip(*(whole.split(LENGTHS) for whole in (query, key, value)), strict=True)]
    torch.testing.assert_close(layouts[0].restore(found), torch.cat(alone))


def layout_of(rank, size):
    ends = torch.tensor([0, *LENGTHS]).cumsum(0) // size
    return SequenceLayout.packed(ends, cp_rank=rank, cp_size=size)


def attend(query, key, value):
    """[s, heads · d]: causal attention of one sequence."""
    heads_first = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
    found = scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    return found.squeeze(0).transpose(0, 1).flatten(1)
