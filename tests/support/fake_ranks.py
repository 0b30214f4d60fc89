"""One rank of a run without the others, in groups whose collectives change no data; and its bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megatron_rc.launch.distributed import initialize, shut_down
from megatron_rc.launch.dry_run.batches import batch_numbers
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.megatron_configs import build_transformer_config
from megatron_rc.launch.train_ppo import cpu_backend
from megatron_rc.launch.training.models.build import build_chunks
from megatron_rc.launch.training.models.chunk import ModelChunk
from megatron_rc.launch.training.models.output import processed
from tests.support.allocated import most_at_once


@contextlib.contextmanager
def fake_groups(config: RunConfig, rank: int) -> Iterator[None]:
    """Make Megatron's groups for one rank of the run, on a CPU."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with cpu_backend():
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=config.launch.world_size)
        try:
            initialize(config)
            yield
        finally:
            shut_down()


def built_chunks(config: RunConfig) -> list[ModelChunk]:
    """The models of this rank; inside ``fake_groups``."""
    return build_chunks(config, build_transformer_config(config))


def first_rank_of_stage(config: RunConfig, stage: int) -> int:
    """The first rank of a pipeline stage."""
    return config.launch.world_size // config.parallel.pipeline_model_parallel_size * stage


def allocated_in_flight(config: RunConfig, stage: int, in_flight: int) -> int:
    """The most bytes at once while so many micro-batches go forward, and then back one after the other."""
    with fake_groups(config, first_rank_of_stage(config, stage)):
        (chunk,) = built_chunks(config)
        for parameter in chunk.parameters():
            parameter.register_post_accumulate_grad_hook(_forget_gradient)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            outputs = [_forward(config, chunk) for _ in range(in_flight)]
            chunk.set_input_tensor(None)
            while outputs:
                output = outputs.pop(0)
                output.backward(torch.empty_like(output))
    return most_at_once(profiler)


def _forward(config: RunConfig, chunk: ModelChunk) -> Tensor:
    """The hidden states that a chunk sends to the next stage, or the last stage's logits."""
    numbers = batch_numbers(config)
    parallel = config.parallel
    rows = numbers["rows_of_a_micro_batch"]
    length = numbers["tokens_of_a_row"] // parallel.context_parallel_size
    tokens = torch.randint(0, config.model.vocab_size, (rows, length))
    if not chunk.pre_process:
        part = length // parallel.tensor_model_parallel_size if parallel.sequence_parallel else length
        shape = (part, rows, config.transformer.hidden_size)
        chunk.set_input_tensor(torch.randn(*shape, dtype=config.dtype, requires_grad=True))
    output: Tensor = processed(chunk, _logits, tokens, tokens, None, labels=tokens, loss_mask=tokens)
    return output


def _logits(*, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None = None, **_: Any) -> Tensor:
    logits, _ = output_layer(hidden_states, weight=output_weight, runtime_gather_output=False)
    return logits


def _forget_gradient(parameter: Tensor) -> None:
    """Drop the gradient, as Megatron's DDP does after adding it to its buffer."""
    parameter.grad = None
