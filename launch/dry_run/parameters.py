"""Number of parameters of one rank, by formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rc.launch.run_config import RunConfig


@dataclass(frozen=True)
class Parameters:
    """Number of parameters on one rank."""

    dense: int  # parameters outside of experts: the ranks of a DP and CP group have the same ones
    experts: int  # parameters of experts: fewer ranks have the same ones

    @property
    def total(self) -> int:
        """Number of all parameters."""
        return self.dense + self.experts


def chunk_parameters(
    config: RunConfig, expert_layers: Sequence[bool], *, is_first: bool, is_last: bool, is_critic: bool = False
) -> Parameters:
    """Return the parameters of a model chunk: the layers of one virtual stage on one rank.

    Args:
        config: settings of the run.
        expert_layers: for each layer of the chunk, whether it has experts.
        is_first: the chunk has the embedding.
        is_last: the chunk has the final norm, and the output layer or a critic's value head.
        is_critic: the chunk belongs to the critic.
    """
    dense = 0
    experts = 0
    for has_experts in expert_layers:
        norms = 4 if config.model.layer_norms == "around" else 2
        dense += _attention_parameters(config) + norms * _norm_parameters(config, config.transformer.hidden_size)
        if has_experts:
            dense += _router_parameters(config)
            experts += _expert_parameters(config)
        else:
            tp = config.parallel.tensor_model_parallel_size
            dense += _mlp_parameters(config, config.transformer.ffn_hidden_size, tp)
    if is_first:
        dense += _embedding_parameters(config)
    if is_last:
        dense += _head_parameters(config, is_first=is_first, is_critic=is_critic)
    return Parameters(dense=dense, experts=experts)


def _norm_parameters(config: RunConfig, width: int) -> int:
    return 2 * width if config.transformer.normalization == "LayerNorm" else width


def _attention_parameters(config: RunConfig) -> int:
    """Parameters of one layer's attention on one tensor-parallel rank."""
    transformer = config.transformer
    hidden = transformer.hidden_size
    tp = config.parallel.tensor_model_parallel_size
    if config.latent is not None:
        return _latent_attention_parameters(config)

    query_width = transformer.num_attention_heads * transformer.kv_channels // tp
    key_width = transformer.num_query_groups * transformer.kv_channels // tp
    qkv_width = query_width + 2 * key_width
    parameters = hidden * qkv_width + query_width * hidden
    if transformer.add_bias_linear or transformer.add_qkv_bias:
        parameters += qkv_width
    if transformer.add_bias_linear or config.model.attention_output_bias:
        parameters += hidden
    if transformer.softmax_type == "learnable":
        parameters += transformer.num_attention_heads // tp
    if transformer.qk_layernorm and config.model.qk_norm_over == "all_heads":
        parameters += query_width + key_width
    elif transformer.qk_layernorm:
        parameters += 2 * _norm_parameters(config, transformer.kv_channels)
    return parameters


def _latent_attention_parameters(config: RunConfig) -> int:
    transformer = config.transformer
    latent = config.latent
    assert latent is not None
    hidden = transformer.hidden_size
    heads = transformer.num_attention_heads // config.parallel.tensor_model_parallel_size
    query_width = heads * (latent.qk_head_dim + latent.qk_pos_emb_head_dim)

    # Each TP rank has the whole projections to the latents.
    parameters = hidden * (latent.kv_lora_rank + latent.qk_pos_emb_head_dim)
    parameters += latent.kv_lora_rank * heads * (latent.qk_head_dim + latent.v_head_dim)
    if latent.q_lora_rank is None:
        parameters += hidden * query_width
    else:
        parameters += hidden * latent.q_lora_rank + latent.q_lora_rank * query_width
    parameters += heads * latent.v_head_dim * hidden
    if transformer.add_bias_linear:
        parameters += hidden
    if transformer.qk_layernorm:
        parameters += _norm_parameters(config, latent.kv_lora_rank)
        if latent.q_lora_rank is not None:
            parameters += _norm_parameters(config, latent.q_lora_rank)
    return parameters


def _mlp_parameters(config: RunConfig, width: int, ranks: int) -> int:
    """Return the parameters of an MLP of which ``ranks`` ranks have an equal part each."""
    transformer = config.transformer
    hidden = transformer.hidden_size
    first_width = (2 * width if transformer.gated_linear_unit else width) // ranks
    parameters = hidden * first_width + width // ranks * hidden
    if transformer.add_bias_linear:
        parameters += first_width + hidden
    return parameters


def _router_parameters(config: RunConfig) -> int:
    """Return the parameters of the router, and of the experts that every token passes."""
    experts = config.experts
    assert experts is not None
    parameters = config.transformer.hidden_size * experts.num_moe_experts
    if config.transformer.add_bias_linear:
        parameters += experts.num_moe_experts
    shared_width = experts.moe_shared_expert_intermediate_size
    if shared_width:
        parameters += _mlp_parameters(config, shared_width, config.parallel.tensor_model_parallel_size)
    if experts.moe_shared_expert_gate:
        parameters += config.transformer.hidden_size
    return parameters


def _expert_parameters(config: RunConfig) -> int:
    experts = config.experts
    assert experts is not None
    of_rank = experts.num_moe_experts // config.parallel.expert_model_parallel_size
    return of_rank * _mlp_parameters(config, experts.moe_ffn_hidden_size, config.expert_tensor_parallel_size)


def _embedding_parameters(config: RunConfig) -> int:
    rows = config.model.padded_vocab_size // config.parallel.tensor_model_parallel_size
    if config.model.position_embedding_type == "learned_absolute":
        rows += config.model.max_position_embeddings
    return rows * config.transformer.hidden_size


def _head_parameters(config: RunConfig, *, is_first: bool, is_critic: bool) -> int:
    hidden = config.transformer.hidden_size
    final_norm = _norm_parameters(config, hidden)
    if is_critic:
        return final_norm + hidden
    if is_first and not config.model.untie_embeddings_and_output_weights:
        return final_norm  # the output layer is the embedding
    return final_norm + config.model.padded_vocab_size // config.parallel.tensor_model_parallel_size * hidden
