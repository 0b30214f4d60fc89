"""Checks of the model without its experts."""

from __future__ import annotations

from megatron_rc.launch.errors import ConfigurationError, has_module, require, require_multiple
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.layer_patterns import number_or_pattern


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
    if model.is_rotary and config.latent is None:
        rotated = int(layers.kv_channels * model.rotary_percent)
        if rotated < 2 or rotated % 2:
            raise ConfigurationError(
                f"{config.typed('kv_channels', 'rotary_percent')} rotates {rotated} dimensions: rotary embeddings need "
                "an even number"
            )
    if model.layer_norms != "before":
        _check_own_norms(config, "layer_norms")
    if model.qk_norm_over != "head":
        _check_own_norms(config, "qk_norm_over")
    _check_pattern(config, "no_rope_freq", divides=True)
    _check_pattern(config, "window_attn_skip_freq", divides=False)
    if model.transformer_impl == "transformer_engine":
        require("transformer_engine", "--transformer-impl transformer_engine", "gpu")
    if config.latent is not None:
        _check_latent_attention(config)
    if model.is_hybrid:
        _check_hybrid(config)


def _check_own_norms(config: RunConfig, name: str) -> None:
    """Check a place or a width of norms that Megatron's own layers lack; RMSNorms of dense local layers have it."""
    if config.model.transformer_impl != "local":
        raise ConfigurationError(
            f"{config.typed(name)} needs --transformer-impl local: this program has no such norms for Transformer "
            "Engine's layers"
        )
    if config.transformer.normalization != "RMSNorm":
        raise ConfigurationError(f"{config.typed(name)} needs --normalization RMSNorm")
    for flag, section in (("--num-experts", config.experts), ("--multi-latent-attention", config.latent)):
        if section is not None:
            raise ConfigurationError(f"{config.typed(name)} does not go with {flag}: drop one of them")


def _check_pattern(config: RunConfig, name: str, *, divides: bool) -> None:
    """Check a pattern of layers: a list has an entry for each layer; ``divides``: a number must divide theirs."""
    value = getattr(config.transformer, name)
    if value is None:
        return
    pattern = number_or_pattern(value)
    layers = config.transformer.num_layers
    if isinstance(pattern, int):
        if divides and layers % pattern:
            raise ConfigurationError(
                f"{config.typed(name)} must divide {config.typed('num_layers')}: give a list of the layers"
            )
    elif len(pattern) != layers:
        raise ConfigurationError(f"{config.typed(name)} is of {len(pattern)} layers, but --num-layers is {layers}")


def _check_latent_attention(config: RunConfig) -> None:
    if not config.launch.on_cpu:
        require("transformer_engine", "--multi-latent-attention on a GPU", "gpu")
    if config.megatron.given.get("qk_l2_norm"):
        raise ConfigurationError(f"{config.typed('qk_l2_norm')} does not go with --multi-latent-attention: drop it")
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
