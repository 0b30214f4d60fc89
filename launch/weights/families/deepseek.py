"""DeepSeek-V3 (also Moonlight): latent attention, experts that all tokens pass, MLPs in the first layers.

Its rotated dimensions lie in pairs, as Megatron's latent attention wants them.
"""

from __future__ import annotations

from typing import Any

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.weights.conversions import COLUMNS, ROWS, VOCABULARY, WHOLE
from megatron_rc.launch.weights.entries import Always, Entry, File, Flags, Only, Row, UnknownFeatureError, Written
from megatron_rc.launch.weights.families.llama import GATED_NAMES, gated_mlp, router
from megatron_rc.launch.weights.family import ExpertNames, Family, Rule, experts_of
from megatron_rc.launch.weights.rotary import LatentRotary

# transformers sums the best two experts of a group, Megatron as many as each chosen group has to give.
_SUMMED = 2


def _whole(file: File, name: str, default: int) -> int:
    """An entry that counts something; the default is that of transformers, for a file that lacks the entry."""
    found = file.get(name, default)
    if not isinstance(found, int) or isinstance(found, bool):
        raise UnknownFeatureError(f"{name} is {found!r}, not a whole number")
    return found


class _HeadsOfTheirOwn(Row):
    """Each head has keys and values of its own, made from the latent."""

    def read(self, file: File) -> Flags:
        """See ``Row``."""
        heads, groups = file["num_attention_heads"], file.get("num_key_value_heads")
        if groups not in (None, heads):
            raise UnknownFeatureError(f"num_key_value_heads is {groups!r}, not the {heads} of num_attention_heads")
        return {}

    def write(self, config: RunConfig) -> dict[str, Any]:
        """See ``Row``."""
        return {"num_key_value_heads": config.transformer.num_attention_heads}

    def fits(self, config: RunConfig) -> bool:
        """See ``Row``."""
        return config.transformer.num_query_groups == config.transformer.num_attention_heads


class _DenseFirst(Row):
    """The number of layers at the start that have an MLP."""

    def read(self, file: File) -> Flags:
        """See ``Row``."""
        first, layers = _whole(file, "first_k_dense_replace", 3), file["num_hidden_layers"]
        if not 0 <= first < layers:
            raise UnknownFeatureError(f"first_k_dense_replace is {first!r}, not in [0, {layers - 1}]")
        return {"moe-layer-freq": f"[0]*{first}+[1]*{layers - first}" if first else "1"}

    def write(self, config: RunConfig) -> dict[str, Any]:
        """See ``Row``."""
        return {"first_k_dense_replace": config.layers_with_experts.index(True)}

    def fits(self, config: RunConfig) -> bool:
        """See ``Row``."""
        layers = config.layers_with_experts
        return any(layers) and layers == sorted(layers)


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


class _Groups(Row):
    """A token's experts come from the best of some groups of experts; from all of them nothing is to be said."""

    def read(self, file: File) -> Flags:
        """See ``Row``."""
        groups, chosen = _whole(file, "n_group", 8), _whole(file, "topk_group", 4)
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


_FIELDS: tuple[Row, ...] = (
    Always("multi-latent-attention", True),
    Only("hidden_act", "silu"),
    Only("attention_bias", False),
    Only("rope_interleave", True),
    Only("norm_topk_prob", True),
    Only("scoring_func", "sigmoid"),
    Only("topk_method", "noaux_tc"),
    Only("moe_layer_freq", 1),
    Entry("num_hidden_layers", "num-layers"),
    Entry("hidden_size", "hidden-size"),
    Entry("num_attention_heads", "num-attention-heads"),
    _HeadsOfTheirOwn(),
    Entry("q_lora_rank", "q-lora-rank", default=lambda file: None if "q_lora_rank" in file else 1536),
    Entry("kv_lora_rank", "kv-lora-rank"),
    Entry("qk_nope_head_dim", "qk-head-dim"),
    Entry("qk_rope_head_dim", "qk-pos-emb-head-dim"),
    Entry("v_head_dim", "v-head-dim"),
    LatentRotary(),
    Entry("max_position_embeddings", "max-position-embeddings"),
    Entry("rms_norm_eps", "norm-epsilon"),
    Entry("tie_word_embeddings", "untie-embeddings-and-output-weights", default=False, inverted=True),
    Entry("vocab_size", "vocab-size"),
    Entry("intermediate_size", "ffn-hidden-size"),
    Entry("moe_intermediate_size", "moe-ffn-hidden-size"),
    Entry("n_routed_experts", "num-experts", other_name="num_local_experts"),
    Entry("num_experts_per_tok", "moe-router-topk"),
    _Scaling("routed_scaling_factor", "moe-router-topk-scaling-factor", default=2.5),
    _DenseFirst(),
    _Shared(),
    _Groups(),
    Always("moe-router-score-function", "sigmoid"),
    Always("moe-router-enable-expert-bias", True),
    Always("moe-router-pre-softmax", False),
    Always("normalization", "RMSNorm"),
    Always("swiglu", True),
    Always("openai-gelu", False),
    Always("disable-bias-linear", True),
    Always("add-qkv-bias", False),
    Always("qk-layernorm", True),
    Always("sliding-window", None),
    # Layers that predict further tokens are not trained here.
    Written("num_nextn_predict_layers", 0),
)
_LAYER, _ATTENTION = "model.layers.{layer}.", "model.layers.{layer}.self_attn."


def _has_latent_queries(config: RunConfig) -> bool:
    return config.latent is not None and config.latent.q_lora_rank is not None


def _has_direct_queries(config: RunConfig) -> bool:
    return not _has_latent_queries(config)


def _norm(part: str, hugging_face: str, **how: Any) -> Rule:
    names = (f"self_attention.{part}_layernorm.weight", f"self_attention.linear_{part}_up_proj.layer_norm_weight")
    return Rule(names, (f"{_ATTENTION}{hugging_face}.weight",), WHOLE, **how)


def _linear(part: str, hugging_face: str, conversion: Any, **how: Any) -> Rule:
    return Rule((f"self_attention.linear_{part}.weight",), (f"{_ATTENTION}{hugging_face}.weight",), conversion, **how)


_LATENT_ATTENTION = (
    Rule(("input_layernorm.weight",), (f"{_LAYER}input_layernorm.weight",), WHOLE),
    _linear("q_proj", "q_proj", ROWS, holds=_has_direct_queries),
    _linear("q_down_proj", "q_a_proj", WHOLE, holds=_has_latent_queries),
    _norm("q", "q_a_layernorm", holds=_has_latent_queries),
    _linear("q_up_proj", "q_b_proj", ROWS, holds=_has_latent_queries),
    _linear("kv_down_proj", "kv_a_proj_with_mqa", WHOLE),
    _norm("kv", "kv_a_layernorm"),
    _linear("kv_up_proj", "kv_b_proj", ROWS),
    _linear("proj", "o_proj", COLUMNS),
    Rule(
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        (f"{_LAYER}post_attention_layernorm.weight",),
        WHOLE,
    ),
)
_BIAS = Rule(("mlp.router.expert_bias",), (f"{_LAYER}mlp.gate.e_score_correction_bias",), WHOLE, is_float32=True)

DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    config_class="DeepseekV3Config",
    fields=_FIELDS,
    embedding=(Rule(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), VOCABULARY),),
    layer=_LATENT_ATTENTION,
    dense_layer=gated_mlp("mlp.", f"{_LAYER}mlp.", *GATED_NAMES),
    expert_layer=(
        *router("mlp"),
        _BIAS,
        *gated_mlp("mlp.shared_experts.", f"{_LAYER}mlp.shared_experts.", *GATED_NAMES),
    ),
    expert=gated_mlp("", f"{_LAYER}mlp.experts.{{expert}}.", *GATED_NAMES),
    expert_names=ExpertNames("mlp", "gate_proj", "up_proj", "down_proj"),
    head=(Rule(("decoder.final_layernorm.weight",), ("model.norm.weight",), WHOLE),),
    untied_head=(Rule(("output_layer.weight",), ("lm_head.weight",), VOCABULARY),),
)
