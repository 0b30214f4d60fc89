"""Which models and which splits of them work; see ``validation.py``."""

from __future__ import annotations

import argparse

from megatron_rc.launch.errors import ConfigurationError, flag, require, require_multiple


def check_parallelism(args: argparse.Namespace, world_size: int) -> None:
    """Tensor, pipeline and context parallelism; fills in ``data_parallel_size`` and the number of virtual stages."""
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    cp = args.context_parallel_size
    model = tp * pp * cp
    layout = f"--tensor-model-parallel-size {tp} · --pipeline-model-parallel-size {pp} · --context-parallel-size {cp}"
    if world_size < model:
        raise ConfigurationError(f"{layout} needs {model} processes, got {world_size}: start more, or split less")
    if world_size % model:
        raise ConfigurationError(f"{layout} = {model} does not divide {world_size} processes: start a multiple of it")
    args.data_parallel_size = world_size // model
    args.virtual_pipeline_model_parallel_size = None
    require_multiple(args, "num_layers", "pipeline_model_parallel_size")
    chunk = args.num_layers_per_virtual_pipeline_stage
    if chunk is not None:
        if pp == 1:
            raise ConfigurationError(
                f"--num-layers-per-virtual-pipeline-stage {chunk} needs --pipeline-model-parallel-size above 1"
            )
        require_multiple(args, "num_layers", "num_layers_per_virtual_pipeline_stage", factor=pp)
        chunks = args.num_layers // pp // chunk
        # One chunk a stage is the plain schedule.
        args.virtual_pipeline_model_parallel_size = chunks if chunks > 1 else None
    if args.sequence_parallel and tp == 1:
        raise ConfigurationError("--sequence-parallel needs --tensor-model-parallel-size above 1: drop it")
    if args.sequence_parallel and args.seq_length // cp % tp:
        raise ConfigurationError(
            f"--sequence-parallel: --seq-length {args.seq_length} / --context-parallel-size {cp} must be a multiple of "
            f"--tensor-model-parallel-size {tp}"
        )
    if cp > 1:
        require_multiple(args, "seq_length", "context_parallel_size", factor=2)
    if args.use_distributed_optimizer and args.optimizer != "adam":
        raise ConfigurationError(
            f"--use-distributed-optimizer works with --optimizer adam only, got {args.optimizer}: drop one of them"
        )


def check_model(args: argparse.Namespace) -> None:
    """The shape of the model, without its experts; fills in ``kv_channels``."""
    require_multiple(args, "num_attention_heads", "tensor_model_parallel_size")
    require_multiple(args, "num_query_groups", "tensor_model_parallel_size")
    require_multiple(args, "num_attention_heads", "num_query_groups")
    require_multiple(args, "ffn_hidden_size", "tensor_model_parallel_size")
    if args.kv_channels is None:
        require_multiple(args, "hidden_size", "num_attention_heads")
        args.kv_channels = args.hidden_size // args.num_attention_heads
    if args.position_embedding_type == "rope" and args.kv_channels % 2:
        raise ConfigurationError(f"rotary embeddings need an even head width, got {args.kv_channels}: --kv-channels")
    if args.seq_length > args.max_position_embeddings:
        raise ConfigurationError(
            f"--seq-length {args.seq_length} is longer than --max-position-embeddings {args.max_position_embeddings}"
        )
    if args.add_qkv_bias and not args.disable_bias_linear:
        raise ConfigurationError("--add-qkv-bias does nothing without --disable-bias-linear: all layers have a bias")
    for name in ("attention_dropout", "hidden_dropout"):
        if getattr(args, name) != 0:
            raise ConfigurationError(
                f"{flag(name)} {getattr(args, name)} must be 0: π_old and π_θ would differ by noise"
            )
    if args.recompute_granularity == "full" and not (args.recompute_method and args.recompute_num_layers):
        raise ConfigurationError("--recompute-granularity full needs --recompute-method and --recompute-num-layers")
    if args.recompute_granularity != "full" and (args.recompute_method or args.recompute_num_layers):
        raise ConfigurationError(
            "--recompute-method and --recompute-num-layers do nothing without --recompute-granularity full"
        )


def check_experts(args: argparse.Namespace) -> None:
    """A mixture of experts, where there is one."""
    if args.num_experts is None:
        return
    _check_expert_parallelism(args)
    _check_router(args)
    if not args.on_cpu:
        # Megatron's router multiplies with it.
        require("transformer_engine", f"--num-experts {args.num_experts} on a GPU", "gpu")


def _check_expert_parallelism(args: argparse.Namespace) -> None:
    """Megatron splits every expert over the TP ranks, and spreads the experts over data and CP ranks."""
    ep, tp, experts = args.expert_model_parallel_size, args.tensor_model_parallel_size, args.num_experts
    require_multiple(args, "num_experts", "expert_model_parallel_size")
    require_multiple(args, "moe_ffn_hidden_size", "tensor_model_parallel_size")
    ranks = args.data_parallel_size * args.context_parallel_size
    if ranks % ep:
        raise ConfigurationError(
            f"--expert-model-parallel-size {ep} must divide the {ranks} data · context parallel ranks of each stage"
        )
    if tp > 1 and not args.sequence_parallel:
        raise ConfigurationError(
            f"--num-experts {experts} with --tensor-model-parallel-size {tp} needs --sequence-parallel: Megatron does "
            "not train experts without it"
        )
    if tp > 1 and not args.disable_bias_linear:
        raise ConfigurationError(
            f"--num-experts {experts} with --tensor-model-parallel-size {tp} needs --disable-bias-linear: Megatron has "
            "no bias in experts that are split"
        )
    uneven = args.rl_use_sequence_packing and args.data_parallel_size > 1
    if args.moe_token_dispatcher_type == "allgather" and ep > 1 and uneven:
        raise ConfigurationError(
            "--moe-token-dispatcher-type allgather needs equally many tokens on all data-parallel ranks, which "
            "--rl-use-sequence-packing does not give: use alltoall"
        )


def _check_router(args: argparse.Namespace) -> None:
    topk, experts = args.moe_router_topk, args.num_experts
    fewest = 1 if args.moe_router_pre_softmax else 2
    if not fewest <= topk <= experts:
        reason = "" if fewest == 1 else "the weight of a single expert would always be 1, and "
        raise ConfigurationError(
            f"--moe-router-topk {topk} must lie in [{fewest}, {experts}]: {reason}there are --num-experts {experts}"
        )
    if args.moe_router_load_balancing_type == "none" and args.moe_aux_loss_coeff:
        raise ConfigurationError(
            f"--moe-aux-loss-coeff {args.moe_aux_loss_coeff} does nothing with --moe-router-load-balancing-type none: "
            "use aux_loss, or drop it"
        )
    if not (args.calculate_per_token_loss and asks_for_auxiliary_losses(args)):
        return
    if args.rl_use_sequence_packing and args.data_parallel_size > 1:
        raise ConfigurationError(
            "--calculate-per-token-loss weighs the experts' auxiliary losses by the tokens of each data-parallel rank, "
            "which --rl-use-sequence-packing makes unequal: drop it, the gradients are otherwise the same"
        )
    shards = args.context_parallel_size * args.tensor_model_parallel_size
    if shards > 1 and weakens_auxiliary_losses():
        raise ConfigurationError(
            f"--calculate-per-token-loss divides the experts' auxiliary losses by {shards}, the tensor · context "
            "parallel ranks, in megatron-core before 0.19: drop it, the gradients are otherwise the same"
        )


def asks_for_auxiliary_losses(args: argparse.Namespace) -> bool:
    """Whether the router adds losses of its own."""
    return bool(args.moe_aux_loss_coeff or args.moe_z_loss_coeff)


def weakens_auxiliary_losses() -> bool:
    """Whether Megatron's router scales them by its own share of the tokens where the gradients are divided by all."""
    from megatron.core.package_info import MAJOR, MINOR

    return (MAJOR, MINOR) < (0, 19)
