"""A mixture of experts, where there is one."""

from __future__ import annotations

from megatron_rc.launch.errors import ConfigurationError, refuse_or_note, require, require_multiple
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.megatron import ExpertSection
from megatron_rc.launch.run_config.megatron_configs import has_module


def check_experts(config: RunConfig) -> None:
    """The experts' split, their router, and its auxiliary losses."""
    experts, ep = config.experts, config.parallel.expert_model_parallel_size
    if experts is None:
        if ep != 1:
            raise ConfigurationError(
                f"--expert-model-parallel-size {ep} does nothing without --num-experts: give both, or neither"
            )
        return
    _check_parallelism(config, experts)
    check_expert_layers(config, experts)
    _check_router(experts)
    _check_choice(experts)
    _check_auxiliary_losses(config)
    if not config.launch.on_cpu:
        # On a GPU Megatron's router multiplies with Transformer Engine's products.
        require("transformer_engine", f"--num-experts {experts.num_moe_experts} on a GPU", "gpu")
    if experts.moe_token_dispatcher_type == "flex":
        _check_flex(config)


def _check_parallelism(config: RunConfig, experts: ExpertSection) -> None:
    """Megatron splits every expert over the TP ranks, and spreads the experts over data and CP ranks."""
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
    if tp > 1 and not parallel.sequence_parallel:
        raise ConfigurationError(
            f"--num-experts {number} with --tensor-model-parallel-size {tp} needs --sequence-parallel: Megatron does "
            "not train experts without it"
        )
    if tp > 1 and config.transformer.add_bias_linear:
        raise ConfigurationError(
            f"--num-experts {number} with --tensor-model-parallel-size {tp} needs --disable-bias-linear: Megatron has "
            "no bias in experts that are split"
        )
    if experts.moe_token_dispatcher_type == "allgather" and ep > 1 and _has_uneven_ranks(config):
        raise ConfigurationError(
            "--moe-token-dispatcher-type allgather needs equally many tokens on all data-parallel ranks, which "
            "--rl-use-sequence-packing does not give: use alltoall"
        )


def _check_flex(config: RunConfig) -> None:
    if config.launch.on_cpu:
        raise ConfigurationError("--moe-token-dispatcher-type flex needs a CUDA device: use alltoall on the CPU")
    if not has_module("deep_ep"):
        refuse_or_note(
            "deep_ep",
            "--moe-token-dispatcher-type flex needs deep_ep, which is not installed: see DeepEP's pages, or use "
            "alltoall",
        )


def check_expert_layers(config: RunConfig, experts: ExpertSection) -> None:
    """Which layers have experts, and the width of those that every token passes.

    Raises:
        ConfigurationError: another number of layers than the model has, or none with experts, or a width to be split
            that does not.
    """
    layers, number = config.layers_with_experts, config.transformer.num_layers
    if len(layers) != number:
        raise ConfigurationError(
            f"--moe-layer-freq {experts.moe_layer_freq} is of {len(layers)} layers, and --num-layers {number}: give as "
            "many"
        )
    if not any(layers):
        raise ConfigurationError(
            f"--moe-layer-freq {experts.moe_layer_freq} leaves no layer with experts: drop it with --num-experts"
        )
    shared = experts.moe_shared_expert_intermediate_size
    if shared is not None:
        tp = config.parallel.tensor_model_parallel_size
        require_multiple("moe_shared_expert_intermediate_size", shared, "tensor_model_parallel_size", tp)


def _check_choice(experts: ExpertSection) -> None:
    """How a token's experts are chosen beside their scores: from some groups of them, with a bias."""
    groups, chosen = experts.moe_router_num_groups, experts.moe_router_group_topk
    if (groups is None) != (chosen is None):
        name, value = ("num-groups", groups) if chosen is None else ("group-topk", chosen)
        raise ConfigurationError(
            f"--moe-router-{name} {value} does nothing alone: give --moe-router-num-groups and "
            "--moe-router-group-topk, or neither"
        )
    if groups is not None and chosen is not None:
        require_multiple("num_experts", experts.num_moe_experts, "moe_router_num_groups", groups)
        require_multiple("moe_router_topk", experts.moe_router_topk, "moe_router_group_topk", chosen)
        if chosen > groups or experts.moe_router_topk // chosen > experts.num_moe_experts // groups:
            raise ConfigurationError(
                f"--moe-router-group-topk {chosen} of --moe-router-num-groups {groups} cannot give "
                f"--moe-router-topk {experts.moe_router_topk} of --num-experts {experts.num_moe_experts}: choose from "
                "more groups, or make fewer"
            )
    _check_bias(experts)


def _check_bias(experts: ExpertSection) -> None:
    rate = experts.moe_router_bias_update_rate
    if rate and not experts.moe_router_enable_expert_bias:
        raise ConfigurationError(
            f"--moe-router-bias-update-rate {rate} does nothing without --moe-router-enable-expert-bias: drop it"
        )
    if rate:
        raise ConfigurationError(
            f"--moe-router-bias-update-rate {rate} would move the experts' bias outside of the optimizer, by steps "
            "that are left out too: give 0, and the bias stays as it was loaded"
        )
    if experts.moe_router_enable_expert_bias and experts.moe_router_score_function != "sigmoid":
        raise ConfigurationError(
            "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid, got "
            f"{experts.moe_router_score_function}: give it, or drop the bias"
        )


def _check_router(experts: ExpertSection) -> None:
    topk, number = experts.moe_router_topk, experts.num_moe_experts
    is_sigmoid = experts.moe_router_score_function == "sigmoid"
    if is_sigmoid and experts.moe_router_pre_softmax:
        raise ConfigurationError(
            "--moe-router-pre-softmax does nothing with --moe-router-score-function sigmoid: drop it"
        )
    fewest = 1 if experts.moe_router_pre_softmax or is_sigmoid else 2
    if not fewest <= topk <= number:
        reason = "" if fewest == 1 else "the weight of a single expert would always be 1, and "
        raise ConfigurationError(
            f"--moe-router-topk {topk} must lie in [{fewest}, {number}]: {reason}there are --num-experts {number}"
        )
    if experts.moe_router_load_balancing_type == "none" and experts.moe_aux_loss_coeff:
        raise ConfigurationError(
            f"--moe-aux-loss-coeff {experts.moe_aux_loss_coeff} does nothing with --moe-router-load-balancing-type "
            "none: use aux_loss, or drop it"
        )


def _check_auxiliary_losses(config: RunConfig) -> None:
    """They are added to the gradients, and Megatron divides those in its own way with a per-token loss."""
    balancing = config.experts.moe_router_load_balancing_type if config.experts else "none"
    if balancing == "seq_aux_loss" and config.training.rl_use_sequence_packing:
        raise ConfigurationError(
            "--moe-router-load-balancing-type seq_aux_loss with --rl-use-sequence-packing would take a packed "
            "micro-batch for one sequence: use aux_loss, or drop the packing"
        )
    if not (config.compute.calculate_per_token_loss and config.has_auxiliary_losses):
        return
    if _has_uneven_ranks(config):
        raise ConfigurationError(
            "--calculate-per-token-loss weighs the experts' auxiliary losses by the tokens of each data-parallel rank, "
            "which --rl-use-sequence-packing makes unequal: drop it, the gradients are otherwise the same"
        )
    shards = config.parallel.context_parallel_size * config.parallel.tensor_model_parallel_size
    if shards > 1 and weakens_auxiliary_losses():
        raise ConfigurationError(
            f"--calculate-per-token-loss divides the experts' auxiliary losses by {shards}, the tensor · context "
            "parallel ranks, in megatron-core before 0.19: drop it, the gradients are otherwise the same"
        )


def _has_uneven_ranks(config: RunConfig) -> bool:
    return config.training.rl_use_sequence_packing and config.data_parallel_size > 1


def weakens_auxiliary_losses() -> bool:
    """Whether Megatron's router scales them by its own share of the tokens where the gradients are divided by all."""
    from megatron.core.package_info import MAJOR, MINOR

    return bool((MAJOR, MINOR) < (0, 19))
