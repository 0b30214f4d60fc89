"""Qwen2-MoE and Qwen3-MoE: a softmax router, and layers with and without experts in any order."""

from __future__ import annotations

from typing import Any

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.layer_patterns import pattern_in_words
from megatron_rc.launch.weights.biases import bias_row
from megatron_rc.launch.weights.conversions import WHOLE
from megatron_rc.launch.weights.entries import File, Flags, Row, UnknownFeatureError, always, entry
from megatron_rc.launch.weights.families.llama import (
    ANY_LENGTH,
    CHOSEN_EXPERTS,
    NO_QK_NORMS,
    NO_SHARED_EXPERTS,
    QK_NORMS,
    SOFTMAX_ROUTER,
    gated_family,
    router,
)
from megatron_rc.launch.weights.family import ExpertNames, Rule, gated_mlp


def _read_layers(file: File) -> Flags:
    """Flag of the layers with experts: every ``decoder_sparse_step``-th layer that is not in ``mlp_only_layers``."""
    step = file.get("decoder_sparse_step")
    step = 1 if step is None else step
    dense_layers = file.get("mlp_only_layers") or []
    has_experts = [
        int((layer + 1) % step == 0 and layer not in dense_layers) for layer in range(file["num_hidden_layers"])
    ]
    if not any(has_experts):
        raise UnknownFeatureError(
            f"no layer has experts, with decoder_sparse_step {step!r} and mlp_only_layers {dense_layers!r}"
        )
    return {"moe-layer-freq": "1" if all(has_experts) else pattern_in_words(has_experts)}


def _write_layers(config: RunConfig) -> dict[str, Any]:
    layers = config.layers_with_experts
    step = layers.index(True) + 1
    if layers == [(layer + 1) % step == 0 for layer in range(len(layers))]:
        return {"decoder_sparse_step": step, "mlp_only_layers": []}
    dense_layers = [layer for layer, has_experts in enumerate(layers) if not has_experts]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense_layers}


_EXPERTS: tuple[Row, ...] = (
    *ANY_LENGTH,
    *SOFTMAX_ROUTER,
    Row(_read_layers, _write_layers),
    entry("intermediate_size", "ffn-hidden-size"),
    entry("moe_intermediate_size", "moe-ffn-hidden-size"),
    entry("num_experts", "num-experts", other_name="num_local_experts"),
    CHOSEN_EXPERTS,
    # norm_topk_prob equals a softmax over the chosen experts alone.
    entry("norm_topk_prob", "moe-router-pre-softmax", default=False, inverted=True),
)
_MLP = "model.layers.{layer}.mlp."
_SHARED_EXPERT = gated_mlp("mlp.shared_experts.", f"{_MLP}shared_expert.")
_SHARED_GATE = Rule(("mlp.shared_experts.gate_weight",), (f"{_MLP}shared_expert_gate.weight",), WHOLE)

QWEN2_MOE = gated_family(
    "qwen2_moe",
    "Qwen2MoeConfig",
    (
        *_EXPERTS,
        entry("shared_expert_intermediate_size", "moe-shared-expert-intermediate-size"),
        # The output of the shared expert is multiplied by a sigmoid of the token.
        always("moe-shared-expert-gate", True),
    ),
    default_groups=16,
    attention=(bias_row(qkv="qkv_bias", default=True, unused=("mlp_bias",)), *NO_QK_NORMS),
    expert_layer=(*router("mlp"), *_SHARED_EXPERT, _SHARED_GATE),
    expert_names=ExpertNames(),
)
QWEN3_MOE = gated_family(
    "qwen3_moe",
    "Qwen3MoeConfig",
    (*_EXPERTS, *NO_SHARED_EXPERTS),
    default_groups=4,
    attention=QK_NORMS,
    expert_layer=router("mlp"),
    expert_names=ExpertNames(),
)
