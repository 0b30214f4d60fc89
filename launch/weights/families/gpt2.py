"""GPT-2: the layers of Megatron's defaults; published models also need ``--openai-gelu``."""

from __future__ import annotations

from megatron_rc.launch.weights.conversions import (
    COLUMNS,
    ROWS,
    STACKED_QUERY_KEY_VALUE,
    VOCABULARY,
    WHOLE,
    Conversion,
    transposed,
)
from megatron_rc.launch.weights.entries import Row, always, choice, entry, follows, lacks, only, written
from megatron_rc.launch.weights.family import Family, Rule

_FIELDS: tuple[Row, ...] = (
    choice(
        "activation_function",
        "openai-gelu",
        {"gelu_new": True, "gelu": False, "gelu_pytorch_tanh": True},
        default="gelu_new",
    ),
    only("add_cross_attention", False),
    only("scale_attn_weights", True),
    only("scale_attn_by_inverse_layer_idx", False),
    entry("n_layer", "num-layers"),
    entry("n_embd", "hidden-size"),
    entry("n_inner", "ffn-hidden-size", default=lambda file: 4 * file["n_embd"]),
    entry("n_head", "num-attention-heads"),
    follows(
        "group-query-attention",
        lambda file: False,
        lambda config: config.transformer.num_query_groups == config.transformer.num_attention_heads,
    ),
    follows(
        "kv-channels",
        lambda file: file["n_embd"] // file["n_head"],
        lambda config: (
            config.transformer.kv_channels * config.transformer.num_attention_heads == config.transformer.hidden_size
        ),
    ),
    entry("n_positions", "max-position-embeddings"),
    entry("layer_norm_epsilon", "norm-epsilon"),
    entry("tie_word_embeddings", "untie-embeddings-and-output-weights", default=True, inverted=True),
    entry("vocab_size", "vocab-size"),
    always("position-embedding-type", "learned_absolute"),
    always("normalization", "LayerNorm"),
    always("swiglu", False),
    always("disable-bias-linear", False),
    always("add-qkv-bias", False),
    always("qk-layernorm", False),
    lacks("layer-norms"),
    lacks("softmax-type"),
    lacks("window-size"),
    always("sliding-window", None),
    always("num-experts", None),
    lacks("multi-latent-attention"),
    # Published configs have dropout, which a policy must not have.
    *(written(name, 0.0) for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")),
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
    config_class="GPT2Config",
    fields=_FIELDS,
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
