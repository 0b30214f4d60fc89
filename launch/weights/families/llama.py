"""Llama and its descendants without experts, Mistral, Qwen2 and Qwen3; and Mixtral."""

from __future__ import annotations

from typing import Any

from megatron_rc.launch.weights.biases import BIASES_OF_ATTENTION, BIASES_OF_MLP, bias_row
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


# Rows of an attention without sinks, in which every query sees all tokens before it.
PLAIN_ATTENTION: tuple[Row, ...] = (lacks("softmax-type"), lacks("window-size"))
_FULL_ATTENTION: tuple[Row, ...] = (Row(_full_attention), *PLAIN_ATTENTION)
# Rows of a gated MLP with SiLU.
SILU: tuple[Row, ...] = (
    lacks("quick-geglu"),
    lacks("glu-linear-offset"),
    lacks("activation-func-clamp-value"),
)
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
)
# Rows of layers whose input norms, positions and MLPs are as Llama's.
USUAL_NORMS: tuple[Row, ...] = (lacks("layer-norms"), lacks("qk-norm-over"))
ALL_ROTATED: tuple[Row, ...] = (lacks("no-rope-freq"),)
HALVES_ROTATED: tuple[Row, ...] = (lacks("rotary-interleaved"),)
_LLAMAS: tuple[Row, ...] = (
    *GATED,
    only("use_sliding_window", False),
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
DENSE: tuple[Row, ...] = (always("num-experts", None), entry("intermediate_size", "ffn-hidden-size"))
ANY_LENGTH: tuple[Row, ...] = (always("sliding-window", None),)
_NULL_IS_ANY_LENGTH = entry("sliding_window", "sliding-window", default=None)
# Mistral's first models have a window of 4096 tokens, even if the file lacks the entry; later models have null.
_MISTRALS = entry("sliding_window", "sliding-window", default=lambda file: None if "sliding_window" in file else 4096)
CHOSEN_EXPERTS = entry("num_experts_per_tok", "moe-router-topk")


def _heads(groups: int | None, head_dim: int | None) -> tuple[Row, ...]:
    """Rows of the query groups and the head size.

    A file without the entry gets the class default of transformers, ``groups`` or ``head_dim``. For null, or without
    such a default, there are as many groups as heads, and the head size is hidden size / heads.
    """

    def num_groups(file: File) -> int | None:
        is_missing = "num_key_value_heads" not in file
        return groups if groups and is_missing else file["num_attention_heads"]

    def size(file: File) -> int | None:
        derived: int = file["hidden_size"] // file["num_attention_heads"]
        is_missing = "head_dim" not in file
        return head_dim if head_dim and is_missing else derived

    return (
        entry("num_key_value_heads", "num-query-groups", default=num_groups),
        entry("head_dim", "kv-channels", default=size),
    )


_WHOLE_HEADS = rotary_row()
NO_QK_NORMS: tuple[Row, ...] = (always("qk-layernorm", False),)
_NO_BIAS = bias_row(qkv=False, unused=("attention_bias", "mlp_bias"))
# Qwen2 always has this bias; it ignores attention_bias.
_QKV_BIAS = bias_row(qkv=True, unused=("mlp_bias",))
_LLAMAS_BIAS = bias_row(qkv="attention_bias", output="attention_bias", mlp="mlp_bias")
# Queries and keys with norms, as Qwen3's.
QK_NORMS: tuple[Row, ...] = (
    bias_row(qkv="attention_bias", output="attention_bias", unused=("mlp_bias",)),
    always("qk-layernorm", True),
)


_LAYER = "model.layers.{layer}."
INPUT_NORM = Rule(
    ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
    (f"{_LAYER}input_layernorm.weight",),
    WHOLE,
)
MLP_NORM = Rule(
    ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    (f"{_LAYER}post_attention_layernorm.weight",),
    WHOLE,
)
NORM_RULES = (INPUT_NORM, MLP_NORM)
OUTPUT_PROJECTION = Rule(("self_attention.linear_proj.weight",), (f"{_LAYER}self_attn.o_proj.weight",), COLUMNS)
ATTENTION = (
    Rule(
        ("self_attention.linear_qkv.weight",),
        tuple(f"{_LAYER}self_attn.{part}_proj.weight" for part in "qkv"),
        QUERY_KEY_VALUE,
    ),
    OUTPUT_PROJECTION,
)


GATED_MLP = gated_mlp("mlp.", "model.layers.{layer}.mlp.")
EMBEDDING = (Rule(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), VOCABULARY),)
HEAD = (Rule(("decoder.final_layernorm.weight",), ("model.norm.weight",), WHOLE),)
UNTIED_HEAD = (Rule(("output_layer.weight",), ("lm_head.weight",), VOCABULARY),)
QK_NORM_RULES = tuple(
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
    attention: tuple[Row, ...] = (_NO_BIAS, *NO_QK_NORMS),
    layout: tuple[Row, ...] = (*USUAL_NORMS, *ALL_ROTATED, *HALVES_ROTATED),
    rules: tuple[Rule, ...] | None = None,
    mlp_rules: tuple[Rule, ...] | None = None,
    kinds: tuple[Row, ...] = _FULL_ATTENTION,
    activation: tuple[Row, ...] = SILU,
    default_groups: int | None = None,
    default_head_dim: int | None = None,
    **others: Any,
) -> Family:
    """Make a family with Llama's layers.

    ``fields`` are the rows of the MLP or the experts, and further rows; ``attention`` has the rows for biases, and for
    the norms of queries and keys; ``layout`` those for the place of norms and for rotated layers; ``kinds`` those for
    the layers' kinds of attention; ``activation`` those for the activation of MLPs or experts. ``rules`` and
    ``mlp_rules`` replace Llama's rules of a layer and of its MLP. If a file has no number of key heads or no width of a
    head, the defaults hold; None: as many as attention heads, and hidden size / attention heads. ``others`` are fields
    of :class:`Family`.
    """
    return Family(
        name=name,
        config_class=config_class,
        fields=(
            *_LLAMAS,
            *kinds,
            *activation,
            *_heads(default_groups, default_head_dim),
            rotary,
            *attention,
            *layout,
            *fields,
        ),
        embedding=EMBEDDING,
        layer=(*NORM_RULES, *ATTENTION, *BIASES_OF_ATTENTION, *QK_NORM_RULES) if rules is None else rules,
        dense_layer=(*GATED_MLP, *BIASES_OF_MLP) if mlp_rules is None else mlp_rules,
        head=HEAD,
        untied_head=UNTIED_HEAD,
        **others,
    )


def router(hugging_face: str) -> tuple[Rule, ...]:
    """Rule of a layer's router; ``hugging_face`` is the name of its block in files."""
    return (Rule(("mlp.router.weight",), (f"model.layers.{{layer}}.{hugging_face}.gate.weight",), WHOLE),)


_LLAMA = gated_family(
    "llama", "LlamaConfig", (*DENSE, *ANY_LENGTH), attention=(_LLAMAS_BIAS, *NO_QK_NORMS), in_bridge=True
)
_MISTRAL = gated_family("mistral", "MistralConfig", (*DENSE, _MISTRALS), default_groups=8)
_QWEN2 = gated_family(
    "qwen2",
    "Qwen2Config",
    (*DENSE, *ANY_LENGTH),
    default_groups=32,
    attention=(_QKV_BIAS, *NO_QK_NORMS),
    in_bridge=True,
)
_QWEN3 = gated_family(
    "qwen3",
    "Qwen3Config",
    (*DENSE, *ANY_LENGTH),
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
