"""Megatron-Core's model, DDP, optimizer and schedule of the learning rate, as the settings describe them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.megatron_configs import (
    build_ddp_config,
    build_optimizer_config,
    build_transformer_config,
    distribution_fields,
)
from megatron_rc.launch.training.models.chunk import ModelChunk
from megatron_rc.launch.training.models.local_layers import LocalNorm, use_local_layers
from megatron_rc.launch.training.models.output_layers import use_expert_bias, use_norms_after, use_output_bias
from megatron_rc.launch.training.models.packed_rope import use_gathered_angles
from megatron_rc.launch.training.models.value_head import ValueHead
from megatron_rc.launch.training.models.wide_norms import use_norms_over_all_heads
from megatron_rc.launch.weights.megatron_bridge import bridged_transformer, is_bridged, provide_chunk
from megatron_rc.launch.weights.named_weights import kept_buffers
from megatron_rc.parallel.collectives import broadcast


def transformer_config(config: RunConfig) -> TransformerConfig:
    """Megatron's config of the run's layers, which is the provider of Megatron-Bridge if that makes the model."""
    if is_bridged(config):
        return bridged_transformer(config, distribution_fields(config))
    return build_transformer_config(config)


def build_chunks(config: RunConfig, transformer: TransformerConfig, *, is_critic: bool = False) -> list[ModelChunk]:
    """Build this rank's models, one for each virtual stage, on its device, with weights from ``--seed``.

    Args:
        config: settings of the run.
        transformer: Megatron's config of the layers, shared by the chunks.
        is_critic: make a value head on the last stage, without tied embeddings.
    """
    use_gathered_angles()
    virtual = config.parallel.virtual_pipeline_model_parallel_size
    # Each expert-parallel rank draws other experts; ``wrap_chunks`` makes the shared weights equal.
    torch.manual_seed(config.training.seed + parallel_state.get_expert_model_parallel_rank())
    is_tied = not (is_critic or config.model.untie_embeddings_and_output_weights)
    transformer.qk_layernorm = config.transformer.qk_layernorm
    chunks = []
    for stage in range(virtual or 1):
        chunks.append(_build_chunk(config, transformer, stage if virtual else None, is_tied=is_tied))
        if is_critic and chunks[-1].post_process:
            chunks[-1].output_layer = ValueHead(transformer, config.training.seed)
    if config.model.qk_norm_over == "all_heads":
        # Megatron would add up the gradients of the norms' weights over the TP ranks, which have different weights.
        transformer.qk_layernorm = False
    if not config.launch.on_cpu:
        for chunk in chunks:
            chunk.cuda(torch.cuda.current_device())
    draws_apart = config.expert_tensor_parallel_size != config.parallel.tensor_model_parallel_size
    for chunk in chunks if draws_apart else ():
        _mark_experts(chunk)
    for chunk in chunks if draws_apart and transformer.perform_initialization else ():
        _share_over_tp(chunk)
    return chunks


def _build_chunk(
    config: RunConfig, transformer: TransformerConfig, vp_stage: int | None, *, is_tied: bool
) -> ModelChunk:
    """Build one of this rank's models; HybridModel, which is not in every version, is imported only for its runs."""
    common: dict[str, Any] = {
        "config": transformer,
        "vocab_size": config.model.padded_vocab_size,
        "max_sequence_length": config.model.max_position_embeddings,
        "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        "parallel_output": True,
        "share_embeddings_and_output_weights": is_tied,
        "position_embedding_type": config.model.position_embedding_type,
        "rotary_percent": config.model.rotary_percent,
        "rotary_base": config.model.rotary_base,
        "vp_stage": vp_stage,
    }
    if is_bridged(config):
        place = {name: common[name] for name in ("pre_process", "post_process", "vp_stage")}
        return provide_chunk(transformer, is_tied=is_tied, **place)
    if config.model.is_hybrid:
        from megatron_rc.launch.training.models.hybrid import Hybrid, whole

        return Hybrid(config, _layer_spec(config, whole(transformer), None), **common)
    return GPTModel(
        transformer_layer_spec=_layer_spec(config, transformer, vp_stage),
        seq_len_interpolation_factor=config.model.rotary_seq_len_interpolation_factor,
        rope_scaling=config.model.rope_scaling,
        rope_scaling_factor=config.model.rope_scaling_factor,
        **common,
    )


@torch.no_grad()
def _share_over_tp(chunk: ModelChunk) -> None:
    """Give all TP ranks the first one's router and other whole weights: each drew with the seed of its experts."""
    for parameter in chunk.parameters():
        if not getattr(parameter, "tensor_model_parallel", False) and getattr(parameter, "allreduce", True):
            parameter.copy_(broadcast(parameter, 0, parallel_state.get_tensor_model_parallel_group()))


def _mark_experts(chunk: ModelChunk) -> None:
    """Say which ranks sum the gradients of experts that are not split as the other layers are.

    The ranks of a TP group have other tokens for one expert, or other experts. Their gradients are summed over the
    expert data-parallel group alone. Megatron marks the experts so only if they are spread over ranks; biases of their
    output it would also sum over the TP group, and leave out of the gradient norm of all TP ranks but the first.
    """
    for name, parameter in chunk.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce = False
            parameter.sequence_parallel = False
            parameter.tensor_model_parallel = True


def host_copy(config: RunConfig, chunks: Sequence[ModelChunk]) -> list[ModelChunk]:
    """Copies of the chunks with frozen weights in host memory, pinned if there is a GPU."""
    transformer = copy.copy(chunks[0].config)
    # No random initialization, because the weights are overwritten below.
    transformer.use_cpu_initialization = True
    transformer.perform_initialization = False
    there = dataclasses.replace(config, launch=dataclasses.replace(config.launch, on_cpu=True))
    copies = build_chunks(there, transformer)
    for frozen, chunk in zip(copies, chunks, strict=True):
        # Float16Module converts the policy: learned positions are made in float32, whatever the dtype.
        frozen.to("cpu", config.dtype).load_state_dict(chunk.state_dict())
        frozen.requires_grad_(False)
        for parameter in () if config.launch.on_cpu else frozen.parameters():
            parameter.data = parameter.data.pin_memory()
    return copies


def wrap_chunks(config: RunConfig, chunks: list[ModelChunk]) -> list[DistributedDataParallel]:
    """Wrap the chunks in Megatron's DDP, and in Float16Module if the dtype has 16 bits."""
    transformer = chunks[0].config
    # Keep the experts' bias in float32 with all its bits; Megatron's router also makes it float32, in its first pass.
    exact = [{name: buffer.data for name, buffer in kept_buffers(chunk).items()} for chunk in chunks]
    modules = [Float16Module(transformer, chunk) for chunk in chunks] if config.dtype.itemsize == 2 else chunks
    for chunk, values in zip(chunks, exact, strict=True):
        for name, buffer in kept_buffers(chunk).items():
            buffer.data = values[name]
    ddp_config = build_ddp_config(config)
    model = [
        DistributedDataParallel(transformer, ddp_config, module, disable_bucketing=index > 0)
        for index, module in enumerate(modules)
    ]
    for chunk in model:
        chunk.broadcast_params()
    if ddp_config.overlap_grad_reduce:
        # With these functions the schedule reduces gradients during the last micro-batch's backward pass.
        stops = [chunk.no_sync for chunk in model]
        starts = [chunk.start_grad_sync for chunk in model]
        # Megatron's schedules take a function for one chunk, a list for several.
        transformer.no_sync_func, transformer.grad_sync_func = (
            (stops, starts) if len(model) > 1 else (stops[0], starts[0])
        )
    return model


def build_optimizer(
    config: RunConfig, model: list[DistributedDataParallel], timers: Any = None
) -> tuple[Any, OptimizerParamScheduler]:
    """Build Megatron's optimizer and its schedule, which counts optimizer steps; ``timers``: Megatron's timers."""
    settings = config.optimizer
    schedule = config.schedule
    optimizer = get_megatron_optimizer(build_optimizer_config(config), model, use_gloo_process_groups=False)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        _make_state(part.optimizer)
        part.config.timers = timers
        part.init_state_fn = part.init_state_fn or (lambda optimizer, config=None: None)
    # A function, not the optimizer's method: Megatron deep-copies the config for experts, and would copy the optimizer.
    model[0].config.grad_scale_func = lambda loss: optimizer.scale_loss(loss)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=schedule.lr_warmup_init,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=schedule.warmup_steps,
        lr_decay_steps=schedule.lr_decay_iters,
        lr_decay_style=schedule.lr_decay_style,
        start_wd=settings.weight_decay if schedule.start_weight_decay is None else schedule.start_weight_decay,
        end_wd=settings.weight_decay if schedule.end_weight_decay is None else schedule.end_weight_decay,
        wd_incr_steps=config.training.train_iters,
        wd_incr_style=schedule.weight_decay_incr_style,
        wsd_decay_steps=schedule.lr_wsd_decay_iters,
        lr_wsd_decay_style=schedule.lr_wsd_decay_style,
    )
    return optimizer, scheduler


def unwrap(model: Any) -> ModelChunk:
    """The model inside DDP and Float16Module."""
    while hasattr(model, "module"):
        model = model.module
    return model


def _make_state(optimizer: Any) -> None:
    """Fill the state of torch's optimizers with the zeros of their first step.

    Megatron's checkpoints need the state before the first step, and before loading.
    """
    moments = ("exp_avg", "exp_avg_sq")
    names = {torch.optim.AdamW: moments, torch.optim.Adam: moments, torch.optim.SGD: ("momentum_buffer",)}
    for group in optimizer.param_groups if type(optimizer) in names else ():
        for parameter in group["params"]:
            state = {name: torch.zeros_like(parameter) for name in names[type(optimizer)]}
            if "exp_avg" in state:
                state["step"] = torch.zeros((), dtype=torch.float32)
            optimizer.state[parameter].update(state)


def _layer_spec(config: RunConfig, transformer: TransformerConfig, vp_stage: int | None) -> Any:
    """Transformer Engine's layers, or Megatron's local layers with a norm for SP and an attention for CP."""
    has_engine = config.model.transformer_impl == "transformer_engine"
    block = get_gpt_decoder_block_spec(
        transformer,
        use_transformer_engine=has_engine,
        normalization=transformer.normalization,
        qk_l2_norm=transformer.qk_l2_norm,
        vp_stage=vp_stage,
    )
    if not has_engine:
        for spec in block.layer_specs:
            use_local_layers(spec.submodules, transformer)
        block.layer_norm = LocalNorm
    for spec in block.layer_specs:
        if config.model.attention_output_bias:
            use_output_bias(spec.submodules)
        if config.transformer.add_bias_linear and not has_engine:
            use_expert_bias(spec.submodules)
        if config.model.layer_norms != "before":
            use_norms_after(spec.submodules, also_before=config.model.layer_norms == "around")
        if config.model.qk_norm_over == "all_heads":
            use_norms_over_all_heads(spec.submodules)
    return block
