"""OLMo-2 and OLMo-3: norms behind attention and MLP, and norms of queries and keys over all heads together."""

from __future__ import annotations

from typing import Any

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.weights.biases import BIASES_OF_ATTENTION, bias_row
from megatron_rc.launch.weights.conversions import ROWS, WHOLE
from megatron_rc.launch.weights.entries import File, Flags, Row, UnknownFeatureError, always, entry
from megatron_rc.launch.weights.families.llama import (
    ALL_ROTATED,
    ANY_LENGTH,
    ATTENTION,
    DENSE,
    HALVES_ROTATED,
    PLAIN_ATTENTION,
    gated_family,
)
from megatron_rc.launch.weights.family import Family, Rule
from megatron_rc.launch.weights.rotary import rotary_row

_LAYER = "model.layers.{layer}."
_FULL = "full_attention"
_SLIDING = "sliding_attention"
_OLMO3S_THETA = 500000.0
_PLAIN = rotary_row(_OLMO3S_THETA, kinds=())
_RULES = (
    *ATTENTION,
    *BIASES_OF_ATTENTION,
    *(
        Rule((f"self_attention.{part}_layernorm.weight",), (f"{_LAYER}self_attn.{part}_norm.weight",), ROWS)
        for part in "qk"
    ),
    Rule(("self_attention.linear_proj.post_layernorm.weight",), (f"{_LAYER}post_attention_layernorm.weight",), WHOLE),
    Rule(("mlp.linear_fc2.post_layernorm.weight",), (f"{_LAYER}post_feedforward_layernorm.weight",), WHOLE),
)


def _usual_kinds(layers: int) -> list[str]:
    """OLMo-3's kinds of layers: every fourth has full attention."""
    return [_SLIDING if (layer + 1) % 4 else _FULL for layer in range(layers)]


def _read_kinds(file: File) -> Flags:
    kinds = file.get("layer_types")
    if kinds is not None and list(kinds) != _usual_kinds(file["num_hidden_layers"]):
        raise UnknownFeatureError(f"layer_types is {kinds!r}, not full attention in every fourth layer")
    return {}


def _read_rotary(file: File) -> Flags:
    """Flags of the rotary parameters, which must be the same for both kinds of layers: GPTModel has one set."""
    if file.get("rope_scaling"):
        raise UnknownFeatureError("rope_scaling changes the rotary embeddings of the layers with full attention alone")
    nested = file.get("rope_parameters") or {}
    usual = {"rope_type": "default", "rope_theta": _OLMO3S_THETA}
    full = dict(usual)
    if file.get("rope_theta") is not None:
        full["rope_theta"] = file["rope_theta"]  # transformers 5 does not take it for the sliding layers
    full |= nested.get(_FULL) or {}
    sliding = usual | (nested.get(_SLIDING) or {})
    if full != sliding:
        raise UnknownFeatureError(f"rotary embeddings of {_FULL} are {full!r}, those of {_SLIDING} {sliding!r}")
    return _PLAIN.read({"rope_parameters": full})


def _write_rotary(config: RunConfig) -> dict[str, Any]:
    parameters = _PLAIN.write(config)["rope_parameters"]
    return {"rope_parameters": {_FULL: parameters, _SLIDING: dict(parameters)}}


def _olmo(name: str, config_class: str, fields: tuple[Row, ...], **others: Any) -> Family:
    return gated_family(
        name,
        config_class,
        (*DENSE, *fields),
        attention=(bias_row(qkv="attention_bias", output="attention_bias"), always("qk-layernorm", True)),
        layout=(
            always("layer-norms", "after"),
            always("qk-norm-over", "all_heads"),
            *ALL_ROTATED,
            *HALVES_ROTATED,
        ),
        rules=_RULES,
        **others,
    )


OLMO2 = _olmo("olmo2", "Olmo2Config", ANY_LENGTH)
OLMO3 = _olmo(
    "olmo3",
    "Olmo3Config",
    (
        entry("sliding_window", "sliding-window", default=4096),
        Row(write=lambda config: {"layer_types": _usual_kinds(config.transformer.num_layers)}),
    ),
    kinds=(Row(_read_kinds), *PLAIN_ATTENTION),
    rotary=Row(_read_rotary, _write_rotary, _PLAIN.fits),
)
