"""Normalisation and attention for GPTModel where neither Transformer Engine nor apex is there.

Megatron's own local modules refuse sequence parallelism (norms) and context parallelism (attention); these two do
both, exactly, on any device.
"""

from __future__ import annotations

import dataclasses
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
    """Megatron's description of packed sequences, with the layout that says which of their tokens lie here."""

    layout: SequenceLayout | None = None

    @classmethod
    def of(cls, layout: SequenceLayout, device: torch.device) -> PackedTokens:
        """From a packed layout. Padding inside a sequence counts as its tokens: a causal mask makes it harmless."""
        bounds = torch.tensor([0, *accumulate(layout.full_lengths)], dtype=torch.int32, device=device)
        # Megatron takes rotary positions to run over all sequences at once if this were the length of them all.
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


def use_local_layers(layer: Any, norm: Any, config: TransformerConfig) -> None:
    """Put the modules of this file, and this norm, into Megatron's description of a local layer."""
    layer.input_layernorm = layer.pre_mlp_layernorm = norm
    attention = layer.self_attention.submodules
    attention.core_attention = LocalAttention
    if config.multi_latent_attention:
        layer.self_attention.module = LocalLatentAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.kv_layernorm = norm
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = norm


class LocalLatentAttention(MLASelfAttention):  # type: ignore[misc]
    """Multi-latent attention whose projections to the latents are whole on every TP rank, as Transformer Engine's are.

    Megatron's local layer splits them, and gathers the rotated keys in a way whose backward leaves out the heads of
    the other TP ranks.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = WholeLinear(config, config.q_lora_rank)
        self.linear_kv_down_proj = WholeLinear(config, config.kv_lora_rank + config.qk_pos_emb_head_dim)

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """The modules as they are described.

        Where queries have no latent, megatron-core 0.19 would put a norm before their projection, which the published
        models do not have.
        """
        described: dict[str, Any] = vars(submodules)
        return described


class WholeLinear(torch.nn.Module):
    """A linear layer without a bias from the residual stream, with the same weight on all TP ranks.

    Under sequence parallelism every rank sees its own tokens, as with :class:`LocalNorm`.
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
        """The product ``[s, b, width]``, and the bias that Megatron's layers return beside it."""
        return torch.nn.functional.linear(hidden, self.weight), None


class LocalAttention(torch.nn.Module):
    """Causal scaled-dot-product attention over sequences that are cut in zigzag over the CP group, padded or packed.

    Every rank gathers the keys and values of the whole sequences (the backward is a reduce-scatter) and lets each of
    its queries see the keys at earlier positions of its own sequence.
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

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        packed_seq_params: PackedTokens | None = None,
        **_: Any,
    ) -> Tensor:
        """The attention of this rank's queries over the keys and values of all CP ranks.

        Args:
            query: [s/cp, b, heads/tp, d], packed [t/cp, heads/tp, d].
            key: [s/cp, b, groups/tp, d], packed [t/cp, groups/tp, d].
            value: like ``key``, of a width of its own with latents.
            attention_mask: ignored: the mask is causal, and padding stands on the right.
            packed_seq_params: which tokens these are, where they are packed.

        Returns:
            [s/cp, b, heads/tp · d], packed [t/cp, heads/tp · d].
        """
        size, rank = group_size(self.cp_group), group_rank(self.cp_group)
        grouped, packed = query.shape[-2] != key.shape[-2], query.dim() == 3
        mask = None
        if packed:
            if packed_seq_params is None or packed_seq_params.layout is None:
                raise ValueError("packed tokens need packed_seq_params=PackedTokens.of(layout)")
            mask = _packed_mask(packed_seq_params.layout, query.device)
            query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        elif size > 1:
            mask = _zigzag_mask(query.shape[0], rank, size, query.device)
        if size > 1:
            gather = tensor_parallel.gather_from_sequence_parallel_region
            key, value = gather(key, group=self.cp_group), gather(value, group=self.cp_group)
        output = torch.nn.functional.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=grouped,
        )
        joined = output.permute(2, 0, 1, 3).flatten(2)
        return joined.squeeze(1) if packed else joined


@functools.lru_cache(maxsize=4)
def _zigzag_mask(local_length: int, rank: int, size: int, device: torch.device) -> Tensor:
    """[s/cp, s], True where this rank's query may see the gathered key, which stand in rank order."""
    positions = [shard_positions(local_length * size, each, size) for each in range(size)]
    return (positions[rank].unsqueeze(1) >= torch.cat(positions).unsqueeze(0)).to(device)


@functools.lru_cache(maxsize=4)
def _packed_mask(layout: SequenceLayout, device: torch.device) -> Tensor:
    """[t/cp, t] likewise; only keys of the query's own sequence."""
    ranks = [dataclasses.replace(layout, cp_rank=rank) for rank in range(layout.cp_size)]
    positions = torch.cat([each.positions() for each in ranks])
    sequences = layout.sequence_index.repeat(layout.cp_size)
    same = layout.sequence_index.unsqueeze(1) == sequences.unsqueeze(0)
    return (same & (layout.positions().unsqueeze(1) >= positions.unsqueeze(0))).to(device)
