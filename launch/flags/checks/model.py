"""Checks of the model without its experts."""

from __future__ import annotations

from megatron_rc.launch.errors import ConfigurationError, flag, require, require_multiple
from megatron_rc.launch.run_config import RunConfig


def check_model(config: RunConfig) -> None:
    """Check layers, positions, vocabulary and the layers' implementation."""
    layers, tp = config.transformer, ("tensor_model_parallel_size", config.parallel.tensor_model_parallel_size)
    require_multiple("num_attention_heads", layers.num_attention_heads, *tp)
    require_multiple("num_query_groups", layers.num_query_groups, *tp)
    require_multiple("num_attention_heads", layers.num_attention_heads, "num_query_groups", layers.num_query_groups)
    require_multiple("ffn_hidden_size", layers.ffn_hidden_size, *tp)
    for name, rate in (("attention_dropout", layers.attention_dropout), ("hidden_dropout", layers.hidden_dropout)):
        if rate != 0:
            raise ConfigurationError(f"{flag(name)} {rate} must be 0: π_old and π_θ would differ by noise")
    _check_latents(config)
    _check_positions(config)
    padded = config.model.padded_vocab_size
    require_multiple("padded_vocab_size", padded, *tp)
    if padded < config.model.vocab_size:
        raise ConfigurationError(f"--padded-vocab-size {padded} is less than the {config.model.vocab_size} tokens")
    if config.model.transformer_impl == "transformer_engine":
        if config.launch.on_cpu:
            raise ConfigurationError("--transformer-impl transformer_engine needs a CUDA device: use local on the CPU")
        require("transformer_engine", "--transformer-impl transformer_engine", "gpu")


def _check_latents(config: RunConfig) -> None:
    """Check multi-latent attention, whose heads have widths of their own."""
    latent, layers, parallel, model = config.latent, config.transformer, config.parallel, config.model
    if latent is None:
        return
    if not config.launch.on_cpu:
        require("transformer_engine", "--multi-latent-attention on a GPU", "gpu")
    if latent.qk_pos_emb_head_dim % 2:
        raise ConfigurationError(f"--qk-pos-emb-head-dim {latent.qk_pos_emb_head_dim} must be even: it is rotated")
    positions = model.position_embedding_type
    for name, is_wrong, remedy in (
        ("--group-query-attention", layers.num_query_groups != layers.num_attention_heads, "drop it"),
        ("--add-qkv-bias", layers.add_qkv_bias, "drop it"),
        ("--qk-l2-norm", config.megatron.given.get("qk_l2_norm"), "drop it"),
        ("--no-rope-freq", config.megatron.given.get("no_rope_freq"), "drop it"),
        ("--use-rope-scaling", model.rope_scaling, "use --rope-type yarn"),
        (f"--rotary-percent {model.rotary_percent}", model.rotary_percent != 1, "drop it"),
        (f"--position-embedding-type {positions}", positions != "rope", "use rope"),
    ):
        if is_wrong:
            raise ConfigurationError(f"{name} does not go with --multi-latent-attention: {remedy}")
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        raise ConfigurationError(
            f"--multi-latent-attention with --tensor-model-parallel-size {parallel.tensor_model_parallel_size} needs "
            "--sequence-parallel: without it Megatron leaves other ranks' heads out of the rotated keys' gradient"
        )


def _check_positions(config: RunConfig) -> None:
    model, length, width = config.model, config.training.seq_length, config.transformer.kv_channels
    rotated = int(width * model.rotary_percent)
    # Latent attention rotates a width of its own.
    if model.position_embedding_type == "rope" and config.latent is None and (rotated < 2 or rotated % 2):
        raise ConfigurationError(
            f"--kv-channels {width} with --rotary-percent {model.rotary_percent} rotates {rotated} dimensions: rotary "
            "embeddings need an even number"
        )
    if length > model.max_position_embeddings:
        raise ConfigurationError(
            f"--seq-length {length} is longer than --max-position-embeddings {model.max_position_embeddings}"
        )
    if model.sliding_window is not None and length > model.sliding_window:
        raise ConfigurationError(
            f"--seq-length {length} is longer than --sliding-window {model.sliding_window}, the reach of the published "
            "model's attention, which is not limited here: use shorter sequences"
        )
