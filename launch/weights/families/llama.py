"""Llama and its descendants without experts, Mistral, Qwen2 and Qwen3; and Mixtral."""

from __future__ import annotations

from typing import Any

from megatron_rc.launch.weights.conversions import COLUMNS, QUERY_KEY_VALUE, VOCABULARY, WHOLE
from megatron_rc.launch.weights.entries import (
    File,
    Flags,
    Row,
    UnknownFeatureError,
    always,
    entry,
    follows,
    lacks,
    only,
)
from megatron_rc.launch.weights.family import ExpertNames, Family, Rule, gated_mlp
from megatron_rc.launch.weights.rotary import rotary_row


def _full_attention(file: File) -> Flags:
    """Check the layers' kinds of attention, which must all be full attention."""
    others = [kind for kind in file.get("layer_types") or [] if kind != "full_attention"]
    if others:
        raise UnknownFeatureError(f"layer_types has {others[0]!r}, not 'full_attention' alone")
    return {}


# Rows of decoders with a gated MLP and any attention.
GATED: tuple[Row, ...] = (
    only("hidden_act", "silu"),
    entry("num_hidden_layers", "num-layers"),
    entry("hidden_size", "hidden-size"),
    entry("num_attention_heads", "num-attention-heads"),
    entry("max_position_embeddings", "max-position-embeddings"),
    entry("rms_norm_eps", "norm-epsilon"),
    entry("tie_word_embeddings", "untie-embeddings-and-output-weights", default=False, inverted=True),
    entry("vocab_size", "vocab-size"),
    always("normalization", "RMSNorm"),
    always("swiglu", True),
    always("openai-gelu", False),
    always("disable-bias-linear", True),
)
_LLAMAS: tuple[Row, ...] = (
    *GATED,
    only("mlp_bias", False),
    only("use_sliding_window", False),
    Row(_full_attention),
    follows("group-query-attention", lambda file: True, lambda config: True),
    lacks("multi-latent-attention"),
)
# Rows of experts with a softmax router without groups.
SOFTMAX_ROUTER: tuple[Row, ...] = (
    lacks("moe-router-score-function"),
    lacks("moe-router-topk-scaling-factor"),
    lacks("moe-router-group-topk"),
    lacks("moe-router-enable-expert-bias"),
)
NO_SHARED_EXPERTS: tuple[Row, ...] = (
    lacks("moe-shared-expert-intermediate-size"),
    lacks("moe-shared-expert-gate"),
)
_DENSE: tuple[Row, ...] = (always("num-experts", None), entry("intermediate_size", "ffn-hidden-size"))
ANY_LENGTH: tuple[Row, ...] = (always("sliding-window", None),)
_NULL_IS_ANY_LENGTH = entry("sliding_window", "sliding-window", default=None)
# Mistral's first models have a window of 4096 tokens, even if the file lacks the entry; later models have null.
_MISTRALS = entry("sliding_window", "sliding-window", default=lambda file: None if "sliding_window" in file else 4096)
CHOSEN_EXPERTS = entry("num_experts_per_tok", "moe-router-topk")


def _heads(groups: int | None, head_dim: int | None) -> tuple[Row, ...]:
    """Rows for the query groups and the head size; defaults for files that lack them, None: derived from the file."""

    def num_groups(file: File) -> int | None:
        return groups if groups and "num_key_value_heads" not in file else file["num_attention_heads"]

    def size(file: File) -> int | None:
        derived: int = file["hidden_size"] // file["num_attention_heads"]
        return head_dim if head_dim and "head_dim" not in file else derived

    return (
        entry("num_key_value_heads", "num-query-groups", default=num_groups),
        entry("head_dim", "kv-channels", default=size),
    )


_WHOLE_HEADS = rotary_row()
_NO_BIAS: tuple[Row, ...] = (always("add-qkv-bias", False), only("attention_bias", False))
_NO_NORMS: tuple[Row, ...] = (always("qk-layernorm", False),)
# Qwen2 always has this bias; it ignores attention_bias.
QKV_BIAS: tuple[Row, ...] = (always("add-qkv-bias", True), *_NO_NORMS)
QK_NORMS: tuple[Row, ...] = (*_NO_BIAS, always("qk-layernorm", True))


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


GATED_MLP = gated_mlp("mlp.", "model.layers.{layer}.mlp.")
EMBEDDING = (Rule(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), VOCABULARY),)
HEAD = (Rule(("decoder.final_layernorm.weight",), ("model.norm.weight",), WHOLE),)
UNTIED_HEAD = (Rule(("output_layer.weight",), ("lm_head.weight",), VOCABULARY),)
_QKV_BIAS = Rule(
    ("self_attention.linear_qkv.bias",),
    tuple(f"model.layers.{{layer}}.self_attn.{part}_proj.bias" for part in "qkv"),
    QUERY_KEY_VALUE,
    holds=lambda config: config.transformer.add_qkv_bias,
)
_NORM_RULES = tuple(
    Rule(
        (f"self_attention.{part}_layernorm.weight",),
        (f"model.layers.{{layer}}.self_attn.{part}_norm.weight",),
        WHOLE,
        holds=lambda config: config.transformer.qk_layernorm,
    )
    for part in "qk"
)


def gated_family(
    name: str,
    config_class: str,
    fields: tuple[Row, ...],
    rotary: Row = _WHOLE_HEADS,
    attention: tuple[Row, ...] = (*_NO_BIAS, *_NO_NORMS),
    default_groups: int | None = None,
    default_head_dim: int | None = None,
    **others: Any,
) -> Family:
    """Make a family with Llama's layers.

    ``fields`` are the rows of the MLP or the experts, and further rows; ``attention`` has the rows for the bias of
    queries, keys and values, and for the norms of queries and keys. If a file has no number of key heads or no width of
    a head, the defaults hold; None: as many as attention heads, and hidden size / attention heads.
    ``others`` are fields of :class:`Family`.
    """
    return Family(
        name=name,
        config_class=config_class,
        fields=(*_LLAMAS, *_heads(default_groups, default_head_dim), rotary, *attention, *fields),
        embedding=EMBEDDING,
        layer=(*_GATED_ATTENTION, _QKV_BIAS, *_NORM_RULES),
        dense_layer=GATED_MLP,
        head=HEAD,
        untied_head=UNTIED_HEAD,
        **others,
    )


def router(hugging_face: str) -> tuple[Rule, ...]:
    """Rule of a layer's router; ``hugging_face`` is the name of its block in files."""
    return (Rule(("mlp.router.weight",), (f"model.layers.{{layer}}.{hugging_face}.gate.weight",), WHOLE),)


_LLAMA = gated_family("llama", "LlamaConfig", (*_DENSE, *ANY_LENGTH), in_bridge=True)
_MISTRAL = gated_family("mistral", "MistralConfig", (*_DENSE, _MISTRALS), default_groups=8)
_QWEN2 = gated_family(
    "qwen2", "Qwen2Config", (*_DENSE, *ANY_LENGTH), default_groups=32, attention=QKV_BIAS, in_bridge=True
)
_QWEN3 = gated_family(
    "qwen3",
    "Qwen3Config",
    (*_DENSE, *ANY_LENGTH),
    default_groups=32,
    default_head_dim=128,
    attention=QK_NORMS,
    in_bridge=True,
)
_MIXTRAL = gated_family(
    "mixtral",
    "MixtralConfig",
    (
        _NULL_IS_ANY_LENGTH,
        *SOFTMAX_ROUTER,
        *NO_SHARED_EXPERTS,
        lacks("moe-layer-freq"),
        only("router_jitter_noise", 0.0),
        entry("intermediate_size", "moe-ffn-hidden-size", other_flag="ffn-hidden-size"),
        entry("num_local_experts", "num-experts", other_name="num_experts"),
        CHOSEN_EXPERTS,
        always("moe-router-pre-softmax", False),
    ),
    rotary=rotary_row(1000000.0),
    default_groups=8,
    expert_layer=router("block_sparse_moe"),
    expert_names=ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
)

# If a run fits several families, the first one is used.
LLAMA_FAMILIES = (_LLAMA, _MISTRAL, _QWEN2, _QWEN3, _MIXTRAL)
