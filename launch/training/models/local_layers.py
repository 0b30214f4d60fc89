"""Norms and attention for GPTModel without Transformer Engine.

Megatron's local norms refuse sequence parallelism, and its local attention refuses context parallelism; these modules
support both exactly, on any device.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from megatron_rc.parallel.groups import group_rank, group_size
from megatron_rc.parallel.layout import SequenceLayout, shard_positions


@dataclass
class PackedTokens(PackedSeqParams):  # type: ignore[misc]
    """Megatron's description of packed sequences, with the layout of this rank's tokens."""

    layout: SequenceLayout | None = None

    @classmethod
    def of(cls, layout: SequenceLayout, device: torch.device) -> PackedTokens:
        """Describe a packed layout; padding counts as tokens of its sequence, which the causal mask makes harmless."""
        bounds = torch.tensor([0, *accumulate(layout.full_lengths)], dtype=torch.int32, device=device)
        # With the sum of all lengths, Megatron would let rotary positions run on from sequence to sequence.
        longest = max(layout.full_lengths)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            cu_seqlens_q_padded=bounds,
            cu_seqlens_kv_padded=bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            layout=layout,
        )


class LocalNorm:
    """Builds torch's RMSNorm or LayerNorm from the arguments that Megatron gives to a norm.

    It is a class, because Megatron's specs call classes but not functions. Under sequence parallelism each rank sees
    its own tokens, so the weights' gradients are partial sums. The attribute ``sequence_parallel`` of a parameter makes
    ``finalize_model_grads`` sum them over the TP group.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> torch.nn.Module:
        """Build the norm ``config.normalization`` over the last dimension of ``hidden_size``."""
        kinds = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}
        norm: torch.nn.Module = kinds[config.normalization](hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def use_local_layers(layer: Any, config: TransformerConfig) -> None:
    """Put this file's modules into Megatron's spec of a local layer."""
    layer.input_layernorm = layer.pre_mlp_layernorm = LocalNorm
    attention = layer.self_attention.submodules
    attention.core_attention = LocalAttention
    if config.multi_latent_attention:
        layer.self_attention.module = LocalLatentAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.kv_layernorm = LocalNorm
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = LocalNorm


class LocalLatentAttention(MLASelfAttention):  # type: ignore[misc]
    """Multi-latent attention with unsharded projections to the latents, as with Transformer Engine.

    Megatron's local layer shards them, and the backward of its gather loses the gradients of other TP ranks' heads.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = WholeLinear(config, config.q_lora_rank)
        self.linear_kv_down_proj = WholeLinear(config, config.kv_lora_rank + config.qk_pos_emb_head_dim)

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """The modules of the spec, unchanged.

        For queries without a latent, megatron-core 0.19 would add a norm that published models do not have.
        """
        described: dict[str, Any] = vars(submodules)
        return described


class WholeLinear(torch.nn.Module):
    """A linear layer without a bias, with the same weight on all TP ranks.

    Its gradients under sequence parallelism are partial sums, as in :class:`LocalNorm`.
    """

    def __init__(self, config: TransformerConfig, width: int) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        weight = torch.empty(width, config.hidden_size, dtype=config.params_dtype, device=device)
        self.weight = torch.nn.Parameter(weight)
        if config.perform_initialization:
            config.init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """The product ``[s, b, width]``, and None in the place of a bias."""
        return torch.nn.functional.linear(hidden, self.weight), None


class LocalAttention(torch.nn.Module):
    """Causal scaled-dot-product attention over padded or packed sequences, sharded in zigzag over the CP group.

    Each rank gathers the keys and values of whole sequences; the backward is a reduce-scatter. A query sees the keys up
    to its own position in its own sequence.
    """

    def __init__(
        self, config: TransformerConfig, *, pg_collection: Any, softmax_scale: float | None = None, **_: Any
    ) -> None:
        super().__init__()
        self.cp_group = pg_collection.cp
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        packed_seq_params: PackedTokens | None = None,
        **_: Any,
    ) -> Tensor:
        """Attention of this rank's queries over the keys and values of all CP ranks.

        ``query``, ``key`` and ``value`` are [s/cp, b, heads/tp, d], packed [t/cp, heads/tp, d]; with latents d of the
        values may differ. ``attention_mask`` is ignored, because the mask is causal and padding is on the right.
        Returns [s/cp, b, heads/tp · d], packed [t/cp, heads/tp · d].
        """
        size = group_size(self.cp_group)
        if size > 1:
            gather = tensor_parallel.gather_from_sequence_parallel_region
            key, value = gather(key, group=self.cp_group), gather(value, group=self.cp_group)
        if query.dim() == 4:
            return self._attend(query, key, value).flatten(2)
        if packed_seq_params is None or packed_seq_params.layout is None:
            raise ValueError("packed tokens need packed_seq_params=PackedTokens.of(layout)")
        # One by one: a mask over all packed tokens would compute the products of different sequences too.
        layout = packed_seq_params.layout
        lengths = [length // layout.cp_size for length in layout.full_lengths]
        gathered = [values.unflatten(0, (size, -1)).split(lengths, dim=1) for values in (key, value)]
        attended = [
            self._attend(query.unsqueeze(1), *(part.flatten(0, 1).unsqueeze(1) for part in keys_and_values)).squeeze(1)
            for query, *keys_and_values in zip(query.split(lengths), *gathered, strict=True)
        ]
        return torch.cat(attended).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of padded sequences: [s/cp, b, heads/tp, d], from the keys and values [s, b, groups/tp, d]."""
        size = group_size(self.cp_group)
        mask = None
        if size > 1:
            mask = _zigzag_mask(query.shape[0], group_rank(self.cp_group), size, query.device)
        output = torch.nn.functional.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return output.permute(2, 0, 1, 3)


@functools.lru_cache(maxsize=16)
def _zigzag_mask(local_length: int, rank: int, size: int, device: torch.device) -> Tensor:
    """[s/cp, s], True if this rank's query sees the gathered key; keys are in rank order."""
    positions = [shard_positions(local_length * size, each, size) for each in range(size)]
    return (positions[rank].unsqueeze(1) >= torch.cat(positions).unsqueeze(0)).to(device)
