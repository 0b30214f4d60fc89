"""One rank of a job whose other ranks are not there: groups that send nothing, tensors that have no memory."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from megatron_rc.launch.distributed import initialize, shut_down
from megatron_rc.launch.dry_run.many_experts import even_experts
from megatron_rc.launch.dry_run.places import expert_tp
from megatron_rc.launch.flags.checks.megatron import MODULES_OF_ENGINE
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.megatron import MegatronSection
from megatron_rc.launch.train_ppo import cpu_backend

TRANSFORMER_ENGINE = "transformer_engine"
_OF_GPUS = (
    *("fp8", "fp4", "tp_comm", "cuda_graph", "enable_cuda_graph", "external_cuda_graph", "cpu_offloading"),
    *("attention_backend", "moe_grouped_gemm", "overlap", "batch_p2p", "fine_grained_activation_offloading"),
    *("moe_enable_deepep", "moe_deepep", "moe_flex_dispatcher", "moe_hybridep"),
    *("batch_invariant_mode", "use_te_", "defer_embedding_wgrad_compute", "wgrad_deferral_limit"),
    "pipeline_model_parallel_comm_backend",
)


@contextlib.contextmanager
def fake_groups(config: RunConfig, rank: int) -> Iterator[None]:
    """Megatron's groups as one rank of the run sees them, inside the block; a collective leaves data as they are."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=config.launch.world_size)
    try:
        initialize(dataclasses.replace(config, megatron=_known_here(config)))
        yield
    finally:
        shut_down()


def first_rank_of_stage(config: RunConfig, stage: int) -> int:
    """The first rank of a pipeline stage."""
    return config.launch.world_size // config.parallel.pipeline_model_parallel_size * stage


def on_this_machine(config: RunConfig) -> RunConfig:
    """The run on as few ranks as have such stages, with layers that every machine has; a rank's work is the same."""
    parallel, experts = config.parallel, config.experts
    stage = math.lcm(
        parallel.tensor_model_parallel_size * parallel.context_parallel_size,
        expert_tp(config) * parallel.expert_model_parallel_size,
    )
    if experts is not None and experts.moe_token_dispatcher_type == "flex":
        experts = dataclasses.replace(experts, moe_token_dispatcher_type="alltoall")
    return dataclasses.replace(
        config,
        launch=dataclasses.replace(
            config.launch, on_cpu=True, world_size=stage * parallel.pipeline_model_parallel_size
        ),
        model=dataclasses.replace(config.model, transformer_impl="local"),
        experts=experts,
        megatron=_known_here(config),
    )


def _known_here(config: RunConfig) -> MegatronSection:
    given = {name: value for name, value in config.megatron.given.items() if name not in of_gpus(config)}
    if "recompute_modules" in given:
        given["recompute_modules"] = [name for name in given["recompute_modules"] if name not in MODULES_OF_ENGINE]
    return dataclasses.replace(config.megatron, given=given)


def modules_of_gpus(config: RunConfig) -> list[str]:
    """Given modules that only Transformer Engine's layers make anew; what that spares is not seen here."""
    return [name for name in config.megatron.given.get("recompute_modules", ()) if name in MODULES_OF_ENGINE]


def of_gpus(config: RunConfig) -> list[str]:
    """Given fields of Megatron's that only its GPU paths know; what they change of a rank's memory is not seen here."""
    return [name for name in config.megatron.given if name.startswith(_OF_GPUS) or "fus" in name]


@contextlib.contextmanager
def fake_tensors(config: RunConfig) -> Iterator[None]:
    """Inside this block tensors have a shape and no memory, and layers work as those of the run do.

    Args:
        config: of the run, whose layers may be Transformer Engine's; those that stand for them are local ones.
    """
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    from megatron_rc.launch.training import local_layers

    caches = (local_layers._zigzag_mask, local_layers._packed_mask)
    with contextlib.ExitStack() as stack:
        # Nothing is drawn, so no state of a generator is kept.
        stack.enter_context(mock.patch.object(CudaRNGStatesTracker, "fork", _nothing_drawn))
        stack.enter_context(even_experts())
        if config.model.transformer_impl == TRANSFORMER_ENGINE:
            # Its attention goes round the context-parallel ranks with their own keys, and keeps no mask.
            stack.enter_context(mock.patch.object(local_layers, "group_size", _alone))
        elif config.training.rl_use_sequence_packing:
            functional = torch.nn.functional
            masked = _with_mask(functional.scaled_dot_product_attention)
            stack.enter_context(mock.patch.object(functional, "scaled_dot_product_attention", masked))
        if not config.launch.on_cpu:
            stack.enter_context(mock.patch.object(torch.nn.functional, "rms_norm", _rms_norm))
            if config.latent is not None:
                functional = torch.nn.functional
                stack.enter_context(mock.patch.object(functional, "scaled_dot_product_attention", _latent_attention))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        if config.experts is not None:
            stack.enter_context(_EvenlyChosen(config.experts.moe_router_topk / config.experts.num_moe_experts))
        try:
            yield
        finally:
            # What was kept between two calls has no memory, and must not meet a real run in this process.
            for cache in caches:
                cache.cache_clear()
            get_moe_layer_wise_logging_tracker().clear()


def _nothing_drawn(*_: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _alone(_: Any) -> int:
    return 1


class _EvenlyChosen(TorchFunctionMode):
    """``masked_select`` of a mask of tokens by experts, as if every expert had equally many of them."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not Tensor.masked_select:
            return func(*args, **(kwargs or {}))
        values, mask = args
        return values.expand(mask.shape).flatten()[: round(mask.numel() * self.share)].clone()


def _with_mask(attention: Any) -> Any:
    """Attention as it is over packed sequences, with a mask that says which token belongs to which."""

    def run(query: Tensor, key: Tensor, value: Tensor, *, scale: float, enable_gqa: bool, **_: Any) -> Any:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool)
        return attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)

    return run


class _RmsNorm(torch.autograd.Function):
    """What a GPU's kernel keeps for the backward: the input, and one number a row; on a CPU torch keeps copies."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight, hidden.new_empty(hidden.shape[:-1], dtype=torch.float32))
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight, _ = ctx.saved_tensors
        return torch.empty_like(hidden), torch.empty_like(weight)


def _rms_norm(hidden: Tensor, shape: Any, weight: Tensor, eps: float | None = None) -> Tensor:
    found: Tensor = _RmsNorm.apply(hidden, weight)  # type: ignore[no-untyped-call]
    return found


class _LatentAttention(torch.autograd.Function):
    """What a GPU's kernel keeps, where heads of values have another width; on a CPU torch makes all weights then."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


def _latent_attention(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
    found: Tensor = _LatentAttention.apply(query, key, value)  # type: ignore[no-untyped-call]
    return found


@contextlib.contextmanager
def megatron_here() -> Iterator[None]:
    """Megatron-Core on this machine's CPU, without a word: that is what a dry run is for."""
    import logging

    log = logging.getLogger("megatron_rc")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with cpu_backend():
            yield
    finally:
        log.setLevel(level)
