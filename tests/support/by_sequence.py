"""Attention over packed sequences, one sequence after the other: what the launcher's forms must equal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def attention_by_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """[t, heads, d], with the arguments of PyTorch's ``varlen_attn`` for causal attention."""
    assert window_size == (-1, 0)
    assert cu_seq_q.dtype == torch.int32
    with torch._C.DisableTorchFunction():  # a pretended GPU would count that the host waits for these numbers
        lengths: list[int] = cu_seq_q.diff().tolist()
        assert cu_seq_k.diff().tolist() == lengths
    assert max_q == max_k == max(lengths)
    options: dict[str, Any] = {"is_causal": True, "scale": scale, "enable_gqa": enable_gqa}
    outputs = []
    for of_sequence in zip(*(values.split(lengths) for values in (query, key, value)), strict=True):
        heads_first = [values.transpose(0, 1).unsqueeze(0) for values in of_sequence]
        outputs.append(scaled_dot_product_attention(*heads_first, **options).squeeze(0).transpose(0, 1))
    return torch.cat(outputs)
