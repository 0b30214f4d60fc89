"""Shards of Megatron-Core's model chunks, in any layout: each part of a gradient is counted on one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron_rc.attribution.shards import Shard
from megatron_rc.parallel.groups import group_rank

# Name under which Megatron's last stage has its copy of tied embeddings, and the name of the embeddings.
_TIED_COPY = "output_layer.weight"
_EMBEDDING = "embedding.word_embeddings.weight"
_NOTHING = range(0)


def megatron_shards(chunks: Sequence[torch.nn.Module], *, reduced: bool = False) -> list[Shard]:
    """Return this rank's parameters under their names in the whole model, as the first stage would name its own.

    Layers and experts have their numbers in the whole model; the last stage's copy of tied embeddings has the name of
    the embeddings. The group of the sum is all ranks of the model (``torch.distributed.group.WORLD``).

    Gradients are products' sums either way, so that local gradients need no reduction at all: leave out
    ``finalize_model_grads``, and keep DDP from reducing (``no_sync``).

    Args:
        chunks: this rank's model chunks, in DDP or not.
        reduced: False: each rank has the gradients that its own tokens made. True: ``finalize_model_grads`` has
            reduced them; with the distributed optimizer each rank then counts the part of the buffers that is its own.

    Raises:
        ValueError: ``reduced``, and several instances of the distributed optimizer share the model.
    """
    shards = []
    for chunk in chunks:
        model = _unwrapped(chunk)
        names = _names_of_modules(model)
        owned = _owned_ranges(chunk) if reduced else {}
        for local_name, weight in model.named_parameters():
            name = _name_in_whole_model(model, names, local_name)
            if reduced:
                counted = owned.get(weight, _whole_on_first_replica(weight))
                is_copy = local_name == _TIED_COPY and name == _EMBEDDING
                if is_copy or not _is_first_of_tensor_copies(weight):
                    counted = _NOTHING
            else:
                is_partial = _is_partial_over_tensor_ranks(model.config, local_name, weight)
                counted = None if is_partial or _is_first_of_tensor_copies(weight) else _NOTHING
            shards.append(Shard(name, weight, counted))
    return shards


def _unwrapped(chunk: Any) -> Any:
    """The model inside of DDP and Float16Module."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _names_of_modules(model: Any) -> dict[str, str]:
    """Prefixes of layers and experts on this rank, and their prefixes in the whole model."""
    names = {}
    for local_layer, layer in enumerate(model.decoder.layers):
        local_prefix = f"decoder.layers.{local_layer}."
        # Megatron counts layers from 1.
        prefix = f"decoder.layers.{layer.layer_number - 1}."
        names[local_prefix] = prefix
        experts = getattr(getattr(layer, "mlp", None), "local_expert_indices", ())
        for local_expert, expert in enumerate(experts):
            inside = "mlp.experts."
            names[f"{local_prefix}{inside}local_experts.{local_expert}."] = f"{prefix}{inside}local_experts.{expert}."
            for linear in ("linear_fc1", "linear_fc2"):
                for kind in ("weight", "bias"):
                    module = f"{inside}{linear}.{kind}"
                    names[f"{local_prefix}{module}{local_expert}"] = f"{prefix}{module}{expert}"
    return names


def _name_in_whole_model(model: Any, names: dict[str, str], local_name: str) -> str:
    """The name of a chunk's parameter in the whole model."""
    is_tied = getattr(model, "share_embeddings_and_output_weights", False)
    if local_name == _TIED_COPY and is_tied:
        return _EMBEDDING
    if local_name in names:  # an expert's weight in a grouped product
        return names[local_name]
    # The longest prefix is an expert's, the shorter one its layer's.
    prefixes = [prefix for prefix in names if prefix.endswith(".") and local_name.startswith(prefix)]
    if not prefixes:
        return local_name
    longest = max(prefixes, key=len)
    return names[longest] + local_name.removeprefix(longest)


def _is_partial_over_tensor_ranks(config: Any, name: str, weight: torch.nn.Parameter) -> bool:
    """Whether each TP rank has the gradient of its own tokens or heads alone, which Megatron sums when it finalizes.

    As in megatron-core 0.16 to 0.19, ``distributed/finalize_model_grads.py``.
    """
    if config.sequence_parallel and getattr(weight, "sequence_parallel", False):
        return True
    return bool(config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name))


def _is_first_of_tensor_copies(weight: torch.nn.Parameter) -> bool:
    """Whether this TP rank has a part of its own, or is the first of those with copies."""
    from megatron.core import parallel_state

    if getattr(weight, "tensor_model_parallel", False):
        return True
    if _is_expert(weight):
        return group_rank(parallel_state.get_expert_tensor_parallel_group()) == 0
    return group_rank(parallel_state.get_tensor_model_parallel_group()) == 0


def _whole_on_first_replica(weight: torch.nn.Parameter) -> range | None:
    """All elements on the first rank of those with equal reduced gradients, none on the others."""
    from megatron.core import parallel_state

    if _is_expert(weight):
        replicas = parallel_state.get_expert_data_parallel_group()
    else:
        replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return None if group_rank(replicas) == 0 else _NOTHING


def _is_expert(weight: torch.nn.Parameter) -> bool:
    return not getattr(weight, "allreduce", True)


def _owned_ranges(chunk: Any) -> dict[torch.nn.Parameter, range]:
    """Elements of each parameter whose reduced gradients lie on this rank, with the distributed optimizer."""
    if not chunk.ddp_config.use_distributed_optimizer:
        return {}
    if chunk.ddp_config.num_distributed_optimizer_instances > 1:
        raise ValueError("num_distributed_optimizer_instances > 1: attribute with gradients that are not reduced")
    owned: dict[torch.nn.Parameter, range] = {}
    for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
        for bucket in buffer.buckets:
            owned.update(_owned_of_bucket(buffer, bucket))
    return owned


def _owned_of_bucket(buffer: Any, bucket: Any) -> Iterator[tuple[torch.nn.Parameter, range]]:
    """The range of each of a bucket's parameters in this rank's equal share of the bucket."""
    size = bucket.grad_data.numel() // buffer.data_parallel_world_size
    begin = bucket.offset + size * group_rank(buffer.data_parallel_group)
    for weight in bucket.params_list:
        first, last, _ = buffer.param_index_map[weight]
        start = max(first, begin)
        stop = min(last, begin + size)
        yield weight, range(start - first, stop - first) if start < stop else _NOTHING
