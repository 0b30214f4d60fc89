"""Model families: how the parameters of a GPTModel are called and cut in Hugging Face's architectures.

A rule takes the TP shards of one Megatron parameter and gives the Hugging Face tensors that it holds. Names are
relative to a layer; ``{layer}`` in a Hugging Face name is the global layer number from 0.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

Shards = Sequence[Tensor]
Convert = Callable[[Shards, argparse.Namespace], list[Tensor]]


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter.

    Attributes:
        megatron: its names: that of the local modules first, then Transformer Engine's where they differ.
        hugging_face: the tensors that it holds.
        convert: from the TP shards, in rank order, to these tensors.
    """

    megatron: tuple[str, ...]
    hugging_face: tuple[str, ...]
    convert: Convert


@dataclass(frozen=True)
class Family:
    """The rules of one architecture, by where the parameters lie: first stage, every layer, last stage."""

    name: str
    matches: Callable[[argparse.Namespace], bool]
    hugging_face_config: Callable[[argparse.Namespace], Any]
    embedding: tuple[Rule, ...]
    layer: tuple[Rule, ...]
    head: tuple[Rule, ...]
    untied_head: tuple[Rule, ...]


def find_family(args: argparse.Namespace) -> Family | None:
    """The family whose architecture the flags describe, or None."""
    return next((family for family in FAMILIES if family.matches(args)), None)


def _whole(shards: Shards, args: argparse.Namespace) -> list[Tensor]:
    return [shards[0]]


def _rows(shards: Shards, args: argparse.Namespace) -> list[Tensor]:
    return [torch.cat(list(shards), dim=0)]


def _columns(shards: Shards, args: argparse.Namespace) -> list[Tensor]:
    return [torch.cat(list(shards), dim=1)]


def _vocabulary(shards: Shards, args: argparse.Namespace) -> list[Tensor]:
    return [torch.cat(list(shards), dim=0)[: args.vocab_size]]


def _gate_and_up(shards: Shards, args: argparse.Namespace) -> list[Tensor]:
    halves = [shard.chunk(2, dim=0) for shard in shards]
    return [torch.cat([half[index] for half in halves], dim=0) for index in range(2)]


def _query_key_value(shards: Shards, args: argparse.Namespace) -> list[Tensor]:
    """Megatron interleaves by group: the query heads of a group, its key head, its value head."""
    heads = args.num_attention_heads // args.num_query_groups
    grouped = torch.cat(list(shards), dim=0).unflatten(0, (args.num_query_groups, heads + 2, args.kv_channels))
    return [part.flatten(0, 2) for part in (grouped[:, :heads], grouped[:, heads : heads + 1], grouped[:, heads + 1 :])]


def _joined(shards: Shards, args: argparse.Namespace) -> list[Tensor]:
    return [torch.cat(_query_key_value(shards, args), dim=0)]


def _transposed(convert: Convert, shards: Shards, args: argparse.Namespace) -> list[Tensor]:
    """GPT-2's Conv1D holds [in, out]."""
    return [tensor.t() for tensor in convert(shards, args)]


def _llama_config(args: argparse.Namespace) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=args.ffn_hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_attention_heads,
        num_key_value_heads=args.num_query_groups,
        head_dim=args.kv_channels,
        max_position_embeddings=args.max_position_embeddings,
        rms_norm_eps=args.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": float(args.rotary_base)},
        tie_word_embeddings=not args.untie_embeddings_and_output_weights,
        attention_bias=False,
        mlp_bias=False,
    )


def _gpt2_config(args: argparse.Namespace) -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=args.vocab_size,
        n_embd=args.hidden_size,
        n_inner=args.ffn_hidden_size,
        n_layer=args.num_layers,
        n_head=args.num_attention_heads,
        n_positions=args.max_position_embeddings,
        layer_norm_epsilon=args.norm_epsilon,
        activation_function="gelu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=not args.untie_embeddings_and_output_weights,
    )


_LLAMA = Family(
    name="llama",
    matches=lambda args: (
        args.normalization == "RMSNorm"
        and args.swiglu
        and args.position_embedding_type == "rope"
        and args.disable_bias_linear
    ),
    hugging_face_config=_llama_config,
    embedding=(Rule(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), _vocabulary),),
    layer=(
        Rule(
            ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
            ("model.layers.{layer}.input_layernorm.weight",),
            _whole,
        ),
        Rule(
            ("self_attention.linear_qkv.weight",),
            tuple(f"model.layers.{{layer}}.self_attn.{part}_proj.weight" for part in "qkv"),
            _query_key_value,
        ),
        Rule(("self_attention.linear_proj.weight",), ("model.layers.{layer}.self_attn.o_proj.weight",), _columns),
        Rule(
            ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
            ("model.layers.{layer}.post_attention_layernorm.weight",),
            _whole,
        ),
        Rule(
            ("mlp.linear_fc1.weight",),
            ("model.layers.{layer}.mlp.gate_proj.weight", "model.layers.{layer}.mlp.up_proj.weight"),
            _gate_and_up,
        ),
        Rule(("mlp.linear_fc2.weight",), ("model.layers.{layer}.mlp.down_proj.weight",), _columns),
    ),
    head=(Rule(("decoder.final_layernorm.weight",), ("model.norm.weight",), _whole),),
    untied_head=(Rule(("output_layer.weight",), ("lm_head.weight",), _vocabulary),),
)


def _gpt2_norm(local: str, engine: str, name: str) -> tuple[Rule, ...]:
    return tuple(
        Rule((f"{local}.{kind}", f"{engine}_{kind}"), (f"transformer.h.{{layer}}.{name}.{kind}",), _whole)
        for kind in ("weight", "bias")
    )


def _gpt2_linear(megatron: str, name: str, weight: Convert, bias: Convert) -> tuple[Rule, ...]:
    return (
        Rule((f"{megatron}.weight",), (f"transformer.h.{{layer}}.{name}.weight",), partial(_transposed, weight)),
        Rule((f"{megatron}.bias",), (f"transformer.h.{{layer}}.{name}.bias",), bias),
    )


_GPT2 = Family(
    name="gpt2",
    matches=lambda args: (
        args.normalization == "LayerNorm"
        and not args.swiglu
        and args.position_embedding_type == "learned_absolute"
        and not args.disable_bias_linear
        and args.num_query_groups == args.num_attention_heads
        and args.kv_channels * args.num_attention_heads == args.hidden_size
    ),
    hugging_face_config=_gpt2_config,
    embedding=(
        Rule(("embedding.word_embeddings.weight",), ("transformer.wte.weight",), _vocabulary),
        Rule(("embedding.position_embeddings.weight",), ("transformer.wpe.weight",), _whole),
    ),
    layer=(
        *_gpt2_norm("input_layernorm", "self_attention.linear_qkv.layer_norm", "ln_1"),
        *_gpt2_linear("self_attention.linear_qkv", "attn.c_attn", _joined, _joined),
        *_gpt2_linear("self_attention.linear_proj", "attn.c_proj", _columns, _whole),
        *_gpt2_norm("pre_mlp_layernorm", "mlp.linear_fc1.layer_norm", "ln_2"),
        *_gpt2_linear("mlp.linear_fc1", "mlp.c_fc", _rows, _rows),
        *_gpt2_linear("mlp.linear_fc2", "mlp.c_proj", _columns, _whole),
    ),
    head=tuple(
        Rule((f"decoder.final_layernorm.{kind}",), (f"transformer.ln_f.{kind}",), _whole) for kind in ("weight", "bias")
    ),
    untied_head=(Rule(("output_layer.weight",), ("lm_head.weight",), _vocabulary),),
)

FAMILIES = (_LLAMA, _GPT2)
