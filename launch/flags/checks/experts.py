"""Checks of a mixture of experts."""

from __future__ import annotations

import torch

from megatron_rc.launch.errors import has_module, refuse_or_note, require, require_multiple
from megatron_rc.launch.flags.checks.refuse import refuse
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.megatron import ExpertSection


def check_experts(config: RunConfig) -> None:
    """Check the experts' split over the ranks, their router, and its auxiliary losses."""
    experts, etp = config.experts, config.megatron.expert_tensor_parallel_size
    if experts is None:
        splits = config.parallel.expert_model_parallel_size != 1
        wrong = {
            "{expert_model_parallel_size} does nothing without --num-experts: drop it": splits,
            "{expert_tensor_parallel_size} does nothing without --num-experts: drop it": (etp or 1) != 1,
        }
        refuse(config, wrong)
        return
    _check_parallelism(config, experts)
    check_expert_layers(config, experts)
    _check_router(config, experts)
    _check_auxiliary_losses(config, experts)
    if not config.launch.on_cpu:
        # On a GPU Megatron's router multiplies with Transformer Engine's products.
        require("transformer_engine", f"--num-experts {experts.num_moe_experts} on a GPU", "gpu")
    _check_dispatcher(config, experts)
    if config.routing is not None:
        _check_replay(config)


def _check_parallelism(config: RunConfig, experts: ExpertSection) -> None:
    parallel, etp = config.parallel, config.expert_tensor_parallel_size
    ep, tp = parallel.expert_model_parallel_size, parallel.tensor_model_parallel_size
    require_multiple("num_experts", experts.num_moe_experts, "expert_model_parallel_size", ep)
    width = f"{'expert_tensor' if config.megatron.expert_tensor_parallel_size else 'tensor_model'}_parallel_size"
    require_multiple("moe_ffn_hidden_size", experts.moe_ffn_hidden_size, width, etp)
    ranks = config.data_parallel_size * parallel.context_parallel_size * tp
    needs = "{num_experts} with {tensor_model_parallel_size} needs %s: Megatron does not train experts without it"
    product = f"{{expert_model_parallel_size}} · {{{width}}}"
    wrong = {
        product + " must divide the {ranks} tensor · data · context parallel ranks of each stage": ranks % (ep * etp),
        needs % "--sequence-parallel": tp > 1 and not parallel.sequence_parallel,
        needs % "--disable-bias-linear": tp > 1 and config.transformer.add_bias_linear,
    }
    refuse(config, wrong, ranks=ranks)


def check_expert_layers(config: RunConfig, experts: ExpertSection) -> None:
    """Check the layers that have experts, and the width of the shared experts."""
    layers, number = config.layers_with_experts, config.transformer.num_layers
    wrong = {
        "{moe_layer_freq} is of {layers} layers, but --num-layers is {number}": len(layers) != number,
        "{moe_layer_freq} has no layer with experts: drop it": not any(layers),
    }
    refuse(config, wrong, layers=len(layers), number=number)
    shared, tp = experts.moe_shared_expert_intermediate_size, config.parallel.tensor_model_parallel_size
    require_multiple("moe_shared_expert_intermediate_size", shared or 0, "tensor_model_parallel_size", tp)


def _check_router(config: RunConfig, experts: ExpertSection) -> None:
    topk, number = experts.moe_router_topk, experts.num_moe_experts
    fewest = 1 if experts.moe_router_pre_softmax or experts.moe_router_score_function == "sigmoid" else 2
    reason = "" if fewest == 1 else ": the weight of a single expert is always 1"
    wrong = {
        "{moe_router_topk} must lie in [{fewest}, {number}]{reason}": not fewest <= topk <= number,
        "{moe_router_bias_update_rate} must be 0: it would move the policy outside of the optimizer, in skipped steps "
        "too": experts.moe_router_bias_update_rate,
    }
    refuse(config, wrong, fewest=fewest, number=number, reason=reason)
    groups, chosen = experts.moe_router_num_groups, experts.moe_router_group_topk
    if groups is not None and chosen is not None:
        require_multiple("num_experts", number, "moe_router_num_groups", groups)
        require_multiple("moe_router_topk", topk, "moe_router_group_topk", chosen)
        wrong = {
            "{moe_router_group_topk} of {moe_router_num_groups} cannot give {moe_router_topk} of {num_experts}: choose "
            "from more groups, or make fewer": chosen > groups or topk // chosen > number // groups
        }
        refuse(config, wrong)


def _check_auxiliary_losses(config: RunConfig, experts: ExpertSection) -> None:
    """Check the losses that Megatron adds to the gradients, and divides in its own way with a per-token loss."""
    balancing, packs = experts.moe_router_load_balancing_type, config.training.rl_use_sequence_packing
    shards = config.parallel.context_parallel_size * config.parallel.tensor_model_parallel_size
    weighs = config.compute.calculate_per_token_loss and config.has_auxiliary_losses
    wrong = {
        "{moe_router_load_balancing_type} with {rl_use_sequence_packing} would take a packed micro-batch for one "
        "sequence: use aux_loss, or drop the packing": balancing == "seq_aux_loss" and packs,
        "{calculate_per_token_loss} weighs auxiliary losses by the tokens of each data-parallel rank, which "
        "--rl-use-sequence-packing makes unequal: drop it, the other gradients are the same": (
            weighs and _has_uneven_ranks(config)
        ),
        "{calculate_per_token_loss} divides auxiliary losses by {shards}, the tensor · context parallel ranks, in "
        "megatron-core before 0.19: drop it, the other gradients are the same": (
            weighs and shards > 1 and weakens_auxiliary_losses()
        ),
    }
    refuse(config, wrong, shards=shards)


def _check_dispatcher(config: RunConfig, experts: ExpertSection) -> None:
    kind, ep = experts.moe_token_dispatcher_type, config.parallel.expert_model_parallel_size
    wrong = {
        "{moe_token_dispatcher_type} needs equally many tokens on all data-parallel ranks, which "
        "--rl-use-sequence-packing does not give: use alltoall": (
            kind == "allgather" and ep > 1 and _has_uneven_ranks(config)
        ),
        "{moe_token_dispatcher_type} needs a CUDA device: use alltoall on the CPU": (
            kind == "flex" and config.launch.on_cpu
        ),
    }
    refuse(config, wrong)
    if kind == "flex" and not has_module("deep_ep"):
        needs = "--moe-token-dispatcher-type flex needs deep_ep, which is not installed"
        refuse_or_note("deep_ep", f"{needs}: install DeepEP, or use alltoall")


def _check_replay(config: RunConfig) -> None:
    of_engine, of_trainer = _router_dtype_of_engine(config), config.dtype
    if config.megatron.given.get("moe_router_dtype") == "fp32":
        of_trainer = torch.float32
    # A float32 trainer is not asked: another dtype of the whole model differs in more than its routers. Nor are
    # records, which do not name their engine's dtype.
    asked = config.replays_rollouts and config.dtype is not torch.float32 and not config.rollouts.load_rollouts
    differs = asked and of_engine is not of_trainer
    mode = "--bypass-mode" if config.correction.bypass_mode else "--proximal-interpolation"
    is_from_engine = config.replays_rollouts and not config.rollouts.load_rollouts
    wrong = {
        "{moe_enable_routing_replay} with {moe_router_fusion}: the fused router chooses by itself; drop one of them": (
            config.megatron.given.get("moe_router_fusion")
        ),
        "{moe_enable_routing_replay} with {moe_router_dtype}: no engine's router has float64; drop one of them": (
            config.megatron.given.get("moe_router_dtype") == "fp64"
        ),
        "{moe_enable_routing_replay} with {moe_router_dtype}: the engine's router computes in {of_engine}; drop "
        "--moe-router-dtype, or use --rollout-dtype fp32": differs and of_trainer is torch.float32,
        "{moe_enable_routing_replay}: the engine's router computes in {of_engine}, the trainer's in {of_trainer}; add "
        "--moe-router-dtype fp32": differs and of_engine is torch.float32,
        "{moe_routing_replay_source} replays a forward-only pass, which {mode} does not make: use rollout": (
            not config.replays_rollouts and config.correction.corrects_in_loss
        ),
        "{moe_enable_routing_replay} needs a GPU with {rollout_engine}, which reports its experts there alone: use "
        "--rollout-engine transformers, or --moe-routing-replay-source old": (
            is_from_engine and config.engine.rollout_engine == "vllm" and config.launch.on_cpu
        ),
    }
    refuse(config, wrong, mode=mode, of_engine=of_engine, of_trainer=of_trainer)


def _router_dtype_of_engine(config: RunConfig) -> torch.dtype:
    """Dtype of the engine's router logits, as vLLM and transformers have it; taken for SGLang's too.

    They compute sigmoid routers (DeepSeek-V3, GLM-4.5) in float32, softmax routers (Qwen, Mixtral) in the model's
    dtype. transformers computes in float32 on a CPU.
    """
    engine, scores = config.engine, config.experts and config.experts.moe_router_score_function
    on_cpu = engine.rollout_engine == "transformers" and config.launch.on_cpu
    return torch.float32 if scores == "sigmoid" or engine.rollout_dtype == "fp32" or on_cpu else torch.bfloat16


def _has_uneven_ranks(config: RunConfig) -> bool:
    return config.training.rl_use_sequence_packing and config.data_parallel_size > 1


def weakens_auxiliary_losses() -> bool:
    """Whether Megatron's router scales auxiliary losses by its own share of the tokens of a per-token loss."""
    from megatron.core.package_info import MAJOR, MINOR

    return bool((MAJOR, MINOR) < (0, 19))
