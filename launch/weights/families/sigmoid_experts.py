"""Experts of DeepSeek-V3 and models like it: a sigmoid router with a bias, and shared experts for all tokens."""

from __future__ import annotations

from typing import Any

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.weights.conversions import WHOLE
from megatron_rc.launch.weights.entries import (
    File,
    Flags,
    Row,
    UnknownFeatureError,
    always,
    entry,
    lacks,
    only,
    stated,
    typed,
    written,
)
from megatron_rc.launch.weights.families.llama import router
from megatron_rc.launch.weights.family import Rule, experts_of, gated_mlp

# Experts whose scores rank a group: 2 in transformers, in Megatron the chosen experts divided by the chosen groups.
_SUMMED = 2


def _layer_freq(first: int, file: File) -> Flags:
    """Flag of a model whose first layers are dense, and all others have experts."""
    layers = file["num_hidden_layers"]
    if not 0 <= first < layers:
        raise UnknownFeatureError(f"first_k_dense_replace is {first!r}, not in [0, {layers - 1}]")
    return {"moe-layer-freq": f"[0]*{first}+[1]*{layers - first}" if first else "1"}


def _dense_come_first(config: RunConfig) -> bool:
    layers = config.layers_with_experts
    return any(layers) and layers == sorted(layers)


def dense_first(default: int) -> Row:
    """Row of the number of dense layers before the layers with experts; ``default`` if a file lacks it."""
    return Row(
        lambda file: _layer_freq(file.get("first_k_dense_replace", default), file),
        lambda config: {"first_k_dense_replace": config.layers_with_experts.index(True)},
        _dense_come_first,
    )


def dense_first_by_layer(default: int) -> Row:
    """Row for files that list the kind of each layer; the number is written too, for other programs."""

    def read(file: File) -> Flags:
        kinds = file.get("mlp_layer_types")
        # Without a list transformers uses its own default.
        first = default if kinds is None else list(kinds).count("dense")
        layers = file["num_hidden_layers"]
        if kinds is not None and list(kinds) != ["dense"] * first + ["sparse"] * (layers - first):
            raise UnknownFeatureError(
                f"mlp_layer_types is {kinds!r}, not 'dense' and then 'sparse' for {layers} layers"
            )
        return _layer_freq(first, file)

    def write(config: RunConfig) -> dict[str, Any]:
        kinds = ["sparse" if has_experts else "dense" for has_experts in config.layers_with_experts]
        return {"mlp_layer_types": kinds, "first_k_dense_replace": kinds.count("dense")}

    return Row(read, write, _dense_come_first)


def _read_shared(file: File) -> Flags:
    number = file.get("n_shared_experts", 1)
    if not number:
        raise UnknownFeatureError(f"n_shared_experts is {number!r}, not a number of experts")
    flag = "moe-shared-expert-intermediate-size"
    return {flag: typed("n_shared_experts", flag, number * file["moe_intermediate_size"])}


def _write_shared(config: RunConfig) -> dict[str, Any]:
    experts = experts_of(config)
    return {"n_shared_experts": (experts.moe_shared_expert_intermediate_size or 0) // experts.moe_ffn_hidden_size}


def _fits_shared(config: RunConfig) -> bool:
    experts = config.experts
    shared = experts.moe_shared_expert_intermediate_size if experts else None
    return bool(experts and shared and shared % experts.moe_ffn_hidden_size == 0)


def _groups(default_groups: int, default_chosen: int) -> Row:
    """Row of group-limited routing; no flag if the experts may come from all groups."""

    def read(file: File) -> Flags:
        groups = file.get("n_group", default_groups)
        chosen = file.get("topk_group", default_chosen)
        if chosen >= groups:
            return {}
        if file["num_experts_per_tok"] != _SUMMED * chosen:
            raise UnknownFeatureError(
                f"topk_group is {chosen}, not half of num_experts_per_tok {file['num_experts_per_tok']}"
            )
        return {
            "moe-router-num-groups": typed("n_group", "moe-router-num-groups", groups),
            "moe-router-group-topk": typed("topk_group", "moe-router-group-topk", chosen),
        }

    def write(config: RunConfig) -> dict[str, Any]:
        experts = experts_of(config)
        return {"n_group": experts.moe_router_num_groups or 1, "topk_group": experts.moe_router_group_topk or 1}

    def fits(config: RunConfig) -> bool:
        experts = config.experts
        chosen = experts.moe_router_group_topk if experts else None
        return experts is not None and (chosen is None or experts.moe_router_topk == _SUMMED * chosen)

    return Row(read, write, fits)


def sigmoid_experts(*, dense_layers: Row, scaling: float, groups: int, chosen: int) -> tuple[Row, ...]:
    """Rows of the experts; the numbers are transformers' defaults for a file that lacks an entry."""
    factor = "routed_scaling_factor"
    factor_flag = "moe-router-topk-scaling-factor"
    return (
        only("norm_topk_prob", True),
        # Without these vLLM takes a softmax router without a bias; SGLang asks for topk_method.
        stated("scoring_func", "sigmoid"),
        stated("topk_method", "noaux_tc"),
        entry("intermediate_size", "ffn-hidden-size"),
        entry("moe_intermediate_size", "moe-ffn-hidden-size"),
        entry("n_routed_experts", "num-experts", other_name="num_local_experts"),
        entry("num_experts_per_tok", "moe-router-topk"),
        Row(
            entry(factor, factor_flag, default=scaling).read,
            lambda config: {factor: config.value_of(factor_flag) or 1.0},  # 1 if the run sets none
        ),
        dense_layers,
        # Megatron computes the shared experts as one expert of their summed width.
        Row(_read_shared, _write_shared, _fits_shared),
        _groups(groups, chosen),
        lacks("moe-shared-expert-gate"),
        always("moe-router-score-function", "sigmoid"),
        always("moe-router-enable-expert-bias", True),
        always("moe-router-pre-softmax", False),
        # Layers for multi-token prediction are not trained here.
        written("num_nextn_predict_layers", 0),
    )


_MLP = "model.layers.{layer}.mlp."
_BIAS = Rule(("mlp.router.expert_bias",), (f"{_MLP}gate.e_score_correction_bias",), WHOLE, is_float32=True)
EXPERT_LAYER = (*router("mlp"), _BIAS, *gated_mlp("mlp.shared_experts.", f"{_MLP}shared_experts."))
