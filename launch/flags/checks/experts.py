"""Checks of a mixture of experts."""

from __future__ import annotations

from megatron_rc.launch.errors import ConfigurationError, refuse_or_note, require, require_multiple
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.megatron import ExpertSection
from megatron_rc.launch.run_config.megatron_configs import has_module


def check_experts(config: RunConfig) -> None:
    """Check the experts' split over the ranks, their router, and its auxiliary losses."""
    experts, ep = config.experts, config.parallel.expert_model_parallel_size
    if experts is None:
        sizes = {"expert-model": ep, "expert-tensor": config.megatron.expert_tensor_parallel_size or 1}
        for name, size in sizes.items():
            if size != 1:
                raise ConfigurationError(f"--{name}-parallel-size {size} does nothing without --num-experts: drop it")
        return
    _check_parallelism(config, experts)
    check_expert_layers(config, experts)
    _check_router(experts)
    _check_auxiliary_losses(config, experts)
    if not config.launch.on_cpu:
        # On a GPU Megatron's router multiplies with Transformer Engine's products.
        require("transformer_engine", f"--num-experts {experts.num_moe_experts} on a GPU", "gpu")
    _check_dispatcher(config, experts)


def _check_parallelism(config: RunConfig, experts: ExpertSection) -> None:
    """Check that every expert splits over the TP ranks, and the experts over data and CP ranks."""
    parallel, number = config.parallel, experts.num_moe_experts
    ep, tp = parallel.expert_model_parallel_size, parallel.tensor_model_parallel_size
    etp = config.megatron.expert_tensor_parallel_size
    require_multiple("num_experts", number, "expert_model_parallel_size", ep)
    width = "tensor_model_parallel_size" if etp is None else "expert_tensor_parallel_size"
    require_multiple("moe_ffn_hidden_size", experts.moe_ffn_hidden_size, width, tp if etp is None else max(etp, 1))
    ranks = config.data_parallel_size * parallel.context_parallel_size
    if etp is None and ranks % ep:
        raise ConfigurationError(
            f"--expert-model-parallel-size {ep} must divide the {ranks} data · context parallel ranks of each stage"
        )
    if etp is not None and (etp < 1 or ranks * tp % (ep * etp)):
        raise ConfigurationError(
            f"--expert-tensor-parallel-size {etp} · --expert-model-parallel-size {ep} must divide the {ranks * tp} "
            "tensor · data · context parallel ranks of each stage"
        )
    needed = {
        "--sequence-parallel": parallel.sequence_parallel,
        "--disable-bias-linear": not config.transformer.add_bias_linear,
    }
    for name, is_given in needed.items():
        if tp > 1 and not is_given:
            raise ConfigurationError(
                f"--num-experts {number} with --tensor-model-parallel-size {tp} needs {name}: Megatron does not train "
                "experts without it"
            )


def check_expert_layers(config: RunConfig, experts: ExpertSection) -> None:
    """Check the layers that have experts, and the width of the shared experts."""
    layers, number = config.layers_with_experts, config.transformer.num_layers
    if len(layers) != number:
        raise ConfigurationError(
            f"--moe-layer-freq {experts.moe_layer_freq} is of {len(layers)} layers, but --num-layers is {number}"
        )
    if not any(layers):
        raise ConfigurationError(f"--moe-layer-freq {experts.moe_layer_freq} has no layer with experts: drop it")
    shared, tp = experts.moe_shared_expert_intermediate_size, config.parallel.tensor_model_parallel_size
    if shared is not None:
        require_multiple("moe_shared_expert_intermediate_size", shared, "tensor_model_parallel_size", tp)


def _check_router(experts: ExpertSection) -> None:
    """Check how many experts a token gets, from which groups, and that their bias stays as it was loaded."""
    topk, number = experts.moe_router_topk, experts.num_moe_experts
    fewest = 1 if experts.moe_router_pre_softmax or experts.moe_router_score_function == "sigmoid" else 2
    if not fewest <= topk <= number:
        reason = "" if fewest == 1 else ": the weight of a single expert is always 1"
        raise ConfigurationError(f"--moe-router-topk {topk} must lie in [{fewest}, {number}]{reason}")
    groups, chosen = experts.moe_router_num_groups, experts.moe_router_group_topk
    if groups is not None and chosen is not None:
        require_multiple("num_experts", number, "moe_router_num_groups", groups)
        require_multiple("moe_router_topk", topk, "moe_router_group_topk", chosen)
        if chosen > groups or topk // chosen > number // groups:
            raise ConfigurationError(
                f"--moe-router-group-topk {chosen} of --moe-router-num-groups {groups} cannot give --moe-router-topk "
                f"{topk} of --num-experts {number}: choose from more groups, or make fewer"
            )
    if experts.moe_router_bias_update_rate:
        raise ConfigurationError(
            f"--moe-router-bias-update-rate {experts.moe_router_bias_update_rate} must be 0: it would move the policy "
            "outside of the optimizer, in skipped steps too"
        )


def _check_auxiliary_losses(config: RunConfig, experts: ExpertSection) -> None:
    """Check the losses that Megatron adds to the gradients, and divides in its own way with a per-token loss."""
    balancing = experts.moe_router_load_balancing_type
    if balancing == "none" and experts.moe_aux_loss_coeff:
        raise ConfigurationError(
            f"--moe-aux-loss-coeff {experts.moe_aux_loss_coeff} does nothing with --moe-router-load-balancing-type "
            "none: use aux_loss, or drop it"
        )
    if balancing == "seq_aux_loss" and config.training.rl_use_sequence_packing:
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
    shards = config.parallel.context_parallel_size * config.parallel.tensor_model_parallel_size
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
    if kind != "flex":
        return
    if config.launch.on_cpu:
        raise ConfigurationError("--moe-token-dispatcher-type flex needs a CUDA device: use alltoall on the CPU")
    if not has_module("deep_ep"):
        words = (
            "--moe-token-dispatcher-type flex needs deep_ep, which is not installed: install DeepEP, or use alltoall"
        )
        refuse_or_note("deep_ep", words)


def _has_uneven_ranks(config: RunConfig) -> bool:
    return config.training.rl_use_sequence_packing and config.data_parallel_size > 1


def weakens_auxiliary_losses() -> bool:
    """Whether Megatron's router scales auxiliary losses by its own share of the tokens of a per-token loss."""
    from megatron.core.package_info import MAJOR, MINOR

    return bool((MAJOR, MINOR) < (0, 19))
