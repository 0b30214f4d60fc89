"""DeepSeek-V3 (also Moonlight): latent attention, experts with a sigmoid router, dense first layers.

Its rotated dimensions are interleaved in pairs, as Megatron's latent attention expects.
"""

from __future__ import annotations

from typing import Any

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.weights.conversions import COLUMNS, ROWS, WHOLE
from megatron_rc.launch.weights.entries import File, Flags, Row, UnknownFeatureError, always, entry, only, stated
from megatron_rc.launch.weights.families.llama import (
    EMBEDDING,
    GATED,
    GATED_MLP,
    HEAD,
    PLAIN_ATTENTION,
    SILU,
    UNTIED_HEAD,
    USUAL_NORMS,
)
from megatron_rc.launch.weights.families.sigmoid_experts import EXPERT_LAYER, dense_first, sigmoid_experts
from megatron_rc.launch.weights.family import ExpertNames, Family, Rule
from megatron_rc.launch.weights.rotary import LATENT_ROTARY


def _check_heads(file: File) -> Flags:
    heads = file["num_attention_heads"]
    groups = file.get("num_key_value_heads")
    if groups not in (None, heads):
        raise UnknownFeatureError(f"num_key_value_heads is {groups!r}, not the {heads} of num_attention_heads")
    # transformers' other name of the rotated width.
    rotated = file["qk_rope_head_dim"]
    if file.get("head_dim") not in (None, rotated):
        raise UnknownFeatureError(f"head_dim is {file['head_dim']!r}, not the {rotated} of qk_rope_head_dim")
    return {}


# Each attention head has key and value heads of its own.
_HEADS = Row(
    _check_heads,
    lambda config: {"num_key_value_heads": config.transformer.num_attention_heads},
    lambda config: config.transformer.num_query_groups == config.transformer.num_attention_heads,
)

# transformers computes the router in float32 anyway; vLLM does if the file says so.
_ROUTER_DTYPE = Row(
    write=lambda config: (
        {"moe_router_dtype": "float32"} if config.megatron.given.get("moe_router_dtype") == "fp32" else {}
    )
)
_LAYER = "model.layers.{layer}."
_ATTENTION = "model.layers.{layer}.self_attn."


def _has_latent_queries(config: RunConfig) -> bool:
    return config.latent is not None and config.latent.q_lora_rank is not None


def _norm(part: str, hugging_face: str, **how: Any) -> Rule:
    names = (f"self_attention.{part}_layernorm.weight", f"self_attention.linear_{part}_up_proj.layer_norm_weight")
    return Rule(names, (f"{_ATTENTION}{hugging_face}.weight",), WHOLE, **how)


def _linear(part: str, hugging_face: str, conversion: Any, **how: Any) -> Rule:
    return Rule((f"self_attention.linear_{part}.weight",), (f"{_ATTENTION}{hugging_face}.weight",), conversion, **how)


_LATENT_ATTENTION = (
    Rule(("input_layernorm.weight",), (f"{_LAYER}input_layernorm.weight",), WHOLE),
    _linear("q_proj", "q_proj", ROWS, holds=lambda config: not _has_latent_queries(config)),
    _linear("q_down_proj", "q_a_proj", WHOLE, holds=_has_latent_queries),
    _norm("q", "q_a_layernorm", holds=_has_latent_queries),
    _linear("q_up_proj", "q_b_proj", ROWS, holds=_has_latent_queries),
    _linear("kv_down_proj", "kv_a_proj_with_mqa", WHOLE),
    _norm("kv", "kv_a_layernorm"),
    _linear("kv_up_proj", "kv_b_proj", ROWS),
    _linear("proj", "o_proj", COLUMNS),
    Rule(
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        (f"{_LAYER}post_attention_layernorm.weight",),
        WHOLE,
    ),
)


def latent_family(name: str, config_class: str, experts: tuple[Row, ...], default_q_lora_rank: int) -> Family:
    """Make a family with DeepSeek-V3's layers; ``default_q_lora_rank`` is used if the file lacks the entry."""
    return Family(
        name=name,
        config_class=config_class,
        fields=(
            *GATED,
            always("multi-latent-attention", True),
            only("attention_bias", False),
            only("rope_interleave", True),
            stated("moe_layer_freq", 1),  # SGLang and older vLLM ask for it
            _HEADS,
            _ROUTER_DTYPE,
            entry(
                "q_lora_rank",
                "q-lora-rank",
                default=lambda file: None if "q_lora_rank" in file else default_q_lora_rank,
            ),
            entry("kv_lora_rank", "kv-lora-rank"),
            entry("qk_nope_head_dim", "qk-head-dim"),
            entry("qk_rope_head_dim", "qk-pos-emb-head-dim"),
            entry("v_head_dim", "v-head-dim"),
            LATENT_ROTARY,
            *experts,
            always("disable-bias-linear", True),
            always("add-qkv-bias", False),
            *USUAL_NORMS,
            *PLAIN_ATTENTION,
            *SILU,
            always("qk-layernorm", True),
            always("sliding-window", None),
        ),
        embedding=EMBEDDING,
        layer=_LATENT_ATTENTION,
        dense_layer=GATED_MLP,
        expert_layer=EXPERT_LAYER,
        expert_names=ExpertNames(),
        head=HEAD,
        untied_head=UNTIED_HEAD,
    )


DEEPSEEK_V3 = latent_family(
    "deepseek_v3",
    "DeepseekV3Config",
    sigmoid_experts(dense_layers=dense_first(3), scaling=2.5, groups=8, chosen=4),
    default_q_lora_rank=1536,
)
