"""Stream the weights of a sharded GPTModel to the rollout engine of its data-parallel replica.

One layer at a time: the owner stage gathers the TP shards on its first TP rank, renames them, and sends them to the
first stage, where the engine lives. No rank ever holds more than one layer beside its own weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.launch.weights.units import check_complete, find_parameter, units_of
from megatron_rc.parallel.groups import Group, ParallelGroups, group_rank, group_size


def export_weights(
    chunks: Sequence[torch.nn.Module], args: argparse.Namespace, groups: ParallelGroups
) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(Hugging Face name, whole tensor)`` on the first rank of the replica, nothing on the others.

    Every TP and PP rank whose CP rank is 0 must exhaust the iterator, since it gathers and sends inside.

    Args:
        chunks: this rank's GPTModels, unwrapped, by virtual stage.
        args: the validated flags.
        groups: ``tp`` and ``pp`` are used.

    Collectives: one gather over ``tp`` a parameter, and its tensors once over ``pp`` from stages other than the first.

    Raises:
        RuntimeError: the model has a parameter that no rule names.
    """
    parameters = [{name: parameter.detach() for name, parameter in chunk.named_parameters()} for chunk in chunks]
    tp_rank, pp_rank = group_rank(groups.tp), group_rank(groups.pp)
    units = units_of(args)
    check_complete(parameters, [unit for unit in units if unit.stage == pp_rank])
    for unit in units:
        for rule in unit.rules:
            tensors: list[Tensor] | None = None
            if unit.stage == pp_rank:
                shard = find_parameter(parameters[unit.chunk], unit.prefix, rule)
                shards = _gather(shard, groups.tp)
                tensors = (
                    [tensor.contiguous() for tensor in rule.conversion.join(shards, args)] if tp_rank == 0 else None
                )
            if groups.pp is not None and tp_rank == 0 and unit.stage != 0 and pp_rank in (0, unit.stage):
                tensors = _send_to_first(tensors, len(rule.hugging_face), unit.stage, args, groups.pp)
            if tp_rank == 0 and pp_rank == 0 and tensors is not None:
                for name, tensor in zip(rule.hugging_face, tensors, strict=True):
                    yield name.format(layer=unit.layer), tensor


def _gather(shard: Tensor, group: Group | None) -> list[Tensor]:
    """The shards of all TP ranks, on the first one; an empty list elsewhere."""
    if group is None or group_size(group) == 1:
        return [shard]
    shard = shard.contiguous()
    first = group_rank(group) == 0
    shards = [torch.empty_like(shard) for _ in range(group_size(group))] if first else None
    dist.gather(shard, shards, dst=dist.get_global_rank(group, 0), group=group)
    return shards or []


def _send_to_first(
    tensors: list[Tensor] | None, count: int, source: int, args: argparse.Namespace, group: Group
) -> list[Tensor] | None:
    """Hand ``count`` tensors of one or two dimensions from stage ``source`` to the first stage."""
    if tensors is not None:
        for tensor in tensors:
            shape = torch.tensor([*tensor.shape, 0][:2], device=tensor.device)
            dist.send(shape, dist.get_global_rank(group, 0), group=group)
            dist.send(tensor, dist.get_global_rank(group, 0), group=group)
        return None
    received = []
    device = torch.device("cpu") if args.on_cpu else torch.device("cuda", torch.cuda.current_device())
    for _ in range(count):
        shape = torch.zeros(2, dtype=torch.int64, device=device)
        dist.recv(shape, dist.get_global_rank(group, source), group=group)
        size = [length for length in shape.tolist() if length]
        dtype = torch.bfloat16 if args.bf16 else torch.float32
        received.append(torch.empty(size, dtype=dtype, device=device))
        dist.recv(received[-1], dist.get_global_rank(group, source), group=group)
    return received
