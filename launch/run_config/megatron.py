"""Settings that go unchanged into Megatron-Core's dataclasses, under the names of their fields."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from megatron_rc.launch.errors import ConfigurationError, require_multiple
from megatron_rc.launch.run_config.layer_patterns import attention_window, expert_layers, layer_pattern
from megatron_rc.launch.run_config.options import Section, option, values_of


@dataclass(frozen=True, kw_only=True)
class ParallelSection(Section):
    """Distribution of the model over the ranks: fields of ``ModelParallelConfig``.

    ``virtual_pipeline_model_parallel_size``: model chunks of a pipeline stage; None: one, in the plain schedule.
    """

    tensor_model_parallel_size: int = option("ranks that share each layer (TP)", default=1)
    pipeline_model_parallel_size: int = option("number of pipeline stages (PP)", default=1)
    context_parallel_size: int = option("ranks that share each sequence (CP)", default=1)
    expert_model_parallel_size: int = option("data and context parallel ranks that share the experts (EP)", default=1)
    sequence_parallel: bool = option("split norms and residuals over the sequence inside the TP group")
    num_layers_per_virtual_pipeline_stage: int | None = option(
        "layers of a virtual pipeline stage; default: one stage on each rank"
    )
    virtual_pipeline_model_parallel_size: int | None

    @property
    def model_size(self) -> int:
        """Number of ranks that hold one replica of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def micro_batch_unit(self) -> int:
        """Divisor of the number of micro-batches: virtual stages take turns in rounds of the PP size."""
        return self.pipeline_model_parallel_size if self.virtual_pipeline_model_parallel_size else 1

    @property
    def chunks_of_a_stage(self) -> int:
        """Number of model chunks of each pipeline stage."""
        return self.virtual_pipeline_model_parallel_size or 1

    @property
    def sequence_unit(self) -> int:
        """Divisor of the length of a packed sequence: two chunks for each CP rank."""
        return 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1

    @property
    def packing_unit(self) -> int:
        """Divisor of the length of a packed micro-batch: ``sequence_unit``, and equal slices under SP."""
        slices = self.tensor_model_parallel_size * self.context_parallel_size if self.sequence_parallel else 1
        return math.lcm(self.sequence_unit, slices)


@dataclass(frozen=True, kw_only=True)
class TransformerSection(Section):
    """Shape of a layer without experts: fields of ``TransformerConfig``."""

    num_layers: int = option("number of transformer layers", required=True)
    hidden_size: int = option("width of the residual stream", required=True)
    ffn_hidden_size: int = option("width of the MLP; default: 4 times --hidden-size")
    num_attention_heads: int = option("number of query heads", required=True)
    kv_channels: int = option("width of an attention head; default: --hidden-size divided by --num-attention-heads")
    group_query_attention: bool = option("share keys and values between query heads, in --num-query-groups groups")
    num_query_groups: int = option("number of key and value heads", default=1)
    normalization: Literal["LayerNorm", "RMSNorm"] = option("kind of norm", default="LayerNorm")
    layernorm_epsilon: float = option("epsilon of the norms", flag="norm_epsilon", default=1e-5)
    gated_linear_unit: bool = option("use a gated MLP with SiLU instead of one with GELU", flag="swiglu")
    add_bias_linear: bool = option("linear layers without a bias", flag="disable_bias_linear", inverted=True)
    add_qkv_bias: bool = option("give the query, key and value projection a bias")
    qk_layernorm: bool = option("normalise queries and keys")
    rotary_interleaved: bool = option("rotate pairs of neighbouring dimensions instead of the halves of a head")
    no_rope_freq: str | None = option(
        "layers whose queries and keys are not rotated: N every N-th, [0]*3+[1] those with a 1; default: none",
        read=layer_pattern,
        metavar="PATTERN",
    )
    softmax_type: Literal["vanilla", "learnable"] = option(
        "softmax of the attention; learnable: with a sink, a trained number of each head that takes a share of the "
        "weights",
        default="vanilla",
    )
    window_size: str | None = option(
        "keys that a query sees before and behind its own, such as 127,0: nothing behind; default: all before",
        read=attention_window,
        metavar="BEFORE,0",
    )
    window_attn_skip_freq: str | None = option(
        "layers with --window-size: N all but every N-th, [1]*3+[0] those with a 1; default: all",
        read=layer_pattern,
        metavar="PATTERN",
    )
    glu_linear_offset: float = option(
        "number that is added to the other half of a gated MLP before its product with the gate",
        default=0.0,
        any_sign=True,
    )
    activation_func_clamp_value: float | None = option(
        "largest input of a gated MLP's activation, and of the other half in both directions; default: no bound"
    )
    init_method_std: float = option("standard deviation of the initial weights", default=0.02)
    attention_dropout: float = option(
        "attention dropout; must be 0, dropout would make the policy noisy", default=0.0, any_sign=True
    )
    hidden_dropout: float = option(
        "hidden dropout; must be 0, dropout would make the policy noisy", default=0.0, any_sign=True
    )

    def __post_init__(self) -> None:
        """Check that the model has no noise, and that query heads share keys and values evenly."""
        super().__post_init__()
        for name in ("attention_dropout", "hidden_dropout"):
            if getattr(self, name):
                self.refuse(name, because="must be 0: π_old and π_θ would differ by noise")
        require_multiple("num_attention_heads", self.num_attention_heads, "num_query_groups", self.num_query_groups)


@dataclass(frozen=True, kw_only=True)
class LatentSection(Section):
    """Multi-latent attention (MLA) of DeepSeek-V2: fields of ``MLATransformerConfig``; absent without the switch."""

    multi_latent_attention: bool = option("compute queries, keys and values from narrow latent vectors of each token")
    q_lora_rank: int | None = option("width of the queries' latent; default: queries without a latent")
    kv_lora_rank: int = option("width of the latent of keys and values", default=32)
    qk_head_dim: int = option("width of a head's query and key without rotary position", default=128)
    qk_pos_emb_head_dim: int = option("width of a head's query and key with rotary position", default=64)
    v_head_dim: int = option("width of a head's value", default=128)
    rope_type: Literal["rope", "yarn"] = option("rotary frequencies: plain, or stretched by YaRN", default="yarn")
    rotary_scaling_factor: float = option("YaRN's factor on the length", default=1.0)
    original_max_position_embeddings: int = option("length in tokens before YaRN's stretching", default=4096)
    beta_fast: float = option(
        "frequencies with more turns over the original length are not stretched by YaRN", default=32.0
    )
    beta_slow: float = option(
        "frequencies with fewer turns over the original length are fully stretched by YaRN", default=1.0
    )
    mscale: float = option("YaRN's attention scale of the rotated part", default=1.0, not_negative=True)
    mscale_all_dim: float = option("YaRN's attention scale of a whole head", default=0.0, not_negative=True)

    def __post_init__(self) -> None:
        """Check that the rotated width consists of pairs."""
        super().__post_init__()
        if self.qk_pos_emb_head_dim % 2:
            self.refuse("qk_pos_emb_head_dim", because="must be even: it is rotated")


@dataclass(frozen=True, kw_only=True)
class YarnSection(Section):
    """YaRN's stretched rotary frequencies (arXiv 2309.00071): attributes that GPTModel reads from its config.

    Absent without ``--position-embedding-type yarn``.
    """

    yarn_rotary_scaling_factor: float = option("YaRN's factor on the length, without latent attention", default=1.0)
    yarn_original_max_position_embeddings: int = option(
        "length in tokens before YaRN's stretching, without latent attention", default=4096
    )
    yarn_beta_fast: float = option(
        "frequencies with more turns over the original length are not stretched; without latent attention",
        default=32.0,
    )
    yarn_beta_slow: float = option(
        "frequencies with fewer turns over the original length are fully stretched; without latent attention",
        default=1.0,
    )
    yarn_mscale: float | None = option(
        "numerator of YaRN's attention factor, with --yarn-mscale-all-dim; default: of the scaling factor alone"
    )
    yarn_mscale_all_dim: float | None = option(
        "denominator of YaRN's attention factor, with --yarn-mscale; default: of the scaling factor alone"
    )
    yarn_attention_factor: float | None = option(
        "factor on rotated queries and keys; default: of --yarn-rotary-scaling-factor"
    )
    yarn_correction_range_round_to_int: bool = option(
        "round the range of frequencies that YaRN stretches in part to whole dimensions", default=True
    )

    def __post_init__(self) -> None:
        """Check that the attention factor has one source."""
        super().__post_init__()
        if (self.yarn_mscale is None) != (self.yarn_mscale_all_dim is None):
            field = "yarn_mscale" if self.yarn_mscale_all_dim is None else "yarn_mscale_all_dim"
            missing_flag = "--yarn-mscale-all-dim" if field == "yarn_mscale" else "--yarn-mscale"
            self.refuse(field, because=f"needs {missing_flag}: give both, or neither")
        if self.yarn_attention_factor is None:
            return
        if self.yarn_mscale is not None:
            self.refuse("yarn_attention_factor", "yarn_mscale", because="are two sources of one factor: drop one")
        if self.yarn_rotary_scaling_factor <= 1:
            self.refuse(
                "yarn_attention_factor",
                "yarn_rotary_scaling_factor",
                because="cannot be computed: Megatron-Core's factor is 1 without a scaling factor above 1",
            )

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes for Megatron's config; an own attention factor is written as Megatron's mscale.

        Megatron's attention factor is 1 + 0.1 · mscale · ln(scaling factor), divided by the same of mscale_all_dim.
        """
        values = values_of(self)
        attention_factor = values.pop("yarn_attention_factor")
        if attention_factor is not None:
            logarithm = math.log(self.yarn_rotary_scaling_factor)
            values |= {"yarn_mscale": (attention_factor - 1) / (0.1 * logarithm), "yarn_mscale_all_dim": 0.0}
        return values


@dataclass(frozen=True, kw_only=True)
class ExpertSection(Section):
    """Mixture of experts instead of MLPs: fields of ``TransformerConfig``; absent in a dense model."""

    num_moe_experts: int = option("number of experts that replace each MLP; default: a dense model", flag="num_experts")
    moe_ffn_hidden_size: int = option("width of an expert; default: --ffn-hidden-size")
    moe_router_topk: int = option("number of experts of each token", default=2)
    moe_router_pre_softmax: bool = option(
        "weigh a token's experts by their softmax over all experts, not the chosen ones"
    )
    moe_layer_freq: str = option(
        "layers with experts: 1 all, N every N-th from the first on, [0]*3+[1]*58 those with a 1",
        default="1",
        read=expert_layers,
        metavar="PATTERN",
    )
    moe_shared_expert_intermediate_size: int | None = option(
        "total width of the experts that every token passes; default: none"
    )
    moe_shared_expert_gate: bool = option("multiply the shared experts' output by a sigmoid of the token")
    moe_router_score_function: Literal["softmax", "sigmoid"] = option(
        "function that makes an expert's score of its logit", default="softmax"
    )
    moe_router_topk_scaling_factor: float | None = option("factor on the weights of a token's experts; default: none")
    moe_router_num_groups: int | None = option("number of equal groups of experts; default: no groups")
    moe_router_group_topk: int | None = option("groups from which a token's experts are chosen; default: no groups")
    moe_router_enable_expert_bias: bool = option("add a bias of each expert to its score for the choice alone")
    moe_router_bias_update_rate: float = option(
        "rate at which the expert bias follows the load; must be 0: only the optimizer moves the policy",
        default=0.0,
        not_negative=True,
    )
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "none"] = option(
        "loss that spreads tokens over the experts", default="aux_loss"
    )
    moe_aux_loss_coeff: float = option("weight of the load-balancing loss", default=0.0, not_negative=True)
    moe_z_loss_coeff: float | None = option("weight of the router's z-loss; default: none", not_negative=True)
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = option(
        "transport of tokens to experts of other ranks; flex: DeepEP, on GPUs", default="allgather"
    )

    def __post_init__(self) -> None:
        """Check the number of experts of a token, and the groups that they are chosen from."""
        super().__post_init__()
        topk = self.moe_router_topk
        groups = self.moe_router_num_groups
        chosen_groups = self.moe_router_group_topk
        weighs_single = self.moe_router_pre_softmax or self.moe_router_score_function == "sigmoid"
        fewest = 1 if weighs_single else 2
        reason = "" if weighs_single else ": the weight of a single expert is always 1"
        if self.num_moe_experts < fewest:
            self.refuse("num_moe_experts", because=f"must be at least {fewest}{reason}")
        if not fewest <= topk <= self.num_moe_experts:
            self.refuse("moe_router_topk", because=f"must lie in [{fewest}, {self.num_moe_experts}]{reason}")
        if self.moe_router_bias_update_rate:
            self.refuse(
                "moe_router_bias_update_rate",
                because="must be 0: Megatron would change router biases outside of the optimizer, in skipped steps too",
            )
        if (groups is None) != (chosen_groups is None):
            field = "moe_router_num_groups" if chosen_groups is None else "moe_router_group_topk"
            missing_flag = "--moe-router-group-topk" if chosen_groups is None else "--moe-router-num-groups"
            self.refuse(field, because=f"needs {missing_flag}: give both, or neither")
        if groups is None or chosen_groups is None:
            return
        require_multiple("num_experts", self.num_moe_experts, "moe_router_num_groups", groups)
        require_multiple("moe_router_topk", topk, "moe_router_group_topk", chosen_groups)
        if chosen_groups > groups or topk // chosen_groups > self.num_moe_experts // groups:
            self.refuse(
                "moe_router_group_topk",
                "moe_router_num_groups",
                because=f"cannot give {self.typed('moe_router_topk')} of {self.typed('num_moe_experts')}: choose from "
                "more groups, or make fewer",
            )

    @property
    def has_auxiliary_losses(self) -> bool:
        """Whether the router adds losses of its own to the gradients."""
        return bool(self.moe_aux_loss_coeff or self.moe_z_loss_coeff)


@dataclass(frozen=True, kw_only=True)
class RoutingSection(Section):
    """Replay of the experts that were chosen for each token in another pass; absent without the switch."""

    moe_enable_routing_replay: bool = option(
        "give each token the experts that another pass chose for it, instead of the router's new choice"
    )
    moe_routing_replay_source: Literal["rollout", "old"] = option(
        "pass whose experts are replayed: rollout, the engine's, in all passes of the policy; old, the forward-only "
        "pass's, in the optimizer steps",
        default="rollout",
    )
    moe_routing_replay_check_interval: int | None = option(
        "score every N-th rollout batch once more with the routers' own choices, and report k3 with and without "
        "replay; default: the first batch, and each batch of --load-rollouts"
    )


@dataclass(frozen=True, kw_only=True)
class ComputeSection(Section):
    """Precision and recomputation: fields of ``TransformerConfig``."""

    bf16: bool = option("bfloat16 weights with float32 master weights")
    fp16: bool = option("float16 weights with float32 master weights and a scaled loss")
    calculate_per_token_loss: bool = option("let Megatron normalise gradients by tokens; the gradients are the same")
    recompute_granularity: Literal["full", "selective"] | None = option(
        "activations to recompute in the backward pass; default: none"
    )
    recompute_method: Literal["uniform", "block"] | None = option("choice of the layers to recompute")
    recompute_num_layers: int | None = option("number of layers of a recomputed unit")

    def __post_init__(self) -> None:
        """Check that the weights have one type, and that recomputation is complete."""
        super().__post_init__()
        if self.fp16 and self.bf16:
            raise ConfigurationError("--fp16 and --bf16 are two types of the same weights: drop one of them")
        is_complete = self.recompute_method is not None and self.recompute_num_layers is not None
        if self.recompute_granularity == "full" and not is_complete:
            self.refuse("recompute_granularity", because="needs --recompute-method and --recompute-num-layers")


@dataclass(frozen=True, kw_only=True)
class OptimizerSection(Section):
    """Fields of ``OptimizerConfig``; ``use_distributed_optimizer`` is a field of Megatron's DDP config too."""

    optimizer: Literal["adam", "sgd"] = option("optimizer of Megatron-Core", default="adam")
    lr: float = option("highest learning rate", required=True)
    min_lr: float = option("lowest learning rate", default=0.0, not_negative=True)
    weight_decay: float = option("decoupled weight decay", default=0.01, not_negative=True)
    adam_beta1: float = option("Adam's decay of the first moment, below 1", default=0.9, not_negative=True, below=1)
    adam_beta2: float = option("Adam's decay of the second moment, below 1", default=0.999, not_negative=True, below=1)
    adam_eps: float = option("Adam's epsilon", default=1e-8)
    sgd_momentum: float = option("momentum of --optimizer sgd", default=0.9, not_negative=True)
    clip_grad: float = option("largest gradient norm; 0: no clipping", default=1.0, not_negative=True)
    use_distributed_optimizer: bool = option("split the optimizer state over the data-parallel ranks")

    def __post_init__(self) -> None:
        """Check that the learning rate falls, and that the optimizer can be split."""
        super().__post_init__()
        if self.min_lr > self.lr:
            self.refuse("min_lr", because=f"must be at most {self.typed('lr')}")
        if self.use_distributed_optimizer and self.optimizer != "adam":
            self.refuse("use_distributed_optimizer", because=f"does not go with {self.typed('optimizer')}: use adam")


@dataclass(frozen=True, kw_only=True)
class MegatronSection(Section):
    """Given fields of Megatron's configs that no other section has, by name."""

    given: dict[str, Any]

    @property
    def expert_tensor_parallel_size(self) -> int | None:
        """Number of ranks that share an expert's matrices; None: the TP size."""
        return self.given.get("expert_tensor_parallel_size")

    @property
    def layers_at_ends(self) -> tuple[int | None, int | None]:
        """Layers of the first and of the last pipeline stage; None: as many as the stages between have."""
        first, last = (self.given.get(f"num_layers_in_{end}_pipeline_stage") for end in ("first", "last"))
        return first, last

    def values_for(self, config: type) -> dict[str, Any]:
        """Given fields that a dataclass of Megatron's has: arguments for it."""
        names = {field.name for field in dataclasses.fields(config)}
        return {name: value for name, value in self.given.items() if name in names}
