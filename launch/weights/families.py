"""Model families: how the parameters of a GPTModel are called and cut in Hugging Face's architectures.

A family is a table of rules, one a Megatron parameter. Names are relative to a layer, or to an expert; ``{layer}`` and
``{expert}`` in a Hugging Face name are the global numbers from 0. These names are those of files, which engines read;
the modules of transformers may hold several of them in one parameter (``checkpoint_tensors``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.megatron import ExpertSection
from megatron_rc.launch.weights.conversions import (
    COLUMNS,
    GATE_AND_UP,
    QUERY_KEY_VALUE,
    ROWS,
    STACKED_QUERY_KEY_VALUE,
    VOCABULARY,
    WHOLE,
    Conversion,
    transposed,
)


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter.

    Attributes:
        megatron: its names: that of the local modules first, then Transformer Engine's where they differ.
        hugging_face: the tensors that it holds.
        conversion: between the two.
    """

    megatron: tuple[str, ...]
    hugging_face: tuple[str, ...]
    conversion: Conversion


@dataclass(frozen=True)
class Family:
    """The rules of one architecture, by where the parameters lie: first stage, every layer, expert, last stage."""

    name: str
    matches: Callable[[RunConfig], bool]
    hugging_face_config: Callable[[RunConfig], Any]
    embedding: tuple[Rule, ...]
    layer: tuple[Rule, ...]
    head: tuple[Rule, ...]
    untied_head: tuple[Rule, ...]
    expert: tuple[Rule, ...] = ()


def experts_of(config: RunConfig) -> ExpertSection:
    """The experts of a model that has some."""
    if config.experts is None:
        raise RuntimeError("a dense model has no experts")
    return config.experts


def find_family(config: RunConfig) -> Family | None:
    """The family whose architecture the flags describe, or None."""
    return next((family for family in FAMILIES if family.matches(config)), None)


Fields = Callable[[RunConfig], dict[str, Any]]


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


def _gpt2_config(config: RunConfig) -> Any:
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


def _is_gated(config: RunConfig) -> bool:
    layers = config.transformer
    return (
        layers.normalization == "RMSNorm"
        and layers.gated_linear_unit
        and config.model.position_embedding_type == "rope"
        and not layers.add_bias_linear
    )


def _is_gpt2(config: RunConfig) -> bool:
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
    fields: Fields = _dense_fields,
    qkv_bias: bool = False,
    qk_norms: bool = False,
    mlp: tuple[Rule, ...] = _GATED_MLP,
    expert: tuple[Rule, ...] = (),
    pre_softmax: bool = False,
) -> Family:
    """``pre_softmax``: its router may also leave the weights of the chosen experts as they are among all experts'."""
    return Family(
        name=name,
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
        head=(Rule(("decoder.final_layernorm.weight",), ("model.norm.weight",), WHOLE),),
        untied_head=(Rule(("output_layer.weight",), ("lm_head.weight",), VOCABULARY),),
    )


def _router(hugging_face: str) -> tuple[Rule, ...]:
    return (Rule(("mlp.router.weight",), (f"model.layers.{{layer}}.{hugging_face}.gate.weight",), WHOLE),)


_LLAMA = _gated_family("llama", "LlamaConfig")
_QWEN2 = _gated_family("qwen2", "Qwen2Config", qkv_bias=True)
_QWEN3 = _gated_family("qwen3", "Qwen3Config", qk_norms=True)
_QWEN3_MOE = _gated_family(
    "qwen3_moe",
    "Qwen3MoeConfig",
    _qwen3_moe_fields,
    qk_norms=True,
    mlp=_router("mlp"),
    expert=_gated_mlp("", "model.layers.{layer}.mlp.experts.{expert}.", *_QWEN_NAMES),
    pre_softmax=True,
)
_MIXTRAL = _gated_family(
    "mixtral",
    "MixtralConfig",
    _mixtral_fields,
    mlp=_router("block_sparse_moe"),
    expert=_gated_mlp(
        "", "model.layers.{layer}.block_sparse_moe.experts.{expert}.", "w1.weight", "w3.weight", "w2.weight"
    ),
)


def _gpt2_norm(local: str, engine: str, name: str) -> tuple[Rule, ...]:
    return tuple(
        Rule((f"{local}.{kind}", f"{engine}_{kind}"), (f"transformer.h.{{layer}}.{name}.{kind}",), WHOLE)
        for kind in ("weight", "bias")
    )


def _gpt2_linear(megatron: str, name: str, weight: Conversion, bias: Conversion) -> tuple[Rule, ...]:
    return (
        Rule((f"{megatron}.weight",), (f"transformer.h.{{layer}}.{name}.weight",), transposed(weight)),
        Rule((f"{megatron}.bias",), (f"transformer.h.{{layer}}.{name}.bias",), bias),
    )


_GPT2 = Family(
    name="gpt2",
    matches=_is_gpt2,
    hugging_face_config=_gpt2_config,
    embedding=(
        Rule(("embedding.word_embeddings.weight",), ("transformer.wte.weight",), VOCABULARY),
        Rule(("embedding.position_embeddings.weight",), ("transformer.wpe.weight",), WHOLE),
    ),
    layer=(
        *_gpt2_norm("input_layernorm", "self_attention.linear_qkv.layer_norm", "ln_1"),
        *_gpt2_linear("self_attention.linear_qkv", "attn.c_attn", STACKED_QUERY_KEY_VALUE, STACKED_QUERY_KEY_VALUE),
        *_gpt2_linear("self_attention.linear_proj", "attn.c_proj", COLUMNS, WHOLE),
        *_gpt2_norm("pre_mlp_layernorm", "mlp.linear_fc1.layer_norm", "ln_2"),
        *_gpt2_linear("mlp.linear_fc1", "mlp.c_fc", ROWS, ROWS),
        *_gpt2_linear("mlp.linear_fc2", "mlp.c_proj", COLUMNS, WHOLE),
    ),
    head=tuple(
        Rule((f"decoder.final_layernorm.{kind}",), (f"transformer.ln_f.{kind}",), WHOLE) for kind in ("weight", "bias")
    ),
    untied_head=(Rule(("output_layer.weight",), ("lm_head.weight",), VOCABULARY),),
)

FAMILIES = (_LLAMA, _QWEN2, _QWEN3, _QWEN3_MOE, _MIXTRAL, _GPT2)
