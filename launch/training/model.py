"""Megatron-Core's GPTModel, DDP, optimizer and schedule of the learning rate, as the settings describe them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.options import values_of


def build_transformer_config(config: RunConfig) -> TransformerConfig:
    """Megatron's config of the layers and of how they are split; its derived fields follow from the settings."""
    interleaved = config.parallel.virtual_pipeline_model_parallel_size is not None
    on_cpu, layers = config.launch.on_cpu, config.transformer
    return TransformerConfig(
        **values_of(config.parallel),
        **values_of(layers),
        **values_of(config.compute),
        **(values_of(config.experts) if config.experts else {}),
        activation_func=_activation(config),
        use_cpu_initialization=on_cpu,
        params_dtype=config.dtype,
        pipeline_dtype=config.dtype,
        batch_p2p_comm=not on_cpu and not interleaved,
        overlap_p2p_comm=interleaved,
        gradient_accumulation_fusion=not on_cpu and _has("fused_weight_gradient_mlp_cuda"),
    )


def build_chunks(config: RunConfig, transformer: TransformerConfig) -> list[GPTModel]:
    """This rank's GPTModels, one a virtual stage, on its device. Weights follow from ``--seed``."""
    virtual = config.parallel.virtual_pipeline_model_parallel_size
    # Ranks with other experts must not draw the same ones; what they share is made equal by ``wrap_chunks``.
    torch.manual_seed(config.training.seed + parallel_state.get_expert_model_parallel_rank())
    chunks = []
    for stage in range(virtual or 1):
        vp_stage = stage if virtual else None
        chunks.append(
            GPTModel(
                config=transformer,
                transformer_layer_spec=_layer_spec(config, transformer, vp_stage),
                vocab_size=config.model.padded_vocab_size,
                max_sequence_length=config.model.max_position_embeddings,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
                parallel_output=True,
                share_embeddings_and_output_weights=not config.model.untie_embeddings_and_output_weights,
                position_embedding_type=config.model.position_embedding_type,
                rotary_base=config.model.rotary_base,
                rope_scaling=config.model.rope_scaling,
                rope_scaling_factor=config.model.rope_scaling_factor,
                vp_stage=vp_stage,
            )
        )
        if config.training.fused_linear_log_probs and chunks[-1].post_process:
            skip_output_layer(chunks[-1])
    if not config.launch.on_cpu:
        for chunk in chunks:
            chunk.cuda(torch.cuda.current_device())
    return chunks


def wrap_chunks(config: RunConfig, chunks: list[GPTModel]) -> list[DistributedDataParallel]:
    """The chunks under Megatron's DDP."""
    transformer = chunks[0].config
    modules = [Float16Module(transformer, chunk) for chunk in chunks] if config.compute.bf16 else chunks
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=config.optimizer.use_distributed_optimizer
    )
    model = [
        DistributedDataParallel(transformer, ddp_config, module, disable_bucketing=index > 0)
        for index, module in enumerate(modules)
    ]
    for chunk in model:
        chunk.broadcast_params()
    return model


def build_optimizer(config: RunConfig, model: list[DistributedDataParallel]) -> tuple[Any, OptimizerParamScheduler]:
    """Megatron's optimizer and its schedule, which counts optimizer steps."""
    settings, schedule = config.optimizer, config.schedule
    optimizer = get_megatron_optimizer(
        OptimizerConfig(**values_of(settings), bf16=config.compute.bf16, params_dtype=config.dtype),
        model,
        use_gloo_process_groups=False,
    )
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        _make_state(part.optimizer)
        part.init_state_fn = part.init_state_fn or (lambda optimizer, config=None: None)
    # A function, not the optimizer's method: Megatron copies the config for experts, and what it holds with it.
    model[0].config.grad_scale_func = lambda loss: optimizer.scale_loss(loss)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=schedule.lr_warmup_iters,
        lr_decay_steps=schedule.lr_decay_iters,
        lr_decay_style=schedule.lr_decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


def skip_output_layer(chunk: GPTModel) -> None:
    """Let the model return the hidden states that its output layer would multiply, as ``[b, s, h]``.

    With sequence parallelism they are this rank's slice, ``[b, s/tp, h]``. The layer keeps its weight and its name in
    checkpoints.
    """

    def forward(hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
        return hidden, None

    chunk.output_layer.forward = forward


def unwrap(model: Any) -> GPTModel:
    """The GPTModel inside DDP and Float16Module."""
    while hasattr(model, "module"):
        model = model.module
    return model


def _make_state(optimizer: Any) -> None:
    """Give torch's optimizers the zeros that their first step starts from.

    Megatron's checkpoints want the state to exist, before the first step and before loading too.
    """
    names = {torch.optim.AdamW: ("exp_avg", "exp_avg_sq"), torch.optim.SGD: ("momentum_buffer",)}
    for group in optimizer.param_groups if type(optimizer) in names else ():
        for parameter in group["params"]:
            state = {name: torch.zeros_like(parameter) for name in names[type(optimizer)]}
            if isinstance(optimizer, torch.optim.AdamW):
                state["step"] = torch.zeros((), dtype=torch.float32)
            optimizer.state[parameter].update(state)


def _activation(config: RunConfig) -> Callable[[Tensor], Tensor]:
    if config.transformer.gated_linear_unit:
        return torch.nn.functional.silu
    return _gelu_by_tanh if config.model.openai_gelu else torch.nn.functional.gelu


def _gelu_by_tanh(hidden: Tensor) -> Tensor:
    return torch.nn.functional.gelu(hidden, approximate="tanh")


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it would be in
        return False


def _layer_spec(config: RunConfig, transformer: TransformerConfig, vp_stage: int | None) -> Any:
    """Transformer Engine's layers, or Megatron's local ones with a norm and an attention that know SP and CP."""
    if config.model.transformer_impl == "transformer_engine":
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=transformer.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=transformer.qk_layernorm
        )
    from megatron_rc.launch.training.local_layers import LocalAttention, LocalNorm

    norm: Any = LocalNorm
    if not config.launch.on_cpu and transformer.normalization == "LayerNorm" and _has("apex.normalization"):
        from megatron.core.fusions.fused_layer_norm import FusedLayerNorm

        norm = FusedLayerNorm
    spec = get_gpt_layer_local_spec(
        num_experts=transformer.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=transformer.qk_layernorm,
        normalization=transformer.normalization,
    )
    spec.submodules.input_layernorm = norm
    spec.submodules.pre_mlp_layernorm = norm
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = LocalAttention
    if transformer.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = norm
    layers = get_num_layers_to_build(transformer, vp_stage)
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=norm)
