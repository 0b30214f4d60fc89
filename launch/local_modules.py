"""Normalisation and attention for GPTModel where neither Transformer Engine nor apex is there.

Megatron's own local modules refuse sequence parallelism (norms) and context parallelism (attention); these two do
both, exactly, on any device.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_rc.parallel.groups import group_rank, group_size
from megatron_rc.parallel.layout import shard_positions


class LocalNorm:
    """Builds torch's RMSNorm or LayerNorm with the arguments that Megatron gives to a norm.

    A class, since Megatron's specs call classes and hand functions through. Under sequence parallelism every rank sees
    its own tokens, so the gradients of the weights are partial sums: ``sequence_parallel`` on a parameter makes
    ``finalize_model_grads`` add them up over the TP group.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> torch.nn.Module:
        """Build it: ``config.normalization`` over the last dimension, ``hidden_size`` wide."""
        kinds = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}
        norm: torch.nn.Module = kinds[config.normalization](hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


class LocalAttention(torch.nn.Module):
    """Causal scaled-dot-product attention over a sequence that is cut in zigzag over the CP group.

    Every rank gathers the keys and values of the whole sequence (the backward is a reduce-scatter) and lets each of
    its queries see the keys at earlier positions.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        if attention_type != "self":
            raise ValueError(f"attention_type={attention_type!r}: only self-attention is implemented here")
        self.cp_group = pg_collection.cp
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.masks: dict[int, Tensor] = {}

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **_: Any) -> Tensor:
        """Attend.

        Args:
            query: [s/cp, b, heads/tp, d].
            key: [s/cp, b, groups/tp, d].
            value: like ``key``.
            attention_mask: ignored: the mask is causal, and padding stands on the right.

        Returns:
            [s/cp, b, heads/tp · d].
        """
        size = group_size(self.cp_group)
        if size > 1:
            gather = tensor_parallel.gather_from_sequence_parallel_region
            key, value = gather(key, group=self.cp_group), gather(value, group=self.cp_group)
        output = torch.nn.functional.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            attn_mask=self._mask(query.shape[0], query.device) if size > 1 else None,
            is_causal=size == 1,
            scale=self.scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return output.permute(2, 0, 1, 3).flatten(2)

    def _mask(self, local_length: int, device: torch.device) -> Tensor:
        """[s/cp, s], True where this rank's query may see the gathered key, which stand in rank order."""
        if local_length not in self.masks:
            size = group_size(self.cp_group)
            positions = [shard_positions(local_length * size, rank, size) for rank in range(size)]
            mask = positions[group_rank(self.cp_group)].unsqueeze(1) >= torch.cat(positions).unsqueeze(0)
            self.masks = {local_length: mask.to(device)}
        return self.masks[local_length]
