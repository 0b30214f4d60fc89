"""Memory by Megatron-LM's own formulas, which megatron-core 0.19 and newer have."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from megatron_rc.launch.dry_run.batches import batch_numbers
from megatron_rc.launch.errors import has_module
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.options import values_of


@dataclass(frozen=True)
class Theory:
    """Bytes of a rank of the largest stage, by Megatron-LM's formulas.

    They assume bfloat16 weights and Adam. They ignore context parallelism, packing, recomputed layers and log-probs.
    """

    weights_and_optimizer: int  # weights, gradients and optimizer
    activations: int  # activations of all micro-batches in flight


def theoretical_memory(config: RunConfig) -> Theory | None:
    """The memory by the formulas; None before megatron-core 0.19, which first has ``megatron.training``."""
    if not has_module("megatron.training"):
        return None
    from megatron.training import theoretical_memory_usage as formulas

    args, micro_batches = _megatrons_arguments(config), batch_numbers(config)["micro_batches"]
    is_split = args.sequence_parallel and args.recompute_granularity == "selective"
    activations = formulas.compute_activation_memory if is_split else formulas.compute_activation_memory_without_sp
    weights = formulas.compute_weight_and_optimizer_memory(args)
    return Theory(round(weights), round(activations(args, micro_batches)))


def _megatrons_arguments(config: RunConfig) -> SimpleNamespace:
    """The settings under the names of Megatron-LM's arguments."""
    transformer = config.transformer
    absent = dict.fromkeys(("num_experts", "moe_ffn_hidden_size", "moe_router_topk", "moe_latent_size"))
    others = {
        "moe_shared_expert_intermediate_size": None,
        "mtp_num_layers": None,
        "multi_latent_attention": False,
        "group_query_attention": transformer.num_query_groups != transformer.num_attention_heads,
        "swiglu": transformer.gated_linear_unit,
        "world_size": config.launch.world_size,
        "data_parallel_size": config.data_parallel_size,
    }
    experts: dict[str, Any] = {}
    if config.experts is not None:
        experts = values_of(config.experts) | {"num_experts": config.experts.num_moe_experts}
    if config.latent is not None:
        experts |= values_of(config.latent)
    experts["moe_layer_freq"] = [int(kind) for kind in config.layers_with_experts] if config.experts else 1
    own = (config.parallel, transformer, config.compute, config.optimizer, config.model, config.training)
    values = {name: value for section in own for name, value in values_of(section).items()}
    split = {"expert_tensor_parallel_size": config.expert_tensor_parallel_size}
    return SimpleNamespace(**(absent | others | values | experts | config.megatron.given | split))
