"""Experts of DeepSeek-V3 and models like it: a sigmoid router with a bias, and shared experts for all tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.weights.conversions import WHOLE
from megatron_rc.launch.weights.entries import Entry, File, Flags, Only, Row, UnknownFeatureError, Written, always
from megatron_rc.launch.weights.families.llama import router
from megatron_rc.launch.weights.family import Rule, experts_of, gated_mlp

# Experts whose scores rank a group: 2 in transformers, in Megatron the chosen experts divided by the chosen groups.
_SUMMED = 2


def _whole(file: File, name: str, default: int) -> int:
    """A whole number from the file; ``default`` is transformers', for a file that lacks the entry."""
    found = file.get(name, default)
    if not isinstance(found, int) or isinstance(found, bool):
        raise UnknownFeatureError(f"{name} is {found!r}, not a whole number")
    return found


@dataclass(frozen=True)
class DenseFirst(Row):
    """Row for the number of dense layers before the layers with experts."""

    default: int  # number if the file lacks the entry

    def read(self, file: File) -> Flags:
        """See ``Row``."""
        first, layers = self.number(file), file["num_hidden_layers"]
        if not 0 <= first < layers:
            raise UnknownFeatureError(f"first_k_dense_replace is {first!r}, not in [0, {layers - 1}]")
        return {"moe-layer-freq": f"[0]*{first}+[1]*{layers - first}" if first else "1"}

    def number(self, file: File) -> int:
        """Number of dense layers in the file."""
        return _whole(file, "first_k_dense_replace", self.default)

    def write(self, config: RunConfig) -> dict[str, Any]:
        """See ``Row``."""
        return {"first_k_dense_replace": config.layers_with_experts.index(True)}

    def fits(self, config: RunConfig) -> bool:
        """See ``Row``."""
        layers = config.layers_with_experts
        return any(layers) and layers == sorted(layers)


class DenseFirstByLayer(DenseFirst):
    """Row for files that list the kind of each layer; the number is written too, for other programs."""

    def number(self, file: File) -> int:
        """Number of dense layers in the file."""
        kinds, number = file.get("mlp_layer_types"), _whole(file, "first_k_dense_replace", self.default)
        # Without a list transformers uses its own default.
        first = self.default if kinds is None else list(kinds).count("dense")
        layers = file["num_hidden_layers"]
        if kinds is not None and list(kinds) != ["dense"] * first + ["sparse"] * (layers - first):
            raise UnknownFeatureError(
                f"mlp_layer_types is {kinds!r}, not 'dense' and then 'sparse' for {layers} layers"
            )
        if "first_k_dense_replace" in file and number != first:
            raise UnknownFeatureError(f"first_k_dense_replace is {number!r} where mlp_layer_types has {first} of them")
        return first

    def write(self, config: RunConfig) -> dict[str, Any]:
        """See ``Row``."""
        kinds = ["sparse" if has_experts else "dense" for has_experts in config.layers_with_experts]
        return {"mlp_layer_types": kinds, **super().write(config)}


class _Shared(Row):
    """Row for shared experts, which Megatron computes as one expert of their summed width."""

    def read(self, file: File) -> Flags:
        number = _whole(file, "n_shared_experts", 1)
        if number < 1:
            raise UnknownFeatureError(f"n_shared_experts is {number!r}, not a number of experts")
        return {"moe-shared-expert-intermediate-size": str(number * file["moe_intermediate_size"])}

    def write(self, config: RunConfig) -> dict[str, Any]:
        experts = experts_of(config)
        return {"n_shared_experts": (experts.moe_shared_expert_intermediate_size or 0) // experts.moe_ffn_hidden_size}

    def fits(self, config: RunConfig) -> bool:
        experts = config.experts
        shared = experts.moe_shared_expert_intermediate_size if experts else None
        return bool(experts and shared and shared % experts.moe_ffn_hidden_size == 0)


class _Scaling(Entry):
    """Row for the factor on the weights of a token's experts; 1 if the run sets none."""

    def write(self, config: RunConfig) -> dict[str, Any]:
        return {self.name: config.value_of(self.flag) or 1.0}


@dataclass(frozen=True)
class _Groups(Row):
    """Row for group-limited routing; no flag if the experts may come from all groups."""

    groups: int
    chosen: int

    def read(self, file: File) -> Flags:
        groups, chosen = _whole(file, "n_group", self.groups), _whole(file, "topk_group", self.chosen)
        if chosen >= groups:
            return {}
        if file["num_experts_per_tok"] != _SUMMED * chosen:
            raise UnknownFeatureError(
                f"topk_group is {chosen} where num_experts_per_tok is {file['num_experts_per_tok']}, not half of it"
            )
        return {"moe-router-num-groups": str(groups), "moe-router-group-topk": str(chosen)}

    def write(self, config: RunConfig) -> dict[str, Any]:
        experts = experts_of(config)
        return {"n_group": experts.moe_router_num_groups or 1, "topk_group": experts.moe_router_group_topk or 1}

    def fits(self, config: RunConfig) -> bool:
        experts = config.experts
        chosen = experts.moe_router_group_topk if experts else None
        return bool(experts) and (chosen is None or experts_of(config).moe_router_topk == _SUMMED * chosen)


def sigmoid_experts(*, dense_first: Row, scaling: float, groups: int, chosen: int) -> tuple[Row, ...]:
    """Rows of the experts; the numbers are transformers' defaults for a file that lacks an entry."""
    return (
        Only("norm_topk_prob", True),
        Only("scoring_func", "sigmoid"),
        Only("topk_method", "noaux_tc"),
        Entry("intermediate_size", "ffn-hidden-size"),
        Entry("moe_intermediate_size", "moe-ffn-hidden-size"),
        Entry("n_routed_experts", "num-experts", other_name="num_local_experts"),
        Entry("num_experts_per_tok", "moe-router-topk"),
        _Scaling("routed_scaling_factor", "moe-router-topk-scaling-factor", default=scaling),
        dense_first,
        _Shared(),
        _Groups(groups, chosen),
        always("moe-router-score-function", "sigmoid"),
        always("moe-router-enable-expert-bias", True),
        always("moe-router-pre-softmax", False),
        # Layers for multi-token prediction are not trained here.
        Written("num_nextn_predict_layers", 0),
    )


_MLP = "model.layers.{layer}.mlp."
_BIAS = Rule(("mlp.router.expert_bias",), (f"{_MLP}gate.e_score_correction_bias",), WHOLE, is_float32=True)
EXPERT_LAYER = (*router("mlp"), _BIAS, *gated_mlp("mlp.shared_experts.", f"{_MLP}shared_experts."))
