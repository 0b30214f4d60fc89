"""Checks of the model without its experts."""

from __future__ import annotations

from megatron_rc.launch.errors import ConfigurationError, has_module, require, require_multiple
from megatron_rc.launch.run_config import RunConfig


def check_model(config: RunConfig) -> None:
    """Check layers, positions, vocabulary and the layers' implementation."""
    model = config.model
    layers = config.transformer
    length = config.training.seq_length
    tp = config.parallel.tensor_model_parallel_size
    for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
        require_multiple(name, getattr(layers, name), "tensor_model_parallel_size", tp)
    require_multiple("padded_vocab_size", model.padded_vocab_size, "tensor_model_parallel_size", tp)
    if length > model.max_position_embeddings:
        raise ConfigurationError(
            f"{config.typed('seq_length')} is longer than {config.typed('max_position_embeddings')}"
        )
    if model.sliding_window and length > model.sliding_window:
        raise ConfigurationError(
            f"{config.typed('seq_length')} is longer than {config.typed('sliding_window')}, the reach of the published "
            "model's attention, which is not limited here: use shorter sequences"
        )
    # Latent attention rotates a width of its own.
    if model.position_embedding_type == "rope" and config.latent is None:
        rotated = int(layers.kv_channels * model.rotary_percent)
        if rotated < 2 or rotated % 2:
            raise ConfigurationError(
                f"{config.typed('kv_channels', 'rotary_percent')} rotates {rotated} dimensions: rotary embeddings need "
                "an even number"
            )
    if model.transformer_impl == "transformer_engine":
        require("transformer_engine", "--transformer-impl transformer_engine", "gpu")
    if config.latent is not None:
        _check_latent_attention(config)
    if model.is_hybrid:
        _check_hybrid(config)


def _check_latent_attention(config: RunConfig) -> None:
    if not config.launch.on_cpu:
        require("transformer_engine", "--multi-latent-attention on a GPU", "gpu")
    for name in ("qk_l2_norm", "no_rope_freq"):
        if config.megatron.given.get(name):
            raise ConfigurationError(f"{config.typed(name)} does not go with --multi-latent-attention: drop it")
    if config.model.position_embedding_type != "rope":
        raise ConfigurationError(
            f"{config.typed('position_embedding_type')} does not go with --multi-latent-attention: use rope"
        )
    if config.parallel.tensor_model_parallel_size > 1 and not config.parallel.sequence_parallel:
        raise ConfigurationError(
            f"--multi-latent-attention with {config.typed('tensor_model_parallel_size')} needs --sequence-parallel: "
            "without it Megatron leaves other ranks' heads out of the rotated keys' gradient"
        )


def _check_hybrid(config: RunConfig) -> None:
    if not has_module("megatron.core.models.hybrid"):
        raise ConfigurationError(
            "--model hybrid needs megatron-core 0.18 or newer, which needs Python 3.12; the one installed has no "
            "HybridModel: install such a version, or use --model gpt"
        )
