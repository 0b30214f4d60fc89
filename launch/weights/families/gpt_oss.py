"""gpt-oss: attention with sinks, in some layers over a window, and stacked experts with biases."""

from __future__ import annotations

from typing import Any

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.layer_patterns import number_or_pattern, pattern_in_words
from megatron_rc.launch.weights.biases import BIASES_OF_ATTENTION, bias_row
from megatron_rc.launch.weights.conversions import COLUMNS, INTERLEAVED_GATE_AND_UP, ROWS, WHOLE, transposed
from megatron_rc.launch.weights.entries import File, Flags, Row, UnknownFeatureError, always, entry, lacks, only
from megatron_rc.launch.weights.families.llama import (
    ANY_LENGTH,
    ATTENTION,
    CHOSEN_EXPERTS,
    NO_QK_NORMS,
    NO_SHARED_EXPERTS,
    NORM_RULES,
    SOFTMAX_ROUTER,
    gated_family,
)
from megatron_rc.launch.weights.family import Rule
from megatron_rc.launch.weights.rotary import rotary_row

_FULL = "full_attention"
_SLIDING = "sliding_attention"
_WINDOW = 128
# Rotary parameters of transformers' class if a file has none.
_USUAL_ROTARY = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_ROTARY = rotary_row(150000.0)


def _read_rotary(file: File) -> Flags:
    has_parameters = bool(file.get("rope_scaling") or file.get("rope_parameters"))
    return _ROTARY.read(file if has_parameters else {**file, "rope_parameters": _USUAL_ROTARY})


def _read_windows(file: File) -> Flags:
    """Flags of the layers with a window; in files without a list every second layer, from the first on, has one."""
    kinds = file.get("layer_types")
    layers = file["num_hidden_layers"]
    if kinds is None:
        kinds = [_SLIDING if (layer + 1) % 2 else _FULL for layer in range(layers)]
    if len(kinds) != layers or not {_FULL, _SLIDING}.issuperset(kinds):
        raise UnknownFeatureError(f"layer_types is {kinds!r}, not {_FULL!r} or {_SLIDING!r} for {layers} layers")
    if _SLIDING not in kinds:
        return {}
    window = file.get("sliding_window", _WINDOW)
    if type(window) is not int or window < 1:  # True is an instance of int
        raise UnknownFeatureError(f"sliding_window is {window!r}, not a number of tokens")
    # Megatron does not count the query's own token.
    flags = {"window-size": f"{window - 1},0"}
    has_window = [int(kind == _SLIDING) for kind in kinds]
    if has_window == [(layer + 1) % 2 for layer in range(layers)]:
        flags["window-attn-skip-freq"] = "2"
    elif not all(has_window):
        flags["window-attn-skip-freq"] = pattern_in_words(has_window)
    return flags


def _write_windows(config: RunConfig) -> dict[str, Any]:
    size = config.transformer.window_size
    kinds = [_SLIDING if has_window else _FULL for has_window in _layers_with_window(config)]
    return {"layer_types": kinds, "sliding_window": _WINDOW if size is None else int(size.partition(",")[0]) + 1}


def _layers_with_window(config: RunConfig) -> list[bool]:
    """For each layer, whether its attention has a window."""
    layers = config.transformer.num_layers
    pattern = config.transformer.window_attn_skip_freq
    if config.transformer.window_size is None:
        return [False] * layers
    if pattern is None:
        return [True] * layers
    kinds = number_or_pattern(pattern)
    if isinstance(kinds, int):
        return [(layer + 1) % kinds != 0 for layer in range(layers)]
    return [bool(kind) for kind in kinds]


def _read_quantization(file: File) -> Flags:
    """Check that weights are not quantized, or in the published format, which is read as bfloat16."""
    quantization = file.get("quantization_config")
    if quantization is not None and quantization.get("quant_method") != "mxfp4":
        raise UnknownFeatureError(f"quantization_config is {quantization!r}, neither mxfp4 nor null")
    return {}


_EXPERTS = "model.layers.{layer}.mlp.experts."
_EXPERT = (
    Rule(
        ("local_experts.{local}.linear_fc1.weight", "linear_fc1.weight{local}"),
        (f"{_EXPERTS}gate_up_proj[{{expert}}]",),
        transposed(INTERLEAVED_GATE_AND_UP),
    ),
    Rule(
        ("local_experts.{local}.linear_fc1.bias", "linear_fc1.bias{local}"),
        (f"{_EXPERTS}gate_up_proj_bias[{{expert}}]",),
        INTERLEAVED_GATE_AND_UP,
    ),
    Rule(
        ("local_experts.{local}.linear_fc2.weight", "linear_fc2.weight{local}"),
        (f"{_EXPERTS}down_proj[{{expert}}]",),
        transposed(COLUMNS),
    ),
    Rule(
        ("local_experts.{local}.linear_fc2.bias", "linear_fc2.bias{local}"),
        (f"{_EXPERTS}down_proj_bias[{{expert}}]",),
        WHOLE,
    ),
)
_ROUTER = "model.layers.{layer}.mlp.router."
_SINKS = Rule(("self_attention.core_attention.softmax_offset",), ("model.layers.{layer}.self_attn.sinks",), ROWS)

GPT_OSS = gated_family(
    "gpt_oss",
    "GptOssConfig",
    (
        *ANY_LENGTH,
        *SOFTMAX_ROUTER,
        *NO_SHARED_EXPERTS,
        lacks("moe-layer-freq"),
        always("moe-router-pre-softmax", False),
        entry("intermediate_size", "moe-ffn-hidden-size", other_flag="ffn-hidden-size"),
        entry("num_local_experts", "num-experts", other_name="num_experts"),
        CHOSEN_EXPERTS,
    ),
    rotary=Row(_read_rotary, _ROTARY.write, _ROTARY.fits),
    attention=(bias_row(qkv=True, output=True, mlp=True), only("attention_bias", True), *NO_QK_NORMS),
    kinds=(Row(_read_windows, _write_windows), always("softmax-type", "learnable")),
    activation=(
        always("quick-geglu", True),
        always("glu-linear-offset", 1.0),
        always("activation-func-clamp-value", 7.0),
        only("swiglu_alpha", 1.702),
        only("swiglu_limit", 7.0),
    ),
    default_groups=8,
    default_head_dim=64,
    rules=(*NORM_RULES, *ATTENTION, *BIASES_OF_ATTENTION, _SINKS),
    expert_layer=(
        Rule(("mlp.router.weight",), (f"{_ROUTER}weight",), WHOLE),
        Rule(("mlp.router.bias",), (f"{_ROUTER}bias",), WHOLE),
    ),
    stacked_expert=_EXPERT,
    quantization=Row(_read_quantization),
)
