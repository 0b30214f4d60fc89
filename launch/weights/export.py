"""Stream the weights of a sharded model, as Hugging Face's tensors, one after the other.

For each parameter, the owner stage gathers the TP shards on its first TP rank, shards of an expert over the experts'
own tensor-parallel group. For the engine of a replica these ranks send on: tensors of an expert are broadcast over its
expert-parallel group, and all tensors go to the first stage. Beside its own weights, no rank holds more than about one
layer, one expert or the embeddings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.weights.family import Rule
from megatron_rc.launch.weights.stacked_tensors import stack_entries
from megatron_rc.launch.weights.units import (
    ExpertGroups,
    Unit,
    check_complete,
    find_parameter,
    own_weights,
    units_of,
)
from megatron_rc.parallel.groups import Group, ParallelGroups, group_rank, group_size


def export_weights(
    chunks: Sequence[torch.nn.Module],
    config: RunConfig,
    groups: ParallelGroups,
    experts: ExpertGroups,
) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(Hugging Face name, whole tensor)`` on the first rank of the replica, nothing on the others.

    Every rank must exhaust the iterator, because it makes the collectives. The tensors share no memory with the model,
    and the iterator releases each before it makes the next. ``chunks`` are this rank's models, unwrapped.

    Collectives: a gather over ``tp``, or the experts' ``tp``, for each parameter; a broadcast over ``ep`` for each
    tensor of an expert; for each tensor of a later stage a send to the first stage over ``pp``.

    Raises RuntimeError on every rank, before the first tensor, if no rule names a parameter of the model.
    """
    units = units_of(config)
    parameters = own_weights(chunks, [unit for unit in units if unit.is_here(groups, experts)])
    return stack_entries(_stream(parameters, units, config, groups, experts), _num_experts(config))


def _num_experts(config: RunConfig) -> int:
    return 0 if config.experts is None else config.experts.num_moe_experts


def export_own(
    parameters: Sequence[Mapping[str, Tensor]],
    units: Sequence[Unit],
    config: RunConfig,
    groups: ParallelGroups,
    experts: ExpertGroups,
) -> Iterator[tuple[str, Tensor]]:
    """Return an iterator over ``(Hugging Face name, whole tensor)`` of units that lie on this rank.

    Layers come on the first rank of each stage, experts on the first rank of their tensor-parallel group; the other
    ranks yield nothing. A stack of experts comes only if this rank holds all of them. Every rank must exhaust the
    iterator. ``parameters`` are :func:`own_weights`.

    Collectives: a gather over ``tp``, or the experts' ``tp``, for each parameter.
    """
    return stack_entries(_own_tensors(parameters, units, config, groups, experts), _num_experts(config))


def _own_tensors(
    parameters: Sequence[Mapping[str, Tensor]],
    units: Sequence[Unit],
    config: RunConfig,
    groups: ParallelGroups,
    experts: ExpertGroups,
) -> Iterator[tuple[str, Tensor]]:
    for unit in units:
        if unit.expert_rank is None and group_rank(groups.cp) > 0:
            continue
        tp_group = unit.tp_group(groups, experts)
        for rule in unit.rules:
            names = iter(unit.names(rule))
            for tensor in _whole_tensors(parameters[unit.chunk], unit, rule, config, tp_group, None):
                yield next(names), tensor
                del tensor


def export_parameters(parameters: Mapping[str, Tensor], config: RunConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(Hugging Face name, tensor)`` of an unsharded model; reads each parameter only when it is needed."""
    units = units_of(config)
    check_complete([parameters], units)
    tensors = _stream([parameters], units, config, ParallelGroups(), ExpertGroups())
    return stack_entries(tensors, _num_experts(config))


def _stream(
    parameters: Sequence[Mapping[str, Tensor]],
    units: Sequence[Unit],
    config: RunConfig,
    groups: ParallelGroups,
    experts: ExpertGroups,
) -> Iterator[tuple[str, Tensor]]:
    tp_rank = group_rank(groups.tp)
    pp_rank = group_rank(groups.pp)
    # CP ranks hold equal weights, experts excepted, so one of them sends for the replica.
    speaks = tp_rank == 0 and group_rank(groups.cp) == 0
    for unit in units:
        takes_part = group_rank(groups.cp) == 0 or unit.expert_rank is not None
        for rule in unit.rules:
            tensors: Iterator[Tensor] = iter(())
            if unit.stage == pp_rank and takes_part:
                tp_group = unit.tp_group(groups, experts)
                tensors = _whole_tensors(parameters[unit.chunk], unit, rule, config, tp_group, experts.ep)
            if groups.pp is not None and speaks and unit.stage != 0 and pp_rank in (0, unit.stage):
                tensors = _to_first_stage(tensors, rule, unit.stage, config, groups.pp)
            names = iter(unit.names(rule))
            for tensor in tensors:
                if speaks and pp_rank == 0:
                    yield next(names), tensor
                del tensor


def _whole_tensors(
    parameters: Mapping[str, Tensor],
    unit: Unit,
    rule: Rule,
    config: RunConfig,
    tp_group: Group | None,
    ep_group: Group | None,
) -> Iterator[Tensor]:
    """Tensors of a rule on the first TP ranks of its stage; the other TP ranks only join the gather.

    Without an EP group this rank must hold the unit.
    """
    owner = unit.expert_rank
    # Another rank's expert has the same shapes as this rank's expert at the same place.
    shard = find_parameter(parameters, unit, rule)
    here = ep_group is None or owner in (None, group_rank(ep_group))
    shards = _gather(shard, tp_group) if here else shard.new_empty(group_size(tp_group), *shard.shape, device="meta")
    if group_rank(tp_group) > 0:
        return
    for tensor in rule.conversion.join(shards, config):
        whole = _own(tensor, shard) if here else torch.empty(tensor.shape, dtype=tensor.dtype, device=shard.device)
        del tensor
        if owner is not None and ep_group is not None and group_size(ep_group) > 1:
            dist.broadcast(whole, dist.get_global_rank(ep_group, owner), group=ep_group)
        yield whole
        del whole


def _gather(shard: Tensor, group: Group | None) -> Tensor:
    """Shards of all TP ranks ``[tp, ...]`` on the first one; an empty tensor on the others."""
    if group is None or group_size(group) == 1:
        return shard.unsqueeze(0)
    shard = shard.contiguous()
    first = group_rank(group) == 0
    shards = shard.new_empty(group_size(group) * first, *shard.shape)
    dist.gather(shard, list(shards.unbind(0)) if first else None, dst=dist.get_global_rank(group, 0), group=group)
    return shards


def _own(tensor: Tensor, parameter: Tensor) -> Tensor:
    """The tensor, contiguous, in memory that it does not share with the parameter."""
    tensor = tensor.contiguous()
    is_view = tensor.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
    return tensor.clone() if is_view else tensor


def _to_first_stage(
    tensors: Iterator[Tensor], rule: Rule, source: int, config: RunConfig, group: Group
) -> Iterator[Tensor]:
    """Send a rule's tensors, of one or two dimensions, from stage ``source``; yield them on the first stage."""
    if group_rank(group) == source:
        for tensor in tensors:
            shape = torch.tensor([*tensor.shape, 0][:2], device=tensor.device)
            dist.send(shape, dist.get_global_rank(group, 0), group=group)
            dist.send(tensor, dist.get_global_rank(group, 0), group=group)
            del tensor
        return
    device = config.launch.device
    dtype = torch.float32 if rule.is_float32 else config.dtype
    for _ in rule.hugging_face:
        shape = torch.zeros(2, dtype=torch.int64, device=device)
        dist.recv(shape, dist.get_global_rank(group, source), group=group)
        size = [length for length in shape.tolist() if length]
        received = torch.empty(size, dtype=dtype, device=device)
        dist.recv(received, dist.get_global_rank(group, source), group=group)
        yield received
        del received
