"""Experts as DeepSeek-V3 has them, also in other models: sigmoids with a bias choose, some experts see all tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.weights.conversions import WHOLE
from megatron_rc.launch.weights.entries import Always, Entry, File, Flags, Only, Row, UnknownFeatureError, Written
from megatron_rc.launch.weights.families.llama import GATED_NAMES, gated_mlp, router
from megatron_rc.launch.weights.family import ExpertNames, Rule, experts_of

# transformers sums the best two experts of a group, Megatron as many as each chosen group has to give.
_SUMMED = 2


def _whole(file: File, name: str, default: int) -> int:
    """An entry that counts something; the default is that of transformers, for a file that lacks the entry."""
    found = file.get(name, default)
    if not isinstance(found, int) or isinstance(found, bool):
        raise UnknownFeatureError(f"{name} is {found!r}, not a whole number")
    return found


@dataclass(frozen=True)
class DenseFirst(Row):
    """The number of layers at the start that have an MLP.

    Attributes:
        default: of a file that lacks the entry.
    """

    default: int

    def read(self, file: File) -> Flags:
        """See ``Row``."""
        first, layers = self.number(file), file["num_hidden_layers"]
        if not 0 <= first < layers:
            raise UnknownFeatureError(f"first_k_dense_replace is {first!r}, not in [0, {layers - 1}]")
        return {"moe-layer-freq": f"[0]*{first}+[1]*{layers - first}" if first else "1"}

    def number(self, file: File) -> int:
        """As the file has it."""
        return _whole(file, "first_k_dense_replace", self.default)

    def write(self, config: RunConfig) -> dict[str, Any]:
        """See ``Row``."""
        return {"first_k_dense_replace": config.layers_with_experts.index(True)}

    def fits(self, config: RunConfig) -> bool:
        """See ``Row``."""
        layers = config.layers_with_experts
        return any(layers) and layers == sorted(layers)


class DenseFirstByLayer(DenseFirst):
    """The same said layer by layer, beside the number, which other programs read."""

    def number(self, file: File) -> int:
        """As the file has it."""
        kinds, number = file.get("mlp_layer_types"), _whole(file, "first_k_dense_replace", self.default)
        # transformers takes its own default where there is no list.
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
    """Experts that every token passes; side by side they are one of their summed width."""

    def read(self, file: File) -> Flags:
        """See ``Row``."""
        number = _whole(file, "n_shared_experts", 1)
        if number < 1:
            raise UnknownFeatureError(f"n_shared_experts is {number!r}, not a number of experts")
        return {"moe-shared-expert-intermediate-size": str(number * file["moe_intermediate_size"])}

    def write(self, config: RunConfig) -> dict[str, Any]:
        """See ``Row``."""
        experts = experts_of(config)
        return {"n_shared_experts": (experts.moe_shared_expert_intermediate_size or 0) // experts.moe_ffn_hidden_size}

    def fits(self, config: RunConfig) -> bool:
        """See ``Row``."""
        experts = config.experts
        shared = experts.moe_shared_expert_intermediate_size if experts else None
        return bool(experts and shared and shared % experts.moe_ffn_hidden_size == 0)


class _Scaling(Entry):
    """The factor on the weights of a token's experts; a run without one has 1."""

    def write(self, config: RunConfig) -> dict[str, Any]:
        """See ``Row``."""
        return {self.name: config.value_of(self.flag) or 1.0}


@dataclass(frozen=True)
class _Groups(Row):
    """A token's experts come from the best of some groups of experts; from all of them nothing is to be said."""

    groups: int
    chosen: int

    def read(self, file: File) -> Flags:
        """See ``Row``."""
        groups, chosen = _whole(file, "n_group", self.groups), _whole(file, "topk_group", self.chosen)
        if chosen >= groups:
            return {}
        if file["num_experts_per_tok"] != _SUMMED * chosen:
            raise UnknownFeatureError(
                f"topk_group is {chosen} where num_experts_per_tok is {file['num_experts_per_tok']}, not half of it"
            )
        return {"moe-router-num-groups": str(groups), "moe-router-group-topk": str(chosen)}

    def write(self, config: RunConfig) -> dict[str, Any]:
        """See ``Row``."""
        experts = experts_of(config)
        return {"n_group": experts.moe_router_num_groups or 1, "topk_group": experts.moe_router_group_topk or 1}

    def fits(self, config: RunConfig) -> bool:
        """See ``Row``."""
        experts = config.experts
        chosen = experts.moe_router_group_topk if experts else None
        return bool(experts) and (chosen is None or experts_of(config).moe_router_topk == _SUMMED * chosen)


def sigmoid_experts(*, dense_first: Row, scaling: float, groups: int, chosen: int) -> tuple[Row, ...]:
    """The rows of these experts; the numbers are the defaults of transformers for a file that lacks an entry.

    Args:
        dense_first: the row of the layers at the start with an MLP.
        scaling: factor on the weights of a token's experts.
        groups: of experts.
        chosen: groups that a token's experts come from.
    """
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
        Always("moe-router-score-function", "sigmoid"),
        Always("moe-router-enable-expert-bias", True),
        Always("moe-router-pre-softmax", False),
        # Layers that predict further tokens are not trained here.
        Written("num_nextn_predict_layers", 0),
    )


_MLP = "model.layers.{layer}.mlp."
_BIAS = Rule(("mlp.router.expert_bias",), (f"{_MLP}gate.e_score_correction_bias",), WHOLE, is_float32=True)
EXPERT_LAYER = (*router("mlp"), _BIAS, *gated_mlp("mlp.shared_experts.", f"{_MLP}shared_experts.", *GATED_NAMES))
EXPERT = gated_mlp("", f"{_MLP}experts.{{expert}}.", *GATED_NAMES)
EXPERT_NAMES = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")
