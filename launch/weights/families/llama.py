"""Llama and its descendants: Qwen2, Qwen3, and with experts Mixtral and Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.weights.conversions import COLUMNS, GATE_AND_UP, QUERY_KEY_VALUE, VOCABULARY, WHOLE
from megatron_rc.launch.weights.family import (
    ExpertNames,
    Family,
    Flags,
    Rule,
    UnknownFeatureError,
    experts_of,
    must_be,
)

Reader = Callable[[Mapping[str, Any]], Flags]
Fields = Callable[[RunConfig], dict[str, Any]]


def _read_gated(kind: str) -> Callable[[Mapping[str, Any]], Flags]:
    """Llama and its descendants."""

    def read(config: Mapping[str, Any]) -> Flags:
        heads = config["num_attention_heads"]
        must_be(config, "hidden_act", "silu")
        for name in ("use_sliding_window", "mlp_bias", *(("attention_bias",) if kind != "qwen2" else ())):
            must_be(config, name, False, default=False)
        return {
            "num-layers": str(config["num_hidden_layers"]),
            "hidden-size": str(config["hidden_size"]),
            "ffn-hidden-size": str(config["intermediate_size"]),
            "num-attention-heads": str(heads),
            "group-query-attention": "true",
            "num-query-groups": str(config.get("num_key_value_heads") or heads),
            "kv-channels": str(config.get("head_dim") or config["hidden_size"] // heads),
            "max-position-embeddings": str(config["max_position_embeddings"]),
            "position-embedding-type": "rope",
            "rotary-base": str(_rotary_base(config)),
            "normalization": "RMSNorm",
            "norm-epsilon": str(config["rms_norm_eps"]),
            "swiglu": "true",
            "disable-bias-linear": "true",
            "add-qkv-bias": "true" if kind == "qwen2" else "false",
            "qk-layernorm": "true" if kind == "qwen3" else "false",
            "untie-embeddings-and-output-weights": "false" if config.get("tie_word_embeddings") else "true",
            "vocab-size": str(config["vocab_size"]),
        }

    return read


def _read_mixtral(config: Mapping[str, Any]) -> Flags:
    must_be(config, "sliding_window", None)
    must_be(config, "router_jitter_noise", 0.0, default=0.0)
    return _read_gated("mixtral")(config) | _read_experts(config, config["intermediate_size"], normalised=True)


def _read_qwen3_moe(config: Mapping[str, Any]) -> Flags:
    # Layers without experts, by period or by list.
    must_be(config, "decoder_sparse_step", 1, default=1)
    if config.get("mlp_only_layers"):
        must_be(config, "mlp_only_layers", [])
    normalised = config.get("norm_topk_prob", False)
    return _read_gated("qwen3")(config) | _read_experts(config, config["moe_intermediate_size"], normalised)


def _read_experts(config: Mapping[str, Any], width: int, normalised: bool) -> Flags:
    experts = config["num_local_experts"] if "num_local_experts" in config else config["num_experts"]
    return {
        "num-experts": str(experts),
        "moe-ffn-hidden-size": str(width),
        "moe-router-topk": str(config["num_experts_per_tok"]),
        "moe-router-pre-softmax": "false" if normalised else "true",
    }


def _rotary_base(config: Mapping[str, Any]) -> int:
    """Written by transformers 5 as ``rope_parameters``, before as ``rope_theta`` and ``rope_scaling``."""
    parameters = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
    scaling = config.get("rope_scaling") or parameters
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        raise UnknownFeatureError(f"rotary embeddings of type {kind!r}")
    base = float(parameters["rope_theta"])
    if base != int(base):
        raise UnknownFeatureError(f"rope_theta {base} is no whole number")
    return int(base)


def _dense_fields(config: RunConfig) -> dict[str, Any]:
    return {"intermediate_size": config.transformer.ffn_hidden_size}


def _mixtral_fields(config: RunConfig) -> dict[str, Any]:
    experts = experts_of(config)
    return {
        "intermediate_size": experts.moe_ffn_hidden_size,
        "num_local_experts": experts.num_moe_experts,
        "num_experts_per_tok": experts.moe_router_topk,
        "sliding_window": None,
    }


def _qwen3_moe_fields(config: RunConfig) -> dict[str, Any]:
    experts = experts_of(config)
    return {
        "intermediate_size": config.transformer.ffn_hidden_size,
        "moe_intermediate_size": experts.moe_ffn_hidden_size,
        "num_experts": experts.num_moe_experts,
        "num_experts_per_tok": experts.moe_router_topk,
        # A softmax over the chosen experts is one over all of them, divided by the sum of the chosen.
        "norm_topk_prob": not experts.moe_router_pre_softmax,
    }


def _gated_config(architecture: str, fields: Fields) -> Callable[[RunConfig], Any]:
    """What Llama and its descendants have in common, and what is special to one."""

    def describe(config: RunConfig) -> Any:
        import transformers

        layers, model = config.transformer, config.model
        return getattr(transformers, architecture)(
            vocab_size=model.vocab_size,
            hidden_size=layers.hidden_size,
            num_hidden_layers=layers.num_layers,
            num_attention_heads=layers.num_attention_heads,
            num_key_value_heads=layers.num_query_groups,
            head_dim=layers.kv_channels,
            max_position_embeddings=model.max_position_embeddings,
            rms_norm_eps=layers.layernorm_epsilon,
            rope_parameters={"rope_type": "default", "rope_theta": float(model.rotary_base)},
            tie_word_embeddings=not model.untie_embeddings_and_output_weights,
            **fields(config),
        )

    return describe


def _is_gated(config: RunConfig) -> bool:
    layers = config.transformer
    return (
        layers.normalization == "RMSNorm"
        and layers.gated_linear_unit
        and config.model.position_embedding_type == "rope"
        and not layers.add_bias_linear
    )


_GATED_ATTENTION = (
    Rule(
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        ("model.layers.{layer}.input_layernorm.weight",),
        WHOLE,
    ),
    Rule(
        ("self_attention.linear_qkv.weight",),
        tuple(f"model.layers.{{layer}}.self_attn.{part}_proj.weight" for part in "qkv"),
        QUERY_KEY_VALUE,
    ),
    Rule(("self_attention.linear_proj.weight",), ("model.layers.{layer}.self_attn.o_proj.weight",), COLUMNS),
    Rule(
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        ("model.layers.{layer}.post_attention_layernorm.weight",),
        WHOLE,
    ),
)


def _gated_mlp(megatron: str, hugging_face: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    return (
        Rule((f"{megatron}linear_fc1.weight",), (f"{hugging_face}{gate}", f"{hugging_face}{up}"), GATE_AND_UP),
        Rule((f"{megatron}linear_fc2.weight",), (f"{hugging_face}{down}",), COLUMNS),
    )


_QWEN_NAMES = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
_GATED_MLP = _gated_mlp("mlp.", "model.layers.{layer}.mlp.", *_QWEN_NAMES)
_QKV_BIAS = Rule(
    ("self_attention.linear_qkv.bias",),
    tuple(f"model.layers.{{layer}}.self_attn.{part}_proj.bias" for part in "qkv"),
    QUERY_KEY_VALUE,
)
_QK_NORMS = tuple(
    Rule((f"self_attention.{part}_layernorm.weight",), (f"model.layers.{{layer}}.self_attn.{part}_norm.weight",), WHOLE)
    for part in "qk"
)


def _gated_family(
    name: str,
    architecture: str,
    read: Reader,
    fields: Fields = _dense_fields,
    qkv_bias: bool = False,
    qk_norms: bool = False,
    mlp: tuple[Rule, ...] = _GATED_MLP,
    expert: tuple[Rule, ...] = (),
    expert_names: ExpertNames | None = None,
    pre_softmax: bool = False,
    in_bridge: bool = False,
) -> Family:
    """``pre_softmax``: its router may also leave the weights of the chosen experts as they are among all experts'."""
    return Family(
        name=name,
        read=read,
        matches=lambda config: (
            _is_gated(config)
            and (config.transformer.add_qkv_bias, config.transformer.qk_layernorm) == (qkv_bias, qk_norms)
            and (config.experts is not None) == bool(expert)
            and (pre_softmax or config.experts is None or not config.experts.moe_router_pre_softmax)
        ),
        hugging_face_config=_gated_config(architecture, fields),
        embedding=(Rule(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), VOCABULARY),),
        layer=(*_GATED_ATTENTION, *[_QKV_BIAS] * qkv_bias, *_QK_NORMS * qk_norms, *mlp),
        expert=expert,
        expert_names=expert_names,
        in_bridge=in_bridge,
        head=(Rule(("decoder.final_layernorm.weight",), ("model.norm.weight",), WHOLE),),
        untied_head=(Rule(("output_layer.weight",), ("lm_head.weight",), VOCABULARY),),
    )


def _router(hugging_face: str) -> tuple[Rule, ...]:
    return (Rule(("mlp.router.weight",), (f"model.layers.{{layer}}.{hugging_face}.gate.weight",), WHOLE),)


_LLAMA = _gated_family("llama", "LlamaConfig", _read_gated("llama"), in_bridge=True)
_QWEN2 = _gated_family("qwen2", "Qwen2Config", _read_gated("qwen2"), qkv_bias=True, in_bridge=True)
_QWEN3 = _gated_family("qwen3", "Qwen3Config", _read_gated("qwen3"), qk_norms=True, in_bridge=True)
_QWEN3_MOE = _gated_family(
    "qwen3_moe",
    "Qwen3MoeConfig",
    _read_qwen3_moe,
    _qwen3_moe_fields,
    qk_norms=True,
    mlp=_router("mlp"),
    expert=_gated_mlp("", "model.layers.{layer}.mlp.experts.{expert}.", *_QWEN_NAMES),
    expert_names=ExpertNames("mlp", "gate_proj", "up_proj", "down_proj"),
    pre_softmax=True,
)
_MIXTRAL = _gated_family(
    "mixtral",
    "MixtralConfig",
    _read_mixtral,
    _mixtral_fields,
    mlp=_router("block_sparse_moe"),
    expert=_gated_mlp(
        "", "model.layers.{layer}.block_sparse_moe.experts.{expert}.", "w1.weight", "w3.weight", "w2.weight"
    ),
    expert_names=ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
)

LLAMA_FAMILIES = (_LLAMA, _QWEN2, _QWEN3, _QWEN3_MOE, _MIXTRAL)
