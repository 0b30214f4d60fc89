"""One rank of a job without the others: groups that send nothing, tensors without memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from megatron_rc.launch.distributed import initialize, shut_down
from megatron_rc.launch.dry_run.many_experts import even_experts
from megatron_rc.launch.flags.checks.megatron import MODULES_OF_ENGINE
from megatron_rc.launch.run_config import RunConfig

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
    """Make Megatron's groups for one rank of the run; inside this block collectives change no data."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=config.launch.world_size)
    try:
        initialize(config.changed(megatron={"given": _known_here(config)}))
        yield
    finally:
        shut_down()


def first_rank_of_stage(config: RunConfig, stage: int) -> int:
    """The first rank of a pipeline stage."""
    return config.launch.world_size // config.parallel.pipeline_model_parallel_size * stage


def on_this_machine(config: RunConfig) -> RunConfig:
    """The run with the fewest ranks that keep each rank's work, and with layers that run on any machine."""
    parallel, experts = config.parallel, config.experts
    stage = math.lcm(
        parallel.tensor_model_parallel_size * parallel.context_parallel_size,
        config.expert_tensor_parallel_size * parallel.expert_model_parallel_size,
    )
    local = config.changed(
        launch={"on_cpu": True, "world_size": stage * parallel.pipeline_model_parallel_size},
        model={"transformer_impl": "local"},
        megatron={"given": _known_here(config)},
    )
    is_flex = experts is not None and experts.moe_token_dispatcher_type == "flex"
    return local.changed(experts={"moe_token_dispatcher_type": "alltoall"}) if is_flex else local


def _known_here(config: RunConfig) -> dict[str, Any]:
    given = {name: value for name, value in config.megatron.given.items() if name not in of_gpus(config)}
    if "recompute_modules" in given:
        given["recompute_modules"] = [name for name in given["recompute_modules"] if name not in MODULES_OF_ENGINE]
    return given


def modules_of_gpus(config: RunConfig) -> list[str]:
    """``--recompute-modules`` that only Transformer Engine recomputes; the memory does not count their effect."""
    return [name for name in config.megatron.given.get("recompute_modules", ()) if name in MODULES_OF_ENGINE]


def of_gpus(config: RunConfig) -> list[str]:
    """Given Megatron fields that only its GPU code uses; the memory does not count their effect."""
    return [name for name in config.megatron.given if name.startswith(_OF_GPUS) or "fus" in name]


@contextlib.contextmanager
def fake_tensors(config: RunConfig) -> Iterator[None]:
    """Inside this block tensors have a shape and no memory, and local layers keep the bytes of the run's own layers."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import token_dispatcher
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    from megatron_rc.launch.training.models import local_layers

    functional, patch, attention = torch.nn.functional, mock.patch.object, "scaled_dot_product_attention"
    with contextlib.ExitStack() as stack:
        # No random numbers are drawn, so Megatron need not save the generator's state.
        stack.enter_context(patch(CudaRNGStatesTracker, "fork", return_value=contextlib.nullcontext()))
        stack.enter_context(even_experts())
        if config.model.transformer_impl == TRANSFORMER_ENGINE:
            # Its attention passes keys around the context-parallel ranks and keeps no mask.
            stack.enter_context(patch(local_layers, "group_size", return_value=1))
        elif config.training.rl_use_sequence_packing:
            stack.enter_context(patch(functional, attention, _joined(functional.scaled_dot_product_attention)))
        if not config.launch.on_cpu:
            stack.enter_context(patch(functional, "rms_norm", _rms_norm))
            if config.latent is not None:
                stack.enter_context(patch(functional, attention, _latent_attention))
        if config.experts is not None:
            share = config.experts.moe_router_topk / config.experts.num_moe_experts
            stack.enter_context(patch(Tensor, "masked_select", _evenly_chosen(share)))
            stack.enter_context(patch(token_dispatcher, "permute", _evenly_permuted(token_dispatcher.permute, share)))
        # The allgather dispatcher of megatron-core 0.19 reads its number of tokens: a symbol stands for it.
        symbols = ShapeEnv(allow_scalar_outputs=True)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True, shape_env=symbols, static_shapes=True))
        try:
            yield
        finally:
            # Cached tensors have no memory: drop them before a real run in this process finds them.
            local_layers._zigzag_mask.cache_clear()
            get_moe_layer_wise_logging_tracker().clear()


def _evenly_chosen(share: float) -> Any:
    """``masked_select`` of a [tokens, experts] mask, as if each expert got the same number of tokens."""

    def masked_select(values: Tensor, mask: Tensor) -> Tensor:
        return values.expand(mask.shape).flatten()[: round(mask.numel() * share)].clone()

    return masked_select


def _evenly_permuted(permute: Any, share: float) -> Any:
    """Megatron's ``permute``; a symbolic number of tokens becomes that of experts which get the same number each."""

    def run(tokens: Tensor, routing_map: Tensor, *args: Any, num_out_tokens: Any = None, **kwargs: Any) -> Any:
        if isinstance(num_out_tokens, torch.SymInt):
            num_out_tokens = round(routing_map.numel() * share)
        return permute(tokens, routing_map, *args, num_out_tokens=num_out_tokens, **kwargs)

    return run


def _joined(attention: Any) -> Any:
    """Attention over packed sequences: each has an output of its own, and a copy joins them."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return attention(*args, **kwargs).clone()

    return run


class _Kernel(torch.autograd.Function):
    """The bytes of a GPU's kernel: it keeps its inputs, a float32 number of each row, and perhaps its output."""

    @staticmethod
    def forward(ctx: Any, keeps_output: bool, width: int, *inputs: Tensor) -> Tensor:
        rows = inputs[0].shape[:-1]
        output = inputs[0].new_empty(*rows, width)
        ctx.save_for_backward(*inputs, output.new_empty(rows, dtype=torch.float32), *[output] * keeps_output)
        ctx.number = len(inputs)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *map(torch.empty_like, ctx.saved_tensors[: ctx.number]))


def _rms_norm(hidden: Tensor, shape: Any, weight: Tensor, eps: float | None = None) -> Tensor:
    """RMSNorm; on a CPU torch keeps copies."""
    found: Tensor = _Kernel.apply(False, hidden.shape[-1], hidden, weight)  # type: ignore[no-untyped-call]
    return found


def _latent_attention(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
    """Attention; for value heads of another width a CPU makes all weights."""
    found: Tensor = _Kernel.apply(True, value.shape[-1], query, key, value)  # type: ignore[no-untyped-call]
    return found
