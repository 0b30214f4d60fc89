"""Floating-point operations of an optimizer step, without activation recomputation."""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.megatron_configs import build_transformer_config

# One forward product needs two in the backward pass: for the gradients of the input and of the weight.
_PASSES = 3
# Dense bf16 TFLOP/s of devices, by a part of their name.
_PEAKS = {"H100 PCIe": 756, "H100": 989, "H200": 989, "GH200": 989, "B200": 2250, "A100": 312, "L40S": 362}


def step_flops(config: RunConfig) -> float | None:
    """Operations of one optimizer step on all ranks, critic included, if all sequences have ``--seq-length`` tokens.

    None with packed sequences, whose lengths differ between batches.
    """
    if config.training.rl_use_sequence_packing:
        return None
    transformer, length = build_transformer_config(config), config.training.seq_length
    layers = sum(_layer(transformer, length, has_experts) for has_experts in config.layers_with_experts)
    token = 2 * length * transformer.hidden_size
    policy = layers + token * config.model.padded_vocab_size
    critic = layers + token if config.critic else 0
    return float(_PASSES * config.training.global_batch_size * (policy + critic))


def device_peak(config: RunConfig) -> float | None:
    """Peak operations per second of a rank's device: ``--device-peak-tflops``, or a known 16-bit peak; else None."""
    given = config.logging.device_peak_tflops
    if given is not None:
        return given * 1e12
    if config.launch.on_cpu or config.dtype.itemsize != 2:
        return None
    name = torch.cuda.get_device_name()
    return next((peak * 1e12 for words, peak in _PEAKS.items() if words in name), None)


def _layer(transformer: TransformerConfig, length: int, has_experts: bool) -> int:
    """Operations of one layer for one sequence in the forward pass."""
    attention = _latent_attention if transformer.multi_latent_attention else _attention
    return int(2 * length * (attention(transformer, length) + _feed_forward(transformer, has_experts)))


def _attention(transformer: TransformerConfig, length: int) -> int:
    """Multiplications for one token, which attends to half of the sequence on average."""
    hidden, heads, width = transformer.hidden_size, transformer.num_attention_heads, transformer.kv_channels
    queries, keys = heads * width, (transformer.num_query_groups or heads) * width
    return int(hidden * (queries + 2 * keys) + queries * hidden + length * queries)


def _latent_attention(transformer: TransformerConfig, length: int) -> int:
    """Multiplications for one token with multi-latent attention."""
    hidden, heads, latent = transformer.hidden_size, transformer.num_attention_heads, transformer.kv_lora_rank
    rotated, value = transformer.qk_pos_emb_head_dim, transformer.v_head_dim
    queries, rank = heads * (transformer.qk_head_dim + rotated), transformer.q_lora_rank
    products = hidden * queries if rank is None else (hidden + queries) * rank
    products += hidden * (latent + rotated) + latent * heads * (transformer.qk_head_dim + value)
    return int(products + heads * value * hidden + length * (queries + heads * value) // 2)


def _feed_forward(transformer: TransformerConfig, has_experts: bool) -> int:
    """Multiplications for one token in the MLP or the experts."""
    hidden, matrices = transformer.hidden_size, 3 if transformer.gated_linear_unit else 2
    if not has_experts:
        return int(matrices * hidden * transformer.ffn_hidden_size)
    width = transformer.moe_router_topk * transformer.moe_ffn_hidden_size
    width += transformer.moe_shared_expert_intermediate_size or 0
    return int(matrices * hidden * width + hidden * transformer.num_moe_experts)
