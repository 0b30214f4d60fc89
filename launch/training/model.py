"""Megatron-Core's GPTModel, DDP, optimizer and schedule of the learning rate, as the flags describe them."""

from __future__ import annotations

import argparse
import importlib.util
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


def build_config(args: argparse.Namespace) -> TransformerConfig:
    """The TransformerConfig of the validated flags."""
    interleaved = args.virtual_pipeline_model_parallel_size is not None
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        kv_channels=args.kv_channels,
        normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon,
        add_bias_linear=not args.disable_bias_linear,
        add_qkv_bias=args.add_qkv_bias,
        qk_layernorm=args.qk_layernorm,
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu,
        init_method_std=args.init_method_std,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        sequence_parallel=args.sequence_parallel,
        use_cpu_initialization=args.on_cpu,
        bf16=args.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        batch_p2p_comm=not args.on_cpu and not interleaved,
        overlap_p2p_comm=interleaved,
        calculate_per_token_loss=args.calculate_per_token_loss,
        recompute_granularity=args.recompute_granularity,
        recompute_method=args.recompute_method,
        recompute_num_layers=args.recompute_num_layers,
        gradient_accumulation_fusion=not args.on_cpu and _has("fused_weight_gradient_mlp_cuda"),
        **_expert_fields(args),
    )


def build_chunks(args: argparse.Namespace, config: TransformerConfig) -> list[GPTModel]:
    """This rank's GPTModels, one a virtual stage, on its device. Weights follow from ``--seed``."""
    virtual = args.virtual_pipeline_model_parallel_size
    # Ranks with other experts must not draw the same ones; what they share is made equal by ``wrap_chunks``.
    torch.manual_seed(args.seed + parallel_state.get_expert_model_parallel_rank())
    chunks = []
    for stage in range(virtual or 1):
        vp_stage = stage if virtual else None
        chunks.append(
            GPTModel(
                config=config,
                transformer_layer_spec=_layer_spec(args, config, vp_stage),
                vocab_size=args.padded_vocab_size,
                max_sequence_length=args.max_position_embeddings,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
                parallel_output=True,
                share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
                position_embedding_type=args.position_embedding_type,
                rotary_base=args.rotary_base,
                vp_stage=vp_stage,
            )
        )
        if args.fused_linear_log_probs and chunks[-1].post_process:
            skip_output_layer(chunks[-1])
    if not args.on_cpu:
        for chunk in chunks:
            chunk.cuda(torch.cuda.current_device())
    return chunks


def wrap_chunks(args: argparse.Namespace, chunks: list[GPTModel]) -> list[DistributedDataParallel]:
    """The chunks under Megatron's DDP."""
    config = chunks[0].config
    modules = [Float16Module(config, chunk) for chunk in chunks] if args.bf16 else chunks
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=args.use_distributed_optimizer
    )
    model = [
        DistributedDataParallel(config, ddp_config, module, disable_bucketing=index > 0)
        for index, module in enumerate(modules)
    ]
    for chunk in model:
        chunk.broadcast_params()
    return model


def build_optimizer(
    args: argparse.Namespace, model: list[DistributedDataParallel]
) -> tuple[Any, OptimizerParamScheduler]:
    """Megatron's optimizer and its schedule, which counts optimizer steps."""
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    config = OptimizerConfig(
        optimizer=args.optimizer,
        lr=args.lr,
        min_lr=args.min_lr,
        weight_decay=args.weight_decay,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_eps=args.adam_eps,
        sgd_momentum=args.sgd_momentum,
        clip_grad=args.clip_grad,
        bf16=args.bf16,
        params_dtype=dtype,
        use_distributed_optimizer=args.use_distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(config, model, use_gloo_process_groups=False)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        _make_state(part.optimizer)
        part.init_state_fn = part.init_state_fn or (lambda optimizer, config=None: None)
    # A function, not the optimizer's method: Megatron copies the config for experts, and what it holds with it.
    model[0].config.grad_scale_func = lambda loss: optimizer.scale_loss(loss)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters,
        lr_decay_steps=args.lr_decay_iters,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
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


def has_auxiliary_losses(config: TransformerConfig) -> bool:
    """Whether the model adds losses of its own to the gradients: balancing or z losses of experts, or MTP."""
    coefficients = config.moe_aux_loss_coeff
    balancing = any(coefficients) if isinstance(coefficients, (list, tuple)) else bool(coefficients)
    experts = config.num_moe_experts is not None and (balancing or bool(config.moe_z_loss_coeff))
    return experts or bool(config.mtp_num_layers)


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


def _expert_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a mixture of experts; none for a dense model."""
    if args.num_experts is None:
        return {}
    return {
        "num_moe_experts": args.num_experts,
        "expert_model_parallel_size": args.expert_model_parallel_size,
        "moe_ffn_hidden_size": args.moe_ffn_hidden_size,
        "moe_router_topk": args.moe_router_topk,
        "moe_router_pre_softmax": args.moe_router_pre_softmax,
        "moe_router_load_balancing_type": args.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": args.moe_aux_loss_coeff,
        "moe_z_loss_coeff": args.moe_z_loss_coeff,
        "moe_token_dispatcher_type": args.moe_token_dispatcher_type,
    }


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _layer_spec(args: argparse.Namespace, config: TransformerConfig, vp_stage: int | None) -> Any:
    """Transformer Engine's layers, or Megatron's local ones with a norm and an attention that know SP and CP."""
    if args.transformer_impl == "transformer_engine":
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=args.num_experts, moe_grouped_gemm=False, qk_layernorm=args.qk_layernorm
        )
    from megatron_rc.launch.training.local_layers import LocalAttention, LocalNorm

    norm: Any = LocalNorm
    if not args.on_cpu and args.normalization == "LayerNorm" and _has("apex.normalization"):
        from megatron.core.fusions.fused_layer_norm import FusedLayerNorm

        norm = FusedLayerNorm
    spec = get_gpt_layer_local_spec(
        num_experts=args.num_experts,
        moe_grouped_gemm=False,
        qk_layernorm=args.qk_layernorm,
        normalization=args.normalization,
    )
    spec.submodules.input_layernorm = norm
    spec.submodules.pre_mlp_layernorm = norm
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = LocalAttention
    if args.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = norm
    layers = get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=norm)
