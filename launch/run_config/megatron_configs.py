"""Megatron's configs of a run, from the sections, the launcher's own choices and the given fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_rc.launch.errors import has_module
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.layer_patterns import number_or_pattern
from megatron_rc.launch.run_config.options import values_of

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}


def build_transformer_config(config: RunConfig) -> TransformerConfig:
    """Megatron's config of the layers and of their distribution over the ranks."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    fields = values_of(config.transformer) | {"activation_func": _activation(config)}
    del fields["group_query_attention"]  # no field of Megatron's: num_query_groups says it
    if config.transformer.no_rope_freq is not None:
        fields["no_rope_freq"] = number_or_pattern(config.transformer.no_rope_freq)
    if config.transformer.window_size is not None:
        fields["window_size"] = tuple(map(int, config.transformer.window_size.split(",")))
    if config.transformer.window_attn_skip_freq is not None:
        fields["window_attn_skip_freq"] = number_or_pattern(config.transformer.window_attn_skip_freq)
    if config.experts:
        fields |= values_of(config.experts)
        fields["moe_layer_freq"] = number_or_pattern(config.experts.moe_layer_freq)
    kind = TransformerConfig
    if config.latent:
        fields |= values_of(config.latent) | {"rotary_base": config.model.rotary_base}
        kind = MLATransformerConfig
    transformer = kind(**(fields | distribution_fields(config)))
    if config.yarn is not None:
        # GPTModel reads these attributes, which the dataclass does not declare.
        for name, value in config.yarn.attributes.items():
            setattr(transformer, name, value)
    return transformer


def distribution_fields(config: RunConfig) -> dict[str, Any]:
    """Fields of Megatron's ``TransformerConfig`` for how layers are distributed and computed, and the given fields."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnBackend

    given_fields = config.megatron.values_for(TransformerConfig)
    if "attention_backend" in given_fields:
        given_fields["attention_backend"] = AttnBackend[given_fields["attention_backend"]]
    on_cpu = config.launch.on_cpu
    interleaved = config.parallel.virtual_pipeline_model_parallel_size is not None
    overlaps = interleaved and given_fields.get("overlap_p2p_comm", True)
    launcher_fields = {
        "use_cpu_initialization": on_cpu,
        "params_dtype": config.dtype,
        "pipeline_dtype": config.dtype,
        "batch_p2p_comm": not on_cpu and not overlaps,
        # Barriers at every timer would slow the ranks that are timed.
        "barrier_with_L1_time": False,
        "gradient_accumulation_fusion": not on_cpu and has_module("fused_weight_gradient_mlp_cuda"),
    }
    # Megatron refuses the overlap without virtual stages.
    fixed: dict[str, Any] = {"overlap_p2p_comm": overlaps}
    if config.model.is_hybrid:
        fixed |= _of_pattern(config)
    sections = values_of(config.parallel) | values_of(config.compute)
    del sections["num_layers_per_virtual_pipeline_stage"]
    return sections | launcher_fields | given_fields | fixed


def _of_pattern(config: RunConfig) -> dict[str, Any]:
    """Fields for HybridModel: its pattern has the stages, and counts a layer's attention and MLP as two layers."""
    recomputed = config.compute.recompute_num_layers
    ends = dict.fromkeys(("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"))
    return ends | {"recompute_num_layers": recomputed and 2 * recomputed}


def build_ddp_config(config: RunConfig) -> DistributedDataParallelConfig:
    """Megatron's config of data parallelism; gradients are summed in float32 unless the flags say otherwise."""
    from megatron.core.distributed import DistributedDataParallelConfig

    launcher_fields = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": config.optimizer.use_distributed_optimizer,
    }
    return DistributedDataParallelConfig(
        **(launcher_fields | config.megatron.values_for(DistributedDataParallelConfig))
    )


def build_optimizer_config(config: RunConfig) -> OptimizerConfig:
    """Megatron's config of the optimizer."""
    from megatron.core.optimizer import OptimizerConfig

    given_fields = config.megatron.values_for(OptimizerConfig)
    given_fields |= {name: _DTYPES[value] for name, value in given_fields.items() if name.endswith("_dtype")}
    # Megatron-LM's parser offloads the whole optimizer unless the flag says otherwise.
    launcher_fields = {"bf16": config.compute.bf16, "fp16": config.compute.fp16, "params_dtype": config.dtype}
    launcher_fields |= {"optimizer_offload_fraction": 1.0, "barrier_with_L1_time": False}
    return OptimizerConfig(**(values_of(config.optimizer) | launcher_fields | given_fields))


def _activation(config: RunConfig) -> Callable[[Tensor], Tensor]:
    if config.model.quick_geglu:
        from megatron.core.fusions.fused_bias_geglu import quick_gelu

        activation: Callable[[Tensor], Tensor] = quick_gelu
        return activation
    if config.transformer.gated_linear_unit:
        return torch.nn.functional.silu
    return _gelu_by_tanh if config.model.openai_gelu else torch.nn.functional.gelu


def _gelu_by_tanh(hidden: Tensor) -> Tensor:
    return torch.nn.functional.gelu(hidden, approximate="tanh")
