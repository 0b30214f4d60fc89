"""GPT-2: Megatron's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.weights.conversions import (
    COLUMNS,
    ROWS,
    STACKED_QUERY_KEY_VALUE,
    VOCABULARY,
    WHOLE,
    Conversion,
    transposed,
)
from megatron_rc.launch.weights.family import Family, Flags, Rule, must_be


def _read(config: Mapping[str, Any]) -> Flags:
    must_be(config, "activation_function", "gelu", default="gelu_new")
    must_be(config, "scale_attn_weights", True, default=True)
    must_be(config, "scale_attn_by_inverse_layer_idx", False, default=False)
    return {
        "group-query-attention": "false",
        "kv-channels": str(config["n_embd"] // config["n_head"]),
        "position-embedding-type": "learned_absolute",
        "normalization": "LayerNorm",
        "swiglu": "false",
        "add-qkv-bias": "false",
        "qk-layernorm": "false",
        "num-layers": str(config["n_layer"]),
        "hidden-size": str(config["n_embd"]),
        "ffn-hidden-size": str(config.get("n_inner") or 4 * config["n_embd"]),
        "num-attention-heads": str(config["n_head"]),
        "max-position-embeddings": str(config["n_positions"]),
        "norm-epsilon": str(config["layer_norm_epsilon"]),
        "untie-embeddings-and-output-weights": "false" if config.get("tie_word_embeddings", True) else "true",
        "vocab-size": str(config["vocab_size"]),
    }


def _hugging_face_config(config: RunConfig) -> Any:
    from transformers import GPT2Config

    layers, model = config.transformer, config.model
    return GPT2Config(
        vocab_size=model.vocab_size,
        n_embd=layers.hidden_size,
        n_inner=layers.ffn_hidden_size,
        n_layer=layers.num_layers,
        n_head=layers.num_attention_heads,
        n_positions=model.max_position_embeddings,
        layer_norm_epsilon=layers.layernorm_epsilon,
        activation_function="gelu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=not model.untie_embeddings_and_output_weights,
    )


def _matches(config: RunConfig) -> bool:
    layers = config.transformer
    return (
        layers.normalization == "LayerNorm"
        and not layers.gated_linear_unit
        and config.model.position_embedding_type == "learned_absolute"
        and layers.add_bias_linear
        and not layers.qk_layernorm
        and config.experts is None
        and layers.num_query_groups == layers.num_attention_heads
        and layers.kv_channels * layers.num_attention_heads == layers.hidden_size
    )


def _norm(local: str, engine: str, name: str) -> tuple[Rule, ...]:
    return tuple(
        Rule((f"{local}.{kind}", f"{engine}_{kind}"), (f"transformer.h.{{layer}}.{name}.{kind}",), WHOLE)
        for kind in ("weight", "bias")
    )


def _linear(megatron: str, name: str, weight: Conversion, bias: Conversion) -> tuple[Rule, ...]:
    return (
        Rule((f"{megatron}.weight",), (f"transformer.h.{{layer}}.{name}.weight",), transposed(weight)),
        Rule((f"{megatron}.bias",), (f"transformer.h.{{layer}}.{name}.bias",), bias),
    )


GPT2 = Family(
    name="gpt2",
    read=_read,
    matches=_matches,
    hugging_face_config=_hugging_face_config,
    embedding=(
        Rule(("embedding.word_embeddings.weight",), ("transformer.wte.weight",), VOCABULARY),
        Rule(("embedding.position_embeddings.weight",), ("transformer.wpe.weight",), WHOLE),
    ),
    layer=(
        *_norm("input_layernorm", "self_attention.linear_qkv.layer_norm", "ln_1"),
        *_linear("self_attention.linear_qkv", "attn.c_attn", STACKED_QUERY_KEY_VALUE, STACKED_QUERY_KEY_VALUE),
        *_linear("self_attention.linear_proj", "attn.c_proj", COLUMNS, WHOLE),
        *_norm("pre_mlp_layernorm", "mlp.linear_fc1.layer_norm", "ln_2"),
        *_linear("mlp.linear_fc1", "mlp.c_fc", ROWS, ROWS),
        *_linear("mlp.linear_fc2", "mlp.c_proj", COLUMNS, WHOLE),
    ),
    head=tuple(
        Rule((f"decoder.final_layernorm.{kind}",), (f"transformer.ln_f.{kind}",), WHOLE) for kind in ("weight", "bias")
    ),
    untied_head=(Rule(("output_layer.weight",), ("lm_head.weight",), VOCABULARY),),
)
