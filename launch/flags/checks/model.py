"""Checks of the model without its experts."""

from __future__ import annotations

from megatron_rc.launch.errors import require, require_multiple
from megatron_rc.launch.flags.checks.hybrid import check_hybrid
from megatron_rc.launch.flags.checks.refuse import refuse
from megatron_rc.launch.run_config import RunConfig


def check_model(config: RunConfig) -> None:
    """Check layers, positions, vocabulary and the layers' implementation."""
    model, layers, tp = config.model, config.transformer, config.parallel.tensor_model_parallel_size
    for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
        require_multiple(name, getattr(layers, name), "tensor_model_parallel_size", tp)
    require_multiple("num_attention_heads", layers.num_attention_heads, "num_query_groups", layers.num_query_groups)
    require_multiple("padded_vocab_size", model.padded_vocab_size, "tensor_model_parallel_size", tp)
    rotated, length = int(layers.kv_channels * model.rotary_percent), config.training.seq_length
    # Latent attention rotates a width of its own.
    rotates = model.position_embedding_type == "rope" and config.latent is None
    has_engine = model.transformer_impl == "transformer_engine"
    wrong = {
        "{attention_dropout} must be 0: π_old and π_θ would differ by noise": layers.attention_dropout,
        "{hidden_dropout} must be 0: π_old and π_θ would differ by noise": layers.hidden_dropout,
        "{kv_channels} with {rotary_percent} rotates {rotated} dimensions: rotary embeddings need an even number": (
            rotates and (rotated < 2 or rotated % 2)
        ),
        "{seq_length} is longer than {max_position_embeddings}": length > model.max_position_embeddings,
        "{seq_length} is longer than {sliding_window}, the reach of the published model's attention, which is not "
        "limited here: use shorter sequences": model.sliding_window and length > model.sliding_window,
        "{padded_vocab_size} is less than the {tokens} tokens": model.padded_vocab_size < model.vocab_size,
        "{transformer_impl} needs a CUDA device: use local on the CPU": has_engine and config.launch.on_cpu,
    }
    refuse(config, wrong, rotated=rotated, tokens=model.vocab_size)
    if has_engine:
        require("transformer_engine", "--transformer-impl transformer_engine", "gpu")
    _check_latents(config)
    check_hybrid(config)


def _check_latents(config: RunConfig) -> None:
    latent, layers, parallel, model = config.latent, config.transformer, config.parallel, config.model
    if latent is None:
        return
    if not config.launch.on_cpu:
        require("transformer_engine", "--multi-latent-attention on a GPU", "gpu")
    excluded, given = " does not go with --multi-latent-attention: drop it", config.megatron.given
    wrong = {
        "--group-query-attention" + excluded: layers.num_query_groups != layers.num_attention_heads,
        "{qk_l2_norm}" + excluded: given.get("qk_l2_norm"),
        "{no_rope_freq}" + excluded: given.get("no_rope_freq"),
        "{position_embedding_type} does not go with --multi-latent-attention: use rope": (
            model.position_embedding_type != "rope"
        ),
        "{qk_pos_emb_head_dim} must be even: it is rotated": latent.qk_pos_emb_head_dim % 2,
        "--multi-latent-attention with {tensor_model_parallel_size} needs --sequence-parallel: without it Megatron "
        "leaves other ranks' heads out of the rotated keys' gradient": (
            parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel
        ),
    }
    refuse(config, wrong)
