"""Peak memory of a rank of each pipeline stage, by kind.

The model of a stage is built by the code of a run. Two micro-batches run forward and one of them backward, while the
bytes of live tensors are counted. Megatron's schedule says how many micro-batches wait for their backward at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_rc.launch.dry_run.batches import batch_numbers
from megatron_rc.launch.dry_run.fake_ranks import fake_groups, fake_tensors, first_rank_of_stage, on_this_machine
from megatron_rc.launch.dry_run.live_bytes import LiveBytes
from megatron_rc.launch.dry_run.many_experts import number_of
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.megatron_configs import build_transformer_config
from megatron_rc.launch.train_ppo import cpu_backend
from megatron_rc.launch.training.models.build import build_chunks
from megatron_rc.launch.training.models.chunk import ModelChunk
from megatron_rc.launch.training.models.output import processed
from megatron_rc.parallel.linear import CHUNK_TOKENS
from megatron_rc.parallel.softmax import EAGER_ELEMENTS, LEAST_ROWS

# From this number of layers on, each further layer adds the same bytes.
_FEW_LAYERS = 2
_ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
# Bytes a token of the rollout batch: of whole sequences as sampled, and of this rank's part for training.
_SAMPLED_BYTES, _LOCAL_BYTES = 17, 46


@dataclass(frozen=True)
class StageMemory:
    """Bytes of a rank of one pipeline stage."""

    stage: int  # number of the stage
    parameters: int  # number of parameters on this rank
    weights: int  # the policy's weights
    gradients: int  # Megatron's gradient buffer
    optimizer: int  # the optimizer's state, and float32 copies of lower-precision weights
    reference: int  # the reference policy's weights on a CPU; on GPUs they wait in host memory, so 0
    # Weights, gradients and optimizer of the critic; its activations are freed before the policy's are made. With
    # --critic-offload only the bytes beyond the policy's activations and logits.
    critic: int
    batch: int  # the rollout batch
    activations: int  # the most at once, of waiting micro-batches and the one at work
    logits: int  # logits with their gradients, or the chunks that replace them
    in_flight: int  # the most micro-batches at once between forward and backward

    @property
    def peak(self) -> int:
        """Sum of all kinds."""
        return sum(getattr(self, name) for name in KINDS)


KINDS = ("weights", "gradients", "optimizer", "reference", "critic", "batch", "activations", "logits")


def stage_memories(config: RunConfig) -> list[StageMemory]:
    """Memory of every stage. Equal stages between the first and the last are measured once."""
    local, found = on_this_machine(config), list[StageMemory]()
    last = config.parallel.pipeline_model_parallel_size - 1
    measured: dict[Any, list[_Chunk]] = {}
    with cpu_backend():
        for stage in range(last + 1):
            like = (stage == 0, stage == last, _kinds_of_layers(config, stage))
            if like not in measured:
                measured[like] = _measure_stage(config, local, stage)
            found.append(_stage_memory(config, stage, measured[like]))
    return found


@dataclass(frozen=True)
class _Chunk:
    """One virtual stage of a rank."""

    dense: int  # number of parameters outside of experts
    experts: int  # number of parameters of experts
    of_critic: int  # ``dense`` of a critic, whose value head replaces the output layer
    shared: int  # bytes of Megatron's buffers for gathered tensors; all chunks of a rank share them
    kept: int  # bytes that stay after a micro-batch: rotary angles, and the newest routing that experts keep
    held: int  # bytes that a micro-batch keeps from its forward to its backward
    peak: int  # the most bytes that one micro-batch needs at once
    logits: int  # the part of ``peak`` that is logits

    def plus(self, other: _Chunk, layers: int) -> _Chunk:
        """This chunk with ``layers`` more layers; ``other`` is the same chunk with one more."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return _Chunk(*(low + layers * (high - low) for low, high in pairs))


def _measure_stage(config: RunConfig, local: RunConfig, stage: int) -> list[_Chunk]:
    """The chunks of a stage. Of many equal layers 2 and 3 are measured, then extrapolated linearly."""
    chunks = config.parallel.pipeline_model_parallel_size * config.parallel.chunks_of_a_stage
    layers = config.transformer.num_layers // chunks
    if layers <= _FEW_LAYERS + 1 or not _layers_are_alike(config):
        return _measure(config, local, stage)
    few, more = (
        _measure(config, local.changed(transformer={"num_layers": number * chunks}), stage)
        for number in (_FEW_LAYERS, _FEW_LAYERS + 1)
    )
    return [one.plus(other, layers - _FEW_LAYERS) for one, other in zip(few, more, strict=True)]


def _kinds_of_layers(config: RunConfig, stage: int) -> tuple[bool, ...]:
    """For each layer of a stage, chunk by chunk: whether it has experts."""
    kinds = zip(config.stages_of_layers, config.layers_with_experts, strict=True)
    return tuple(has_experts for own, has_experts in kinds if own == stage)


def _layers_are_alike(config: RunConfig) -> bool:
    if len(set(config.layers_with_experts)) > 1:
        return False
    compute, given = config.compute, config.megatron.given
    if any(word in name for name in given for word in ("layer", "layout", "freq", "split")):
        return False
    return compute.recompute_granularity != "full" or (
        compute.recompute_method == "uniform" and compute.recompute_num_layers == 1
    )


def _measure(config: RunConfig, local: RunConfig, stage: int) -> list[_Chunk]:
    with fake_groups(local, first_rank_of_stage(local, stage)), fake_tensors(config):
        transformer = build_transformer_config(local)
        if local.experts is not None and local.experts.moe_token_dispatcher_type == "alltoall":
            # Every expert gets the same number of tokens, so that all shapes are known.
            transformer.moe_pad_expert_input_to_capacity, transformer.moe_expert_capacity_factor = True, 1.0
        chunks, measured = build_chunks(local, transformer), dict[Any, _Chunk]()
        # Chunks with equal keys have equal memory.
        alike = _layers_are_alike(config)
        keys = [(chunk.pre_process, chunk.post_process) if alike else index for index, chunk in enumerate(chunks)]
        for key, chunk in zip(keys, chunks, strict=True):
            if key not in measured:
                measured[key] = _measure_chunk(config, chunk)
        return [measured[key] for key in keys]


def _measure_chunk(config: RunConfig, chunk: ModelChunk) -> _Chunk:
    _lower(chunk, config.dtype)
    for parameter in chunk.parameters():
        parameter.register_post_accumulate_grad_hook(_forget_gradient)
    buffers = _bytes_of_buffers()
    with LiveBytes() as live:
        first, logits = _under_way(config, chunk)
        one = live.live
        second, _ = _under_way(config, chunk)
        held = live.live - one
        first.backward(torch.empty_like(first) if not chunk.post_process else None)
        del first, second
        chunk.set_input_tensor(None)
    shared = _bytes_of_buffers() - buffers
    if config.training.fused_linear_log_probs and chunk.post_process:
        # The gradient of the output layer in float32 and in the weights' dtype, and a chunk of logits.
        rows = chunk.vocab_size // chunk.config.tensor_model_parallel_size
        weight = rows * chunk.config.hidden_size
        logits = int(weight * (4 + chunk.config.params_dtype.itemsize) + 4 * CHUNK_TOKENS * rows)
    sizes = [(number_of(parameter), getattr(parameter, "allreduce", True)) for parameter in chunk.parameters()]
    dense = of_critic = sum(size for size, is_dense in sizes if is_dense)
    if chunk.post_process:
        head = sum(parameter.numel() for parameter in chunk.output_layer.parameters())
        of_critic += int(chunk.config.hidden_size) - head
    return _Chunk(
        dense=dense,
        experts=sum(size for size, is_dense in sizes if not is_dense),
        of_critic=of_critic,
        shared=shared,
        kept=one - held - shared,
        held=held,
        # The second micro-batch waits: it is not part of the peak.
        peak=live.peak - one,
        logits=logits,
    )


def _under_way(config: RunConfig, chunk: ModelChunk) -> tuple[Tensor, int]:
    """Run a micro-batch forward. Returns its output (the last stage's loss), and the bytes of logits with gradient.

    Layers of experts keep tensors of their newest micro-batch. So the bytes of a waiting micro-batch are the
    difference between two micro-batches and one, not between one and none.
    """
    numbers, parallel = batch_numbers(config), config.parallel
    rows, length = numbers["rows_of_a_micro_batch"], numbers["tokens_of_a_row"] // parallel.context_parallel_size
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    if not chunk.pre_process:
        part = length // parallel.tensor_model_parallel_size if parallel.sequence_parallel else length
        chunk.set_input_tensor(
            torch.zeros(part, rows, config.transformer.hidden_size, dtype=config.dtype, requires_grad=True)
        )
    found = processed(chunk, partial(_loss, config), tokens, tokens, None, labels=tokens, loss_mask=tokens)
    return found if chunk.post_process else (found, 0)


def _loss(
    run: RunConfig,
    *,
    hidden_states: Tensor,
    output_layer: torch.nn.Module,
    output_weight: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, int]:
    """The loss, and the bytes of logits with gradient; arguments of Megatron's ``output_processor``."""
    on_cpu = run.launch.on_cpu
    if run.training.fused_linear_log_probs:
        weight = output_layer.weight if output_weight is None else output_weight
        return _LogProbs.apply(hidden_states, weight, on_cpu), 0  # type: ignore[no-untyped-call]
    logits, _ = output_layer(hidden_states, weight=output_weight, runtime_gather_output=False)
    loss = _LogProbs.apply(logits, None, on_cpu)  # type: ignore[no-untyped-call]
    return loss, 2 * logits.numel() * logits.element_size()


def _bytes_of_buffers() -> int:
    from megatron.core.parallel_state import get_global_memory_buffer

    return sum(buffer.nbytes for buffer in get_global_memory_buffer().buffer.values())


def _lower(chunk: ModelChunk, dtype: torch.dtype) -> None:
    """Cast all parameters, as Megatron's wrapper of the policy does; learned positions are made in float32."""
    for module in chunk.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dtype != dtype:
                setattr(module, name, torch.nn.Parameter(parameter.detach().to(dtype)))


class _LogProbs(torch.autograd.Function):
    """Memory of the log-probs: the logits' gradient, or, from hidden states, one chunk of logits at a time."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, weight: Tensor | None, on_cpu: bool) -> Tensor:
        ctx.save_for_backward(output, weight)
        ctx.on_cpu = on_cpu
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        output, weight = ctx.saved_tensors
        gradient = torch.empty_like(output)
        if weight is None:
            _work(output.numel() // output.shape[-1], output.shape[-1], ctx.on_cpu)
            return gradient, None, None
        added_up = torch.empty_like(weight, dtype=torch.float32)
        logits = torch.empty(CHUNK_TOKENS, weight.shape[0], dtype=output.dtype)
        _work(CHUNK_TOKENS, weight.shape[0], ctx.on_cpu)
        del logits
        return gradient, added_up.to(weight.dtype), None


def _work(rows: int, width: int, on_cpu: bool) -> None:
    """Two scratch buffers for a block of rows on a CPU; a GPU's kernels need none."""
    if on_cpu:
        torch.empty(2, min(rows, max(LEAST_ROWS, EAGER_ELEMENTS // width)), width, dtype=torch.float32)


def _forget_gradient(parameter: Tensor) -> None:
    """Drop the gradient, as Megatron's DDP does after adding it to its buffer."""
    parameter.grad = None


def _stage_memory(config: RunConfig, stage: int, chunks: Sequence[_Chunk]) -> StageMemory:
    parameters = sum(chunk.dense + chunk.experts for chunk in chunks)
    weights = parameters * config.dtype.itemsize
    order = _in_flight(config, stage, len(chunks))
    dynamic = dynamic_bytes(chunks, order)
    logits = min(_at_work(chunks).logits, dynamic)
    tokens = batch_numbers(config)["sequences_of_a_replica"] * config.training.seq_length
    optimizer = _optimizer_bytes(config, chunks)
    if config.training.optimizer_offload and not config.launch.on_cpu:
        optimizer = max(0, optimizer - dynamic)  # it comes after the activations are gone
    return StageMemory(
        stage=stage,
        parameters=parameters,
        weights=weights,
        gradients=parameters * _gradient_bytes(config),
        optimizer=optimizer,
        # On GPUs it waits in host memory, and takes the place of the policy to score.
        reference=weights if config.needs_reference and config.launch.on_cpu else 0,
        critic=_critic_bytes(config, chunks, dynamic, logits),
        batch=tokens * _SAMPLED_BYTES + tokens // config.parallel.context_parallel_size * _LOCAL_BYTES,
        activations=dynamic - logits,
        logits=logits,
        in_flight=len(order),
    )


def dynamic_bytes(chunks: Sequence[_Chunk], order: Sequence[int]) -> int:
    """Peak bytes of activations and logits: one micro-batch at work while the others wait.

    ``order`` has the chunk's index for each micro-batch in flight, in the order of their forwards.
    """
    waiting = sum(chunks[index].held for index in order[:-1])
    staying = sum(chunk.kept for chunk in chunks) + max(chunk.shared for chunk in chunks)
    return waiting + _at_work(chunks).peak + staying


def _at_work(chunks: Sequence[_Chunk]) -> _Chunk:
    return max(chunks, key=lambda chunk: chunk.peak)


def _gradient_bytes(config: RunConfig) -> int:
    return 4 if config.megatron.given.get("grad_reduce_in_fp32", True) else config.dtype.itemsize


def _critic_bytes(config: RunConfig, chunks: Sequence[_Chunk], dynamic: int, logits: int) -> int:
    """Bytes that a critic adds to the policy's peak; ``dynamic`` has activations and logits, a critic has no logits."""
    if config.critic is None:
        return 0
    own = [dataclasses.replace(chunk, dense=chunk.of_critic) for chunk in chunks]
    parameters = sum(chunk.dense + chunk.experts for chunk in own)
    model, optimizer = parameters * (config.dtype.itemsize + _gradient_bytes(config)), _optimizer_bytes(config, own)
    # On a CPU --critic-offload frees nothing.
    if not config.critic.critic_offload or config.launch.on_cpu:
        return model + optimizer
    at_work = max(model + dynamic - logits, model + optimizer)
    return max(0, at_work - dynamic)


def _in_flight(config: RunConfig, stage: int, chunks: int) -> list[int]:
    """Index of the chunk of each micro-batch in flight by Megatron's schedules, in the order of their forwards."""
    stages, number = config.parallel.pipeline_model_parallel_size, batch_numbers(config)["micro_batches"]
    if chunks == 1:
        return [0] * min(number, stages - stage)
    under_way = min(2 * (stages - stage - 1) + (chunks - 1) * stages + 1, number * chunks)
    return [index // stages % chunks for index in range(under_way)]


def _optimizer_bytes(config: RunConfig, chunks: Sequence[_Chunk]) -> int:
    """Bytes of moments and float32 weights on this rank."""
    dense, experts = sum(chunk.dense for chunk in chunks), sum(chunk.experts for chunk in chunks)
    if config.optimizer.use_distributed_optimizer:
        parallel = config.parallel
        stage = config.launch.world_size // parallel.pipeline_model_parallel_size
        dense = -(-dense * parallel.tensor_model_parallel_size // stage)
        experts = -(-experts * config.expert_tensor_parallel_size * parallel.expert_model_parallel_size // stage)
    return round(_state_bytes(config) * (dense + experts))


def _state_bytes(config: RunConfig) -> float:
    """Bytes of optimizer state on the device for one parameter."""
    given = config.megatron.given
    moments = ("exp_avg_dtype", "exp_avg_sq_dtype") if config.optimizer.optimizer == "adam" else ("exp_avg_dtype",)
    names = [*moments, *["main_params_dtype"] * (config.dtype is not torch.float32)]
    kinds = given if given.get("use_precision_aware_optimizer") else {}
    each = sum(_ITEM_BYTES[kinds.get(name, "fp32")] for name in names)
    offloaded = given.get("optimizer_offload_fraction", 1.0) if given.get("optimizer_cpu_offload") else 0.0
    return float(each * (1 - offloaded))
