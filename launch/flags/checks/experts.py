"""Checks of a mixture of experts."""

from __future__ import annotations

import torch

from megatron_rc.launch.errors import ConfigurationError, has_module, refuse_or_note, require, require_multiple
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.megatron import ExpertSection

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


def check_experts(config: RunConfig) -> None:
    """Check the experts' split over the ranks, their layers, their losses, and the replay of routers."""
    experts = config.experts
    if experts is None:
        return
    _check_split(config, experts)
    layers = config.layers_with_experts
    if len(layers) != config.transformer.num_layers:
        raise ConfigurationError(
            f"{config.typed('moe_layer_freq')} is of {len(layers)} layers, but --num-layers is "
            f"{config.transformer.num_layers}"
        )
    if not any(layers):
        raise ConfigurationError(f"{config.typed('moe_layer_freq')} has no layer with experts: drop it")
    _check_auxiliary_losses(config, experts)
    if not config.launch.on_cpu:
        # On a GPU Megatron's router multiplies with Transformer Engine's products.
        require("transformer_engine", f"--num-experts {experts.num_moe_experts} on a GPU", "gpu")
    if config.compute.fp16:
        raise ConfigurationError(
            "--fp16 with --num-experts: Megatron-Core lowers the loss scales of experts and of other weights apart, "
            "but scales the loss once; use --bf16"
        )
    _check_dispatcher(config, experts)
    if config.routing is not None:
        _check_replay(config)


def _check_split(config: RunConfig, experts: ExpertSection) -> None:
    parallel = config.parallel
    etp = config.expert_tensor_parallel_size
    ep = parallel.expert_model_parallel_size
    tp = parallel.tensor_model_parallel_size
    width = (
        "expert_tensor_parallel_size" if config.megatron.expert_tensor_parallel_size else "tensor_model_parallel_size"
    )
    require_multiple("num_experts", experts.num_moe_experts, "expert_model_parallel_size", ep)
    require_multiple("moe_ffn_hidden_size", experts.moe_ffn_hidden_size, width, etp)
    shared = experts.moe_shared_expert_intermediate_size or 0
    require_multiple("moe_shared_expert_intermediate_size", shared, "tensor_model_parallel_size", tp)
    ranks = config.data_parallel_size * parallel.context_parallel_size * tp
    if ranks % (ep * etp):
        raise ConfigurationError(
            f"{config.typed('expert_model_parallel_size')} · {config.typed(width)} must divide the {ranks} tensor · "
            "data · context parallel ranks of each stage"
        )
    if tp > 1 and not parallel.sequence_parallel:
        raise ConfigurationError(
            f"{config.typed('num_experts', 'tensor_model_parallel_size')} needs --sequence-parallel: Megatron does not "
            "train experts without it"
        )
    if etp > 1 and config.transformer.add_bias_linear:
        raise ConfigurationError(
            f"{config.typed('num_experts', width)} needs experts without biases: Megatron would add the bias on each "
            "rank of an expert; give --expert-tensor-parallel-size 1, or --disable-bias-linear"
        )


def _check_auxiliary_losses(config: RunConfig, experts: ExpertSection) -> None:
    """Check the losses that Megatron adds to the gradients, and divides in its own way with a per-token loss."""
    shards = config.parallel.context_parallel_size * config.parallel.tensor_model_parallel_size
    if experts.moe_router_load_balancing_type == "seq_aux_loss" and config.training.rl_use_sequence_packing:
        raise ConfigurationError(
            "--moe-router-load-balancing-type seq_aux_loss with --rl-use-sequence-packing would take a packed "
            "micro-batch for one sequence: use aux_loss, or drop the packing"
        )
    if not (config.compute.calculate_per_token_loss and config.has_auxiliary_losses):
        return
    if _has_uneven_ranks(config):
        raise ConfigurationError(
            "--calculate-per-token-loss weighs auxiliary losses by the tokens of each data-parallel rank, which "
            "--rl-use-sequence-packing makes unequal: drop it, the other gradients are the same"
        )
    if shards > 1 and weakens_auxiliary_losses():
        raise ConfigurationError(
            f"--calculate-per-token-loss divides auxiliary losses by {shards}, the tensor · context parallel ranks, in "
            "megatron-core before 0.19: drop it, the other gradients are the same"
        )


def _check_dispatcher(config: RunConfig, experts: ExpertSection) -> None:
    kind = experts.moe_token_dispatcher_type
    if kind == "allgather" and config.parallel.expert_model_parallel_size > 1 and _has_uneven_ranks(config):
        raise ConfigurationError(
            "--moe-token-dispatcher-type allgather needs equally many tokens on all data-parallel ranks, which "
            "--rl-use-sequence-packing does not give: use alltoall"
        )
    if kind == "flex" and config.launch.on_cpu:
        raise ConfigurationError("--moe-token-dispatcher-type flex needs a CUDA device: use alltoall on the CPU")
    if kind == "flex" and not has_module("deep_ep"):
        missing = "--moe-token-dispatcher-type flex needs deep_ep, which is not installed"
        refuse_or_note("deep_ep", f"{missing}: install DeepEP, or use alltoall")


def _check_replay(config: RunConfig) -> None:
    """Check that the router of the trainer can choose what the engine's or the forward-only pass's chose."""
    fields = config.megatron.given
    replay = "--moe-enable-routing-replay"
    if fields.get("moe_router_fusion"):
        raise ConfigurationError(
            f"{replay} with --moe-router-fusion: the fused router chooses by itself; drop one of them"
        )
    if not config.replays_rollouts and config.correction.corrects_in_loss:
        mode = "--bypass-mode" if config.correction.bypass_mode else "--proximal-interpolation"
        raise ConfigurationError(
            f"{config.typed('moe_routing_replay_source')} replays a forward-only pass, which {mode} does not make: use "
            "rollout"
        )
    router_dtype = _DTYPES.get(fields.get("moe_router_dtype", ""), config.dtype)
    if router_dtype is torch.float64:
        raise ConfigurationError(
            f"{replay} with --moe-router-dtype fp64: no engine's router has float64; drop one of them"
        )
    # Records do not name their engine's dtype.
    if not config.replays_rollouts or config.rollouts.load_rollouts:
        return
    of_engine = _router_dtype_of_engine(config)
    # A float32 trainer is not asked: another dtype of the whole model differs in more than its routers.
    if config.dtype is not torch.float32 and of_engine is not router_dtype:
        is_finer = of_engine is torch.float32
        remedy = "give --moe-router-dtype fp32" if is_finer else "drop --moe-router-dtype, or use --rollout-dtype fp32"
        raise ConfigurationError(
            f"{replay}: the engine's router computes in {of_engine}, the trainer's in {router_dtype}; {remedy}"
        )
    if config.engine.rollout_engine == "vllm" and config.launch.on_cpu:
        raise ConfigurationError(
            f"{replay} needs a GPU with --rollout-engine vllm, which reports its experts there alone: use "
            "--rollout-engine transformers, or --moe-routing-replay-source old"
        )


def _router_dtype_of_engine(config: RunConfig) -> torch.dtype:
    """Return the dtype of the engine's router logits, as vLLM and transformers have it; taken for SGLang's too.

    They compute sigmoid routers (DeepSeek-V3, GLM-4.5) in float32, softmax routers (Qwen, Mixtral) in the model's
    dtype. transformers computes in float32 on a CPU.
    """
    engine = config.engine
    has_sigmoid = config.experts is not None and config.experts.moe_router_score_function == "sigmoid"
    on_cpu = engine.rollout_engine == "transformers" and config.launch.on_cpu
    is_float32 = has_sigmoid or on_cpu or engine.rollout_dtype == "fp32"
    return torch.float32 if is_float32 else torch.bfloat16


def _has_uneven_ranks(config: RunConfig) -> bool:
    return config.training.rl_use_sequence_packing and config.data_parallel_size > 1


def weakens_auxiliary_losses() -> bool:
    """Return whether Megatron's router scales auxiliary losses by its own share of the tokens of a per-token loss."""
    from megatron.core.package_info import MAJOR, MINOR

    return bool((MAJOR, MINOR) < (0, 19))
