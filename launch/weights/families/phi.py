"""Phi-3 and Phi-4: Llama's layers, whose files stack queries, keys and values, and gate and up projections."""

from __future__ import annotations

from megatron_rc.launch.weights.conversions import COLUMNS, STACKED_GATE_AND_UP, STACKED_QUERY_KEY_VALUE
from megatron_rc.launch.weights.entries import entry, written
from megatron_rc.launch.weights.families.llama import DENSE, NORM_RULES, OUTPUT_PROJECTION, gated_family
from megatron_rc.launch.weights.family import Rule
from megatron_rc.launch.weights.rotary import rotary_row

_LAYER = "model.layers.{layer}."
STACKED_MLP = (
    Rule(("mlp.linear_fc1.weight",), (f"{_LAYER}mlp.gate_up_proj.weight",), STACKED_GATE_AND_UP),
    Rule(("mlp.linear_fc2.weight",), (f"{_LAYER}mlp.down_proj.weight",), COLUMNS),
)

PHI3 = gated_family(
    "phi3",
    "Phi3Config",
    (
        *DENSE,
        entry("sliding_window", "sliding-window", default=None),
        *(written(name, 0.0) for name in ("resid_pdrop", "embd_pdrop", "attention_dropout")),
    ),
    # Other scalings of transformers' class are LongRoPE under earlier names.
    rotary=rotary_row(default_part=1.0, kinds=()),
    rules=(
        *NORM_RULES,
        Rule(("self_attention.linear_qkv.weight",), (f"{_LAYER}self_attn.qkv_proj.weight",), STACKED_QUERY_KEY_VALUE),
        OUTPUT_PROJECTION,
    ),
    mlp_rules=STACKED_MLP,
)
