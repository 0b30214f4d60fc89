"""Megatron's own flags that cannot work here; all others pass through unchanged.

Refused are flags that make π_old and π_θ differ, that break the contract of a step (who sums, who divides, which
schedule runs), or that engines cannot follow. Megatron's own errors become one sentence with the given flags.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron_rc.launch.errors import ConfigurationError, has_module, one_line
from megatron_rc.launch.run_config import RunConfig, passed_through
from megatron_rc.launch.run_config.megatron_configs import (
    build_ddp_config,
    build_optimizer_config,
    build_transformer_config,
)
from megatron_rc.launch.run_config.megatron_fields import MegatronField

# Fields that must keep Megatron's default, by the reason.
REFUSED = {
    "makes the router random, so that π_old and π_θ differ by noise": (
        "moe_input_jitter_eps moe_router_force_load_balancing moe_router_force_biased"
    ),
    "routes tokens by the rest of their micro-batch, which no engine does": (
        "moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_expert_rank_capacity_factor moe_paged_stash"
    ),
    "adds layers that only a loss of further tokens trains": "mtp_num_layers",
    "keeps the weights in numbers that engines cannot read": "fp8_param fp4_param",
    "needs Megatron-FSDP, which runs on CUDA streams alone, so that no test here can prove it; use "
    "--use-distributed-optimizer": "use_megatron_fsdp use_custom_fsdp init_model_with_meta_device",
    "splits the optimizer's work in a way that is not supported here": (
        "num_distributed_optimizer_instances use_layer_wise_distributed_optimizer "
        "overlap_param_gather_with_optimizer_step"
    ),
    "skips optimizer steps without telling the trainer; use --bad-steps skip": "grad_norm_skip_threshold",
    "needs a schedule that is not used here": (
        "overlap_moe_expert_parallel_comm delay_wgrad_compute microbatch_group_size_per_vp_stage"
    ),
    "deals micro-batches to context-parallel groups of their own, and the launcher's batches have one group; use "
    "--context-parallel-size": "hybrid_context_parallel",
    "counts the embedding or the loss as a layer of its stage; use --pipeline-model-parallel-layout": (
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split"
    ),
    "captures CUDA graphs, but passes have other shapes for training and for log-probs": (
        "enable_cuda_graph external_cuda_graph cuda_graph_impl optimizer_cuda_graph"
    ),
    "is of Mamba layers, which are not trained here": (
        "mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path"
    ),
    "makes another kind of model than a GPT with full attention": "experimental_attention_variant use_mup",
}
_REASONS = {name: reason for reason, names in REFUSED.items() for name in names.split()}
# Fields that change the function of the model, and that no Hugging Face architecture here has.
FIELDS_OF_THE_MODEL = frozenset(
    "attention_output_gate layernorm_zero_centered_gamma moe_apply_probs_on_input moe_latent_size qk_l2_norm".split()
)
# Fields that fail without Transformer Engine's layers, and fields that fail on the CPU, when the model is built or run.
_NEEDS_TRANSFORMER_ENGINE = ("fp8", "fp4", "tp_comm_overlap", "use_te_activation_func")
_OF_GPUS = ("gradient_accumulation_fusion", "nccl_ub", "optimizer_cpu_offload", "use_precision_aware_optimizer")
# Values of --recompute-modules that only Transformer Engine's layers have.
MODULES_OF_TRANSFORMER_ENGINE = ("layernorm", "moe_act", "mla_up_proj")


def check_megatron(config: RunConfig) -> None:
    """Refuse fields that contradict others or cannot be used here, and let Megatron build its configs with the rest."""
    fields = config.megatron.given
    _check_contradictions(config)
    for field, value in _chosen(config):
        if field.name in _REASONS:
            raise ConfigurationError(f"{field.as_flag(value)} cannot be used here: it {_REASONS[field.name]}")
    _check_passes(config)
    _check_requirements(config)
    # Without Transformer Engine installed, Megatron would refuse settings for machines that have it.
    if fields and (has_module("transformer_engine") or not _uses_transformer_engine(config)):
        _build(config)


def _check_contradictions(config: RunConfig) -> None:
    """Refuse fields that change or exclude what other flags ask for."""
    fields = config.megatron.given
    if fields.get("bias_activation_fusion") and not config.transformer.gated_linear_unit:
        raise ConfigurationError(
            "--bias-activation-fusion without --swiglu replaces GELU by its tanh approximation: drop it, or give "
            "--openai-gelu instead"
        )
    if fields.get("optimizer_cpu_offload"):
        if config.training.optimizer_offload:
            raise ConfigurationError("--optimizer-cpu-offload does not go with --optimizer-offload: drop one of them")
        if config.critic is not None and config.critic.critic_offload:
            raise ConfigurationError("--optimizer-cpu-offload does not go with --critic-offload: drop one of them")


def model_flags(config: RunConfig) -> list[str]:
    """Return given flags that make the model a function that no Hugging Face architecture here has."""
    return [field.as_flag(value) for field, value in _chosen(config) if field.name in FIELDS_OF_THE_MODEL]


def _chosen(config: RunConfig) -> Iterator[tuple[MegatronField, Any]]:
    """Yield the given fields whose value is not the default."""
    for name, value in config.megatron.given.items():
        field = passed_through()[name]
        if value != field.default:
            yield field, value


def _uses_transformer_engine(config: RunConfig) -> bool:
    return config.model.transformer_impl == "transformer_engine"


def _check_passes(config: RunConfig) -> None:
    """Refuse what makes π_old and π_θ differ, or begins with undefined weights."""
    fields = config.megatron.given
    if fields.get("fp8") and fields.get("fp8_recipe", "delayed") == "delayed":
        raise ConfigurationError(
            f"{config.typed('fp8')} with --fp8-recipe delayed takes its scales from earlier passes, so that π_old and "
            "π_θ differ by noise: use --fp8-recipe tensorwise, blockwise or mxfp8"
        )
    is_loaded = config.checkpoints.load or config.checkpoints.load_hf
    if fields.get("perform_initialization") is False and not is_loaded:
        raise ConfigurationError("--no-initialization without --load or --load-hf leaves weights undefined: drop it")


def _check_requirements(config: RunConfig) -> None:
    """Refuse given fields whose requirements other flags do not meet."""
    fields = config.megatron.given
    training = config.training
    if not _uses_transformer_engine(config):
        needing_it = [config.typed(name) for name in _NEEDS_TRANSFORMER_ENGINE if fields.get(name)]
        modules = [module for module in fields.get("recompute_modules", ()) if module in MODULES_OF_TRANSFORMER_ENGINE]
        needing_it += [f"--recompute-modules {module}" for module in modules]
        if needing_it:
            raise ConfigurationError(
                f"{needing_it[0]} needs --transformer-impl transformer_engine: use it, or drop the flag"
            )
    is_selective = config.compute.recompute_granularity == "selective"
    if is_selective and "mlp" in fields.get("recompute_modules", ()) and config.transformer.add_bias_linear:
        # Megatron hands the bias out of the recomputed part, and the backward then calls itself until memory is full.
        raise ConfigurationError(
            "--recompute-modules mlp needs --disable-bias-linear: Megatron's backward would never end; drop mlp"
        )
    for name in _OF_GPUS:
        if fields.get(name) and config.launch.on_cpu:
            raise ConfigurationError(f"{config.typed(name)} needs a GPU: drop it")
    has_equal_batches = not training.rl_use_sequence_packing
    is_split_bf16 = config.parallel.sequence_parallel and config.compute.bf16
    if fields.get("tp_comm_overlap") and not (is_split_bf16 and has_equal_batches):
        raise ConfigurationError(
            "--tp-comm-overlap has bfloat16 buffers for micro-batches of one length, split over the TP ranks: give "
            "--sequence-parallel and --bf16 without --rl-use-sequence-packing, or drop it"
        )
    if fields.get("defer_embedding_wgrad_compute") and training.fused_linear_log_probs:
        raise ConfigurationError(
            "--defer-embedding-wgrad-compute waits for the output layer, which --fused-linear-log-probs does not run: "
            "drop one of them"
        )
    if fields.get("overlap_param_gather") and not config.optimizer.use_distributed_optimizer:
        raise ConfigurationError("--overlap-param-gather needs --use-distributed-optimizer: give both, or neither")


def _build(config: RunConfig) -> None:
    """Let Megatron check the given fields; its configs are built again with the model."""
    flags = ", ".join(config.typed(name) for name in config.megatron.given)
    allowed = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    try:
        for build in (build_transformer_config, build_ddp_config, build_optimizer_config):
            build(config)
    except (AssertionError, ImportError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigurationError(f"Megatron-Core refuses {flags}: {one_line(error)}") from error
    finally:
        # A field of Megatron's config sets this switch of the process.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = allowed
