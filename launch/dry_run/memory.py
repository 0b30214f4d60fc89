"""Peak memory of a rank of each pipeline stage, by kind, by formulas.

Nothing is built or run. Megatron's schedule says how many micro-batches wait for their backward at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_rc.launch.dry_run.activations import ActivationSizes, ChunkActivations
from megatron_rc.launch.dry_run.batches import batch_numbers
from megatron_rc.launch.dry_run.parameters import Parameters, chunk_parameters
from megatron_rc.launch.run_config import RunConfig

_ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
# Bytes a token of the rollout batch: of whole sequences as sampled, and of this rank's part for training.
_SAMPLED_BYTES = 17
_LOCAL_BYTES = 46


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
    # For a divergence, the teacher's output layer and last hidden states. Its other weights, and with prompts of its
    # own the hidden states of the replica, are not there together with the policy's activations and logits: they count
    # as far as they exceed these. On a CPU all its weights.
    teacher: int
    batch: int  # the rollout batch
    activations: int  # the most at once, of waiting micro-batches and the one at work
    logits: int  # logits with their gradients, or the chunks that replace them
    in_flight: int  # the most micro-batches at once between forward and backward

    @property
    def peak(self) -> int:
        """Sum of all kinds."""
        return sum(getattr(self, name) for name in KINDS)


KINDS = ("weights", "gradients", "optimizer", "reference", "critic", "teacher", "batch", "activations", "logits")


def stage_memories(config: RunConfig) -> list[StageMemory]:
    """Return the memory of a rank of every pipeline stage, in the order of the stages."""
    return [_stage_memory(config, stage) for stage in range(config.parallel.pipeline_model_parallel_size)]


@dataclass(frozen=True)
class _Chunk:
    """One virtual stage of a rank."""

    policy: Parameters
    critic: Parameters
    activations: ChunkActivations


def _chunks_of_stage(config: RunConfig, stage: int) -> list[_Chunk]:
    """Return the virtual stages of a rank, in the order of their layers."""
    stages = config.parallel.pipeline_model_parallel_size
    layers_of_chunks = config.layers_of_chunks
    sizes = ActivationSizes(config)
    chunks = []
    first_layer = 0
    for number, layers in enumerate(layers_of_chunks):
        expert_layers = config.layers_with_experts[first_layer : first_layer + layers]
        first_layer += layers
        if number % stages != stage:
            continue
        is_first = number == 0
        is_last = number == len(layers_of_chunks) - 1
        chunk = _Chunk(
            policy=chunk_parameters(config, expert_layers, is_first=is_first, is_last=is_last),
            critic=chunk_parameters(config, expert_layers, is_first=is_first, is_last=is_last, is_critic=True),
            activations=sizes.chunk(expert_layers, is_first=is_first, is_last=is_last),
        )
        chunks.append(chunk)
    return chunks


def _stage_memory(config: RunConfig, stage: int) -> StageMemory:
    chunks = _chunks_of_stage(config, stage)
    activations = [chunk.activations for chunk in chunks]
    of_policy = [chunk.policy for chunk in chunks]
    parameters = sum(part.total for part in of_policy)
    weights = parameters * config.dtype.itemsize
    order = _in_flight(config, stage, len(chunks))
    dynamic = dynamic_bytes(activations, order)
    logits = min(_largest(activations).logits, dynamic)
    tokens = batch_numbers(config)["sequences_of_a_replica"] * config.training.seq_length
    optimizer = _optimizer_bytes(config, of_policy)
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
        critic=_critic_bytes(config, [chunk.critic for chunk in chunks], dynamic, logits),
        teacher=_teacher_bytes(config, stage, tokens, dynamic),
        batch=tokens * _SAMPLED_BYTES + tokens // config.parallel.context_parallel_size * _LOCAL_BYTES,
        activations=dynamic - logits,
        logits=logits,
        in_flight=len(order),
    )


def dynamic_bytes(chunks: Sequence[ChunkActivations], order: Sequence[int]) -> int:
    """Return the peak bytes of activations and logits: one micro-batch at work while the others wait.

    ``order`` has the chunk's index for each micro-batch in flight, in the order of their forwards.
    """
    waiting = sum(chunks[index].saved for index in order[:-1])
    return waiting + _largest(chunks).peak + max(chunk.shared for chunk in chunks)


def _largest(chunks: Sequence[ChunkActivations]) -> ChunkActivations:
    """Return the chunk that needs most while it is at work."""
    return max(chunks, key=lambda chunk: chunk.peak)


def _gradient_bytes(config: RunConfig) -> int:
    return 4 if config.megatron.given.get("grad_reduce_in_fp32", True) else config.dtype.itemsize


def _critic_bytes(config: RunConfig, chunks: Sequence[Parameters], dynamic: int, logits: int) -> int:
    """Return the bytes that a critic adds to the policy's peak.

    ``dynamic`` has the policy's activations and logits; a critic has no logits.
    """
    if config.critic is None:
        return 0
    parameters = sum(chunk.total for chunk in chunks)
    model = parameters * (config.dtype.itemsize + _gradient_bytes(config))
    optimizer = _optimizer_bytes(config, chunks)
    # On a CPU --critic-offload frees nothing.
    if not config.critic.critic_offload or config.launch.on_cpu:
        return model + optimizer
    at_work = max(model + dynamic - logits, model + optimizer)
    return max(0, at_work - dynamic)


def _teacher_bytes(config: RunConfig, stage: int, tokens: int, dynamic: int) -> int:
    """Return the bytes that teachers add to the policy's peak; one of them is on the device at a time.

    ``tokens`` are those of a replica's rollout batch; ``dynamic`` has the policy's activations and logits.
    """
    parallel = config.parallel
    is_last = stage == parallel.pipeline_model_parallel_size - 1
    size = config.dtype.itemsize
    rows = config.model.padded_vocab_size
    resident = 0
    transient = 0
    for teacher in config.teachers:
        weights = sum(chunk.policy.total for chunk in _chunks_of_stage(teacher.config, stage)) * size
        width = teacher.config.transformer.hidden_size
        output_layer = 0
        # A divergence is computed from the output layer and the hidden states; advantages need the log-probs alone.
        if is_last and config.loss.distils:
            output_layer = rows // parallel.tensor_model_parallel_size * width * size
            slices = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
            hidden = tokens // (parallel.context_parallel_size * slices) * width * size
            resident += output_layer + hidden
            # Beside these there are once those of the pass, and those of the whole replica if they are aligned.
            is_aligned = config.distillation is not None and config.distillation.teacher_prompt is not None
            transient = max(transient, hidden + (tokens * width * size if is_aligned else 0))
        # With other rows than the policy's the resident output layer is a copy.
        others = weights - output_layer if teacher.config.model.padded_vocab_size == rows else weights
        transient = max(transient, others)
        if config.launch.on_cpu:
            resident += others
    return resident + max(0, transient - dynamic)


def _in_flight(config: RunConfig, stage: int, chunks: int) -> list[int]:
    """Return the chunk's index of each micro-batch in flight by Megatron's schedules, in the order of the forwards."""
    stages = config.parallel.pipeline_model_parallel_size
    number = batch_numbers(config)["micro_batches"]
    if chunks == 1:
        return [0] * min(number, stages - stage)
    under_way = min(2 * (stages - stage - 1) + (chunks - 1) * stages + 1, number * chunks)
    return [index // stages % chunks for index in range(under_way)]


def _optimizer_bytes(config: RunConfig, chunks: Sequence[Parameters]) -> int:
    """Return the bytes of moments and float32 weights on this rank."""
    dense = sum(chunk.dense for chunk in chunks)
    experts = sum(chunk.experts for chunk in chunks)
    if config.optimizer.use_distributed_optimizer:
        parallel = config.parallel
        stage = config.launch.world_size // parallel.pipeline_model_parallel_size
        dense = -(-dense * parallel.tensor_model_parallel_size // stage)
        experts = -(-experts * config.expert_tensor_parallel_size * parallel.expert_model_parallel_size // stage)
    return round(_state_bytes(config) * (dense + experts))


def _state_bytes(config: RunConfig) -> float:
    """Return the bytes of optimizer state on the device for one parameter."""
    fields = config.megatron.given
    states = ["exp_avg_dtype"]
    if config.optimizer.optimizer == "adam":
        states.append("exp_avg_sq_dtype")
    if config.dtype is not torch.float32:
        states.append("main_params_dtype")
    dtypes = fields if fields.get("use_precision_aware_optimizer") else {}
    state_bytes = sum(_ITEM_BYTES[dtypes.get(state, "fp32")] for state in states)
    offloaded = fields.get("optimizer_offload_fraction", 1.0) if fields.get("optimizer_cpu_offload") else 0.0
    return float(state_bytes * (1 - offloaded))
