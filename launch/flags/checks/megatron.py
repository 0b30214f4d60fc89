"""Flags of Megatron's own: those that go into its configs and then break something here, or do nothing.

What Megatron itself refuses it says in its own words, which become one sentence with the flags.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.run_config import RunConfig, passed_through
from megatron_rc.launch.run_config.megatron_configs import (
    build_ddp_config,
    build_optimizer_config,
    build_transformer_config,
    has_module,
)
from megatron_rc.launch.run_config.megatron_fields import MegatronField
from megatron_rc.launch.run_config.options import MOST

# Patterns of fields, and why they may have Megatron's default alone.
_REFUSED: tuple[tuple[str, str], ...] = (
    (
        "moe_input_jitter_eps|moe_router_force_(load_balancing|biased)",
        "makes the router random: π_old and π_θ would differ by noise; drop it",
    ),
    (
        "moe_expert_capacity_factor|moe_pad_expert_input_to_capacity|moe_token_drop_policy|moe_expert_rank_capacity.*|"
        "moe_router_quantile.*",
        "routes tokens by what else is in their micro-batch, which no engine does: π_old would be that of another "
        "model; drop it",
    ),
    ("mtp_.*", "adds layers that are trained by the loss of further tokens, and PPO has none for them; drop it"),
    (
        "fp8_param|fp8_param_gather|fp4_param|fp4_param_gather|reuse_grad_buf_for_mxfp8_param_ag|"
        "keep_fp8_transpose_cache",
        "keeps the weights in numbers that cannot go to engines; drop it",
    ),
    (
        ".*fsdp.*|data_parallel_sharding_strategy|outer_dp_sharding_strategy|suggested_communication_unit_size|"
        "gradient_reduce_div_fusion|disable_symmetric_registration|init_model_with_meta_device",
        "belongs to Megatron-FSDP, which is not here: use --use-distributed-optimizer",
    ),
    (
        "num_distributed_optimizer_instances|use_layer_wise_distributed_optimizer",
        "splits the optimizer in a way that is not here: drop it",
    ),
    (
        "(muon|lion|soap|adaptive_muon)_.*",
        "belongs to an optimizer that is not here: --optimizer is adam or sgd",
    ),
    (
        "qk_clip.*|grad_norm_skip_threshold|optimizer_cuda_graph",
        "is a matter of Megatron-LM's own training loop, which is not the one here: drop it",
    ),
    (
        "overlap_moe_expert_parallel_comm|delay_wgrad_compute|ep_overlap_early.*|overlap_dispatch_backward.*",
        "needs a schedule of Megatron's that plans layers of two micro-batches together, and the one here does not: "
        "drop it",
    ),
    (
        "overlap_param_gather_with_optimizer_step|align_param_gather",
        "is tied to Megatron-LM's own training loop: drop it, --overlap-param-gather alone works",
    ),
    (
        "max_seqlen_per_dp_cp_rank|hybrid_context_parallel|mrope_section",
        "needs batches that Megatron-LM's own loaders make: drop it",
    ),
    (
        "microbatch_group_size_per_vp_stage|pipeline_model_parallel_layout|account_for_.*_in_pipeline_split",
        "spreads layers in a way that is not here: use --decoder-first-pipeline-num-layers and "
        "--decoder-last-pipeline-num-layers",
    ),
    (
        "experimental_attention_variant|dsa_.*|linear_.*|mamba_.*|use_mamba_mem_eff_path|mup_.*|use_mup|"
        "window_attn_skip_freq",
        "makes another kind of model than the GPT with full attention that is here: drop it",
    ),
    (
        "(enable_|external_)?cuda_graph.*|moe_paged_stash.*|delay_offload_until_cuda_graph",
        "captures CUDA graphs, and the passes here have other shapes for training and for log-probs: drop it",
    ),
    (
        "inference_.*|flash_decode|symmetric_ar_type|mlp_chunks_for_prefill|nccl_all_reduce_for_prefill|"
        "moe_pad_experts_for_cuda_graph_inference",
        "is for inference by Megatron, and engines sample here: drop it",
    ),
    (
        "moe_enable_routing_replay|moe_per_layer_logging|config_logger_dir",
        "writes or reads what nobody here uses: drop it",
    ),
    (
        "moe_use_legacy_grouped_gemm|moe_extended_tp|async_tensor_model_parallel_allreduce|"
        "apply_residual_connection_post_layernorm",
        "is what Megatron-Core has given up: drop it",
    ),
    ("use_fused_weighted_squared_relu", "belongs to an activation that is not here: drop it"),
    ("attention_softmax_in_fp32", "would do nothing, the softmax is always in float32: drop it"),
    ("use_ring_exchange_p2p", "needs a build of PyTorch with ring_exchange: drop it"),
    ("cpu_offloading_.*", "does nothing in Megatron-LM either: use --fine-grained-activation-offloading, or drop it"),
)
# Fields that make another function of the model: no architecture of Hugging Face's in the tables has them.
_OF_THE_MODEL = (
    "attention_output_gate|activation_func_clamp_value|glu_linear_offset|"
    "layernorm_zero_centered_gamma|moe_apply_probs_on_input|moe_latent_size|moe_shared_expert_gate|no_rope_freq|"
    "qk_l2_norm|rotary_interleaved|softmax_type"
)

# Numbers that Megatron takes as they are, and that break a run or do nothing where they are 0 or less.
_POSITIVE = frozenset(
    "decoupled_lr embedding_init_method_std loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis "
    "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage".split()
)
# Of --recompute-modules.
MODULES_OF_ENGINE = ("layernorm", "moe_act", "mla_up_proj")
_OF_THE_SCALE = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")


def check_megatron(config: RunConfig) -> None:
    """The fields that were given: whether each does something here, and Megatron builds its configs with them.

    Raises:
        ConfigurationError: one sentence.
    """
    chosen = dict(_chosen(config))
    for field, value in chosen.values():
        reason = next((why for names, why in _REFUSED if re.fullmatch(names, field.name)), None)
        if reason is not None:
            raise ConfigurationError(f"{field.as_flag(value)} {reason}")
    for names, is_there, remedy in _NEEDS:
        for name, (field, value) in chosen.items():
            if re.fullmatch(names, name) and not is_there(config):
                raise ConfigurationError(f"{field.as_flag(value)} does nothing {remedy}")
    for field, value in chosen.values():
        _check_range(field, value)
    _check_numbers(config)
    _check_half(config)
    # Settings for other machines, which have Transformer Engine, are not Megatron's to judge without it.
    if config.megatron.given and (has_module("transformer_engine") or not _has_engine(config)):
        _build(config, [field.as_flag(value) for field, value in chosen.values()])


def model_flags(config: RunConfig) -> list[str]:
    """The given flags that make the model another function than any in the tables of architectures."""
    return [field.as_flag(value) for name, (field, value) in _chosen(config) if re.fullmatch(_OF_THE_MODEL, name)]


def _chosen(config: RunConfig) -> Iterator[tuple[str, tuple[MegatronField, Any]]]:
    """The given fields that have another value than they would have anyway."""
    known = passed_through()
    for name, value in config.megatron.given.items():
        if value != known[name].default:
            yield name, (known[name], value)


def _check_range(field: MegatronField, value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigurationError(f"{field.as_flag(value)} must be a finite number")
    if isinstance(value, int) and abs(value) > MOST:
        raise ConfigurationError(f"{field.as_flag(value)} must be at most {MOST}")
    if field.name in _POSITIVE and value <= 0:
        raise ConfigurationError(f"{field.as_flag(value)} must be positive")


def _value(config: RunConfig, name: str) -> Any:
    return config.megatron.given.get(name, passed_through()[name].default)


def _given(name: str) -> Callable[[RunConfig], bool]:
    return lambda config: bool(config.megatron.given.get(name))


def _has_engine(config: RunConfig) -> bool:
    return config.model.transformer_impl == "transformer_engine"


def _on_gpu(config: RunConfig) -> bool:
    return not config.launch.on_cpu


# Patterns of fields, what they need, and the end of the sentence that says so.
_NEEDS: tuple[tuple[str, Callable[[RunConfig], bool], str], ...] = (
    (
        "moe_.*|expert_tensor_parallel_size",
        lambda config: config.experts is not None,
        "without --num-experts: give both, or neither",
    ),
    (
        "moe_shared_expert_.+",
        lambda config: bool(config.experts and config.experts.moe_shared_expert_intermediate_size),
        "without --moe-shared-expert-intermediate-size: give both, or neither",
    ),
    (
        "fp8_.*|first_last_layers_bf16|num_layers_at_.*_in_bf16|moe_router_padding_for_.*",
        lambda config: bool(config.megatron.given.get("fp8") or config.megatron.given.get("fp4")),
        "without --fp8-format: give both, or neither",
    ),
    ("fp4_.*", _given("fp4"), "without --fp4-format: give both, or neither"),
    ("tp_comm_(?!overlap$).*", _given("tp_comm_overlap"), "without --tp-comm-overlap: give both, or neither"),
    (
        "offload_modules|min_offloaded_tensor_size",
        _given("fine_grained_activation_offloading"),
        "without --fine-grained-activation-offloading: give both, or neither",
    ),
    (
        "optimizer_offload_fraction|use_torch_optimizer_for_cpu_offload|overlap_cpu_optimizer.*|pin_cpu_.*",
        _given("optimizer_cpu_offload"),
        "without --optimizer-cpu-offload: give both, or neither",
    ),
    (
        "(main_grads|main_params|exp_avg|exp_avg_sq)_dtype|store_param_remainders",
        _given("use_precision_aware_optimizer"),
        "without --use-precision-aware-optimizer: give both, or neither",
    ),
    (
        "bucket_size|num_buckets|pad_buckets_for_high_nccl_busbw",
        _given("overlap_grad_reduce"),
        "without --overlap-grad-reduce: give both, or neither",
    ),
    (
        "wgrad_deferral_limit",
        _given("defer_embedding_wgrad_compute"),
        "without --defer-embedding-wgrad-compute: give both, or neither",
    ),
    (
        "defer_embedding_wgrad_compute",
        lambda config: not config.training.fused_linear_log_probs,
        "with --fused-linear-log-probs, which goes around the output layer: drop one of them",
    ),
    (
        "grad_reduce_in_fp32",
        lambda config: config.compute.bf16,
        "without --bf16: the gradients are in float32; give both, or neither",
    ),
    (
        "|".join(_OF_THE_SCALE),
        lambda config: config.compute.fp16,
        "without --fp16: give both, or neither",
    ),
    (
        "|".join(_OF_THE_SCALE[1:]),
        lambda config: config.megatron.given.get("loss_scale") is None,
        "with --loss-scale, which never changes: drop one of them",
    ),
    (
        "perform_initialization",
        lambda config: bool(config.checkpoints.load or config.checkpoints.load_hf),
        "good without --load or --load-hf: the weights would be what happened to lie in memory; drop it",
    ),
    (
        "moe_enable_deepep|moe_flex_.*|moe_deepep_.*|moe_hybridep_.*|moe_ncclep_.*|moe_permute_fusion_into_hybridep",
        lambda config: config.experts is not None and config.experts.moe_token_dispatcher_type == "flex",
        "without --moe-token-dispatcher-type flex: give both, or neither",
    ),
    ("decoupled_min_lr", _given("decoupled_lr"), "without --decoupled-lr: give both, or neither"),
    (
        "cross_entropy_fusion_impl",
        _given("cross_entropy_loss_fusion"),
        "without --cross-entropy-loss-fusion: give both, or neither",
    ),
    (
        "apply_wd_to_qk_layernorm",
        lambda config: config.transformer.qk_layernorm,
        "without --qk-layernorm: give both, or neither",
    ),
    (
        "overlap_param_gather",
        lambda config: config.optimizer.use_distributed_optimizer,
        "without --use-distributed-optimizer: give both, or neither",
    ),
    (
        "recompute_modules",
        lambda config: config.compute.recompute_granularity == "selective",
        "without --recompute-granularity selective: give both, or neither",
    ),
    (
        "distribute_saved_activations",
        lambda config: config.compute.recompute_granularity == "full",
        "without --recompute-granularity full: give both, or neither",
    ),
    (
        "num_layers_in_(first|last)_pipeline_stage",
        lambda config: config.parallel.pipeline_model_parallel_size > 1,
        "without --pipeline-model-parallel-size above 1: give both, or neither",
    ),
    (
        "overlap_p2p_comm.*",
        lambda config: config.parallel.virtual_pipeline_model_parallel_size is not None,
        "without --num-layers-per-virtual-pipeline-stage: give both, or neither",
    ),
    (
        "fp8|fp4|attention_backend|softmax_type|apply_rope_fusion|masked_softmax_fusion|persist_layer_norm|"
        "apply_query_key_layer_scaling|layernorm_zero_centered_gamma|cp_comm_type|hierarchical_context_parallel_sizes|"
        "tp_comm_overlap|use_te_.*|moe_grouped_gemm|moe_permute_fusion|moe_router_fusion|flash_attention_version|"
        "fine_grained_activation_offloading|moe_latent_size|batch_invariant_mode|fp32_residual_connection|"
        "use_transformer_engine_op_fuser|fused_residual_rmsnorm|attention_output_gate",
        _has_engine,
        "with --transformer-impl local: use transformer_engine, or drop it",
    ),
    (
        "tp_comm_overlap",
        lambda config: config.parallel.sequence_parallel,
        "without --sequence-parallel: give both, or neither",
    ),
    (
        "average_in_collective|reduce_scatter_with_fp32_accumulation|nccl_ub|optimizer_cpu_offload|"
        "moe_shared_expert_overlap|pipeline_model_parallel_comm_backend|use_precision_aware_optimizer|"
        "gradient_accumulation_fusion|distribute_saved_activations|disable_bf16_reduced_precision_matmul",
        _on_gpu,
        "on the CPU: it is for GPUs; drop it",
    ),
)


def _check_numbers(config: RunConfig) -> None:
    """Where a flag is one thing in Megatron and another in the policy that an engine has, or in an earlier pass."""
    given = config.megatron.given
    if given.get("bias_activation_fusion") and not config.transformer.gated_linear_unit:
        raise ConfigurationError(
            "--bias-activation-fusion without --swiglu would make GELU its tanh approximation: drop it, and give "
            "--openai-gelu where that is wanted"
        )
    if given.get("moe_apply_probs_on_input") and config.experts and config.experts.moe_router_topk != 1:
        raise ConfigurationError(
            f"--moe-apply-probs-on-input needs --moe-router-topk 1, got {config.experts.moe_router_topk}: drop it"
        )
    for module in given.get("recompute_modules", ()):
        if module in MODULES_OF_ENGINE and not _has_engine(config):
            raise ConfigurationError(
                f"--recompute-modules {module} needs --transformer-impl transformer_engine: use core_attn, mlp or moe"
            )
    if given.get("tp_comm_overlap") and (config.training.rl_use_sequence_packing or not config.compute.bf16):
        raise ConfigurationError(
            "--tp-comm-overlap has bfloat16 buffers of micro-batch-size · seq-length tokens: give --bf16, and drop "
            "--rl-use-sequence-packing, or drop it"
        )
    if given.get("fp8") and given.get("fp8_recipe", "delayed") == "delayed":
        raise ConfigurationError(
            f"--fp8-format {given['fp8']} with --fp8-recipe delayed takes its scales from earlier passes: π_old and "
            "π_θ would differ by noise; use --fp8-recipe tensorwise, blockwise or mxfp8"
        )


def _check_half(config: RunConfig) -> None:
    """float16, and the scale of its loss: Megatron starts at 2^32 and halves it until no gradient is out of range."""
    if config.compute.fp16 and config.compute.bf16:
        raise ConfigurationError("--fp16 and --bf16 are two types of the same weights: drop one of them")
    if config.compute.fp16 and config.experts is not None:
        raise ConfigurationError(
            "--fp16 with --num-experts: Megatron-Core scales the loss once, and lowers the scales of experts and of "
            "the other weights apart; use --bf16"
        )
    lowest, first = (_value(config, name) for name in ("min_loss_scale", "initial_loss_scale"))
    if lowest > first:
        raise ConfigurationError(f"--min-loss-scale {lowest} is above --initial-loss-scale {first}")


def _build(config: RunConfig, flags: list[str]) -> None:
    """Let Megatron look at what was given. Its configs are built again where the model is."""
    allowed = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    try:
        for build in (build_transformer_config, build_ddp_config, build_optimizer_config):
            build(config)
    except (AssertionError, ImportError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigurationError(f"Megatron-Core refuses {', '.join(flags)}: {reason}") from error
    finally:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = allowed
