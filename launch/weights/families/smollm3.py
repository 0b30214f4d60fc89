"""SmolLM3: Llama's layers, some of them without rotary positions."""

from __future__ import annotations

from typing import Any

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.layer_patterns import number_or_pattern, pattern_in_words
from megatron_rc.launch.weights.biases import bias_row
from megatron_rc.launch.weights.entries import File, Flags, Row, UnknownFeatureError, entry
from megatron_rc.launch.weights.families.llama import (
    ANY_LENGTH,
    DENSE,
    HALVES_ROTATED,
    NO_QK_NORMS,
    USUAL_NORMS,
    gated_family,
)
from megatron_rc.launch.weights.rotary import rotary_row


def _read_layers(file: File) -> Flags:
    """Flag of the layers without rotary positions; in the file a 1 means a layer with them."""
    layers = file["num_hidden_layers"]
    rotated = file.get("no_rope_layers")
    if rotated is None:
        interval = file.get("no_rope_layer_interval", 4)
        rotated = [int((layer + 1) % interval != 0) for layer in range(layers)]
    if len(rotated) < layers:
        raise UnknownFeatureError(f"no_rope_layers has {len(rotated)} entries, not one for each of {layers} layers")
    without_rope = [int(not is_rotated) for is_rotated in rotated[:layers]]
    return {"no-rope-freq": pattern_in_words(without_rope)} if any(without_rope) else {}


def _write_layers(config: RunConfig) -> dict[str, Any]:
    layers = config.transformer.num_layers
    given_pattern = config.transformer.no_rope_freq
    pattern = [0] * layers if given_pattern is None else number_or_pattern(given_pattern)
    if isinstance(pattern, int):
        pattern = [int((layer + 1) % pattern == 0) for layer in range(layers)]
    return {"no_rope_layers": [1 - is_without for is_without in pattern]}


SMOLLM3 = gated_family(
    "smollm3",
    "SmolLM3Config",
    (
        *DENSE,
        *ANY_LENGTH,
        entry("tie_word_embeddings", "untie-embeddings-and-output-weights", default=True, inverted=True),
        Row(_read_layers, _write_layers),
    ),
    rotary=rotary_row(2000000.0),
    attention=(bias_row(qkv="attention_bias", output="attention_bias", mlp="mlp_bias"), *NO_QK_NORMS),
    layout=(*USUAL_NORMS, *HALVES_ROTATED),
    default_groups=4,
)
