"""What goes unchanged into Megatron-Core's dataclasses, under the names of their fields.

``TransformerConfig(**values_of(config.transformer), ...)``: a field that is added here has its flag, and is in
Megatron's config, with no other line.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from megatron_rc.launch.run_config.layer_patterns import expert_layers
from megatron_rc.launch.run_config.options import option


@dataclass(frozen=True, kw_only=True)
class ParallelSection:
    """How the model is cut over the ranks: fields of ``ModelParallelConfig``, the base of ``TransformerConfig``.

    ``virtual_pipeline_model_parallel_size``: model chunks of each pipeline stage; None: one, in the plain schedule.
    """

    tensor_model_parallel_size: int = option("TP", default=1, positive=True)
    pipeline_model_parallel_size: int = option("PP", default=1, positive=True)
    context_parallel_size: int = option("CP", default=1, positive=True)
    expert_model_parallel_size: int = option("EP, over the data and CP ranks", default=1, positive=True)
    sequence_parallel: bool = option("split norms and residuals over the sequence inside the TP group", default=False)
    virtual_pipeline_model_parallel_size: int | None

    @property
    def model_size(self) -> int:
        """Ranks that hold one replica of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def micro_batch_unit(self) -> int:
        """What the number of micro-batches must be a multiple of: virtual stages take turns in rounds of PP."""
        return self.pipeline_model_parallel_size if self.virtual_pipeline_model_parallel_size else 1

    @property
    def sequence_unit(self) -> int:
        """What the length of a packed sequence must be a multiple of: two chunks for each CP rank."""
        return 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1

    @property
    def packing_unit(self) -> int:
        """What the length of a packed micro-batch must be a multiple of: that, and whole slices under SP."""
        slices = self.tensor_model_parallel_size * self.context_parallel_size if self.sequence_parallel else 1
        return math.lcm(self.sequence_unit, slices)


@dataclass(frozen=True, kw_only=True)
class TransformerSection:
    """The shape of a layer, without its experts: fields of ``TransformerConfig``."""

    num_layers: int = option("transformer layers", required=True, positive=True, most=1000)
    hidden_size: int = option("width of the residual stream", required=True, positive=True, most=2**20)
    ffn_hidden_size: int = option("width of the MLP; default: Megatron-LM's 4·hidden-size", positive=True, most=2**24)
    num_attention_heads: int = option("query heads", required=True, positive=True, most=2**16)
    kv_channels: int = option("width of a head; default: hidden-size / heads", positive=True, most=2**16)
    num_query_groups: int = option("key/value heads with --group-query-attention", default=1, positive=True)
    normalization: Literal["LayerNorm", "RMSNorm"] = option("kind of norm", default="LayerNorm")
    layernorm_epsilon: float = option("epsilon of the norms", flag="norm_epsilon", default=1e-5, positive=True)
    gated_linear_unit: bool = option("gated MLP with SiLU instead of GELU", flag="swiglu", default=False)
    add_bias_linear: bool = option("linear layers without a bias", flag="disable_bias_linear", inverted=True)
    add_qkv_bias: bool = option("a bias in the query, key and value projection alone", default=False)
    qk_layernorm: bool = option("norms on queries and keys", default=False)
    init_method_std: float = option("std of the initial weights", default=0.02, positive=True)
    attention_dropout: float = option("must be 0: the policy would be noisy", default=0.0)
    hidden_dropout: float = option("must be 0: the policy would be noisy", default=0.0)


@dataclass(frozen=True, kw_only=True)
class LatentSection:
    """Multi-latent attention (MLA, of DeepSeek-V2): fields of ``MLATransformerConfig``.

    Queries, keys and values come from narrow vectors (latents) of each token. Another model has no such section: its
    flags are refused without ``--multi-latent-attention``. Defaults are those of Megatron-LM's parser.
    """

    multi_latent_attention: bool = option("queries, keys and values from narrow latents", default=False)
    q_lora_rank: int | None = option(
        "width of the queries' latent; default: none, they come directly", positive=True, most=2**16
    )
    kv_lora_rank: int = option("width of the latent of keys and values", default=32, positive=True, most=2**16)
    qk_head_dim: int = option(
        "width of a head's query and key without position", default=128, positive=True, most=2**16
    )
    qk_pos_emb_head_dim: int = option("further width, with rotary position", default=64, positive=True, most=2**16)
    v_head_dim: int = option("width of a head's value", default=128, positive=True, most=2**16)
    rope_type: Literal["rope", "yarn"] = option("rotary frequencies: plain, or stretched by YaRN", default="yarn")
    rotary_scaling_factor: float = option("YaRN: by this much", default=1.0, positive=True)
    original_max_position_embeddings: int = option("YaRN: length before that", default=4096, positive=True, most=2**24)
    beta_fast: float = option(
        "YaRN: turns over that length, above which none is stretched", default=32.0, positive=True
    )
    beta_slow: float = option("YaRN: turns below which all are", default=1.0, positive=True)
    mscale: float = option("YaRN: scale of the rotated part", default=1.0, not_negative=True)
    mscale_all_dim: float = option("YaRN: scale of all of a head", default=0.0, not_negative=True)


@dataclass(frozen=True, kw_only=True)
class ExpertSection:
    """A mixture of experts in the place of each MLP: fields of ``TransformerConfig``.

    A dense model has no such section: its flags are refused without ``--num-experts``, and have their defaults with it.
    """

    num_moe_experts: int = option(
        "experts in the place of each MLP; default: a dense model", flag="num_experts", positive=True, most=2048
    )
    moe_ffn_hidden_size: int = option("width of an expert; default: --ffn-hidden-size", positive=True, most=2**24)
    moe_router_topk: int = option("experts of each token", default=2, positive=True)
    moe_router_pre_softmax: bool = option(
        "weigh a token's experts by their softmax over all experts, not over the chosen ones", default=False
    )
    moe_layer_freq: str = option(
        "layers with experts: 1, all; N, every N-th from the first on; [0]*3+[1]*58, those with a 1",
        default="1",
        read=expert_layers,
        metavar="PATTERN",
    )
    moe_shared_expert_intermediate_size: int | None = option(
        "width of the experts that every token passes, all together; default: none", positive=True, most=2**24
    )
    moe_router_score_function: Literal["softmax", "sigmoid"] = option(
        "what makes an expert's score of its logit", default="softmax"
    )
    moe_router_topk_scaling_factor: float | None = option(
        "factor on the weights of a token's experts; default: none", positive=True
    )
    moe_router_num_groups: int | None = option("groups of equally many experts; default: none", positive=True)
    moe_router_group_topk: int | None = option(
        "groups from which a token's experts are chosen; default: all", positive=True
    )
    moe_router_enable_expert_bias: bool = option(
        "add a bias of each expert to its score for the choice alone, with sigmoid", default=False
    )
    moe_router_bias_update_rate: float = option(
        "must be 0: the bias would move outside of the optimizer", default=0.0, not_negative=True
    )
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "none"] = option(
        "how tokens are spread over the experts", default="aux_loss"
    )
    moe_aux_loss_coeff: float = option("weight of that loss", default=0.0, not_negative=True)
    moe_z_loss_coeff: float | None = option("weight of the router's z-loss; default: none", not_negative=True)
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = option(
        "how tokens reach experts of other ranks; flex: by DeepEP, on GPUs", default="allgather"
    )

    @property
    def has_auxiliary_losses(self) -> bool:
        """Whether the router adds losses of its own to the gradients."""
        return bool(self.moe_aux_loss_coeff or self.moe_z_loss_coeff)


@dataclass(frozen=True, kw_only=True)
class ComputeSection:
    """In which numbers, what is kept and what is computed again: fields of ``TransformerConfig``."""

    bf16: bool = option("bfloat16 weights with float32 master weights", default=False)
    fp16: bool = option("float16 weights with float32 master weights, and a loss that is scaled", default=False)
    calculate_per_token_loss: bool = option(
        "let Megatron normalise by tokens; the gradients are the same", default=False
    )
    recompute_granularity: Literal["full", "selective"] | None = option("recompute activations")
    recompute_method: Literal["uniform", "block"] | None = option("which layers, for 'full'")
    recompute_num_layers: int | None = option("layers of a recomputed unit, for 'full'", positive=True)


@dataclass(frozen=True, kw_only=True)
class OptimizerSection:
    """Fields of ``OptimizerConfig``; ``use_distributed_optimizer`` is one of Megatron's DDP too."""

    optimizer: Literal["adam", "sgd"] = option("Megatron-Core's optimizer", default="adam")
    lr: float = option("highest learning rate", required=True, positive=True)
    min_lr: float = option("lowest learning rate", default=0.0, not_negative=True)
    weight_decay: float = option("decoupled weight decay", default=0.01, not_negative=True)
    adam_beta1: float = option("decay of the first moment", default=0.9)
    adam_beta2: float = option("decay of the second moment", default=0.999)
    adam_eps: float = option("epsilon of Adam", default=1e-8, positive=True)
    sgd_momentum: float = option("momentum of SGD", default=0.9, not_negative=True)
    clip_grad: float = option("largest gradient norm; 0 turns clipping off", default=1.0, not_negative=True)
    use_distributed_optimizer: bool = option("split the optimizer state over the data-parallel ranks", default=False)


@dataclass(frozen=True, kw_only=True)
class MegatronSection:
    """Fields of Megatron's configs that no other section has: those that were given, by their names."""

    given: dict[str, Any]

    @property
    def expert_tensor_parallel_size(self) -> int | None:
        """Ranks that share an expert's matrices; None: as many as share the others'."""
        return self.given.get("expert_tensor_parallel_size")

    @property
    def layers_at_ends(self) -> tuple[int | None, int | None]:
        """Layers of the first and of the last pipeline stage; None: as many as each of the others has."""
        first, last = (self.given.get(f"num_layers_in_{end}_pipeline_stage") for end in ("first", "last"))
        return first, last

    def values_for(self, config: type) -> dict[str, Any]:
        """Those that a dataclass of Megatron's has: arguments for it."""
        names = {field.name for field in dataclasses.fields(config)}
        return {name: value for name, value in self.given.items() if name in names}
