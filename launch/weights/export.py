"""Stream the weights of a sharded GPTModel to the rollout engine of its data-parallel replica.

One parameter at a time: the owner stage gathers the TP shards on its first TP rank, which makes the Hugging Face
tensors one after the other and sends each to the first stage, where the engine lives. Those of an expert go from the
rank that has it to the other ranks of its expert-parallel group first. No rank ever holds more than about one layer,
one expert or the embeddings, whichever is the largest, beside its own weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.weights.family import Rule
from megatron_rc.launch.weights.named_weights import named_weights
from megatron_rc.launch.weights.units import Unit, check_complete, check_expert_group, find_parameter, units_of
from megatron_rc.parallel.groups import Group, ParallelGroups, group_rank, group_size


def export_weights(
    chunks: Sequence[torch.nn.Module],
    config: RunConfig,
    groups: ParallelGroups,
    ep_group: Group | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(Hugging Face name, whole tensor)`` on the first rank of the replica, nothing on the others.

    Every rank must exhaust the iterator, since it gathers and sends inside. A tensor that came out shares no memory
    with the model, and nothing else holds it when the next one is made.

    Args:
        chunks: this rank's GPTModels, unwrapped, by virtual stage.
        config: of the run.
        groups: ``tp``, ``cp`` and ``pp`` are used.
        ep_group: the ranks that hold the other experts of the same layers.

    Collectives: one gather over ``tp`` a parameter; a broadcast over ``ep_group`` of every tensor of an expert; from
    stages other than the first, every tensor once over ``pp``.

    Raises:
        RuntimeError: at once, on every rank alike: the model has a parameter that no rule names.
        ValueError: at once: ``ep_group`` has another size than the flags say.
    """
    check_expert_group(config, ep_group)
    parameters = [named_weights(chunk) for chunk in chunks]
    units = units_of(config)
    check_complete(parameters, [unit for unit in units if unit.is_on(group_rank(groups.pp), group_rank(ep_group))])
    return _stream(parameters, units, config, groups, ep_group)


def export_parameters(parameters: Mapping[str, Tensor], config: RunConfig) -> Iterator[tuple[str, Tensor]]:
    """The same of a model that is whole in this process, by its parameters' names; each is looked up when it is due.

    Raises:
        RuntimeError: at once: there is a parameter that no rule names.
    """
    units = units_of(config)
    check_complete([parameters], units)
    return _stream([parameters], units, config, ParallelGroups(), None)


def _stream(
    parameters: Sequence[Mapping[str, Tensor]],
    units: Sequence[Unit],
    config: RunConfig,
    groups: ParallelGroups,
    ep_group: Group | None,
) -> Iterator[tuple[str, Tensor]]:
    tp_rank, pp_rank = group_rank(groups.tp), group_rank(groups.pp)
    # CP ranks hold the same but for their experts, so one of them speaks for the replica.
    speaks = tp_rank == 0 and group_rank(groups.cp) == 0
    for unit in units:
        takes_part = group_rank(groups.cp) == 0 or unit.expert_rank is not None
        for rule in unit.rules:
            tensors: Iterator[Tensor] = iter(())
            if unit.stage == pp_rank and takes_part:
                tensors = _whole_tensors(parameters[unit.chunk], unit, rule, config, groups.tp, ep_group)
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
    """The tensors of a rule on the first TP ranks of its stage; the others take part and get nothing."""
    owner = unit.expert_rank
    # An expert of another rank has the shapes of the one that stands at its place here.
    shard = find_parameter(parameters, unit.prefix, rule)
    here = owner in (None, group_rank(ep_group))
    shards = _gather(shard, tp_group) if here else shard.new_empty(group_size(tp_group), *shard.shape, device="meta")
    if group_rank(tp_group) > 0:
        return
    for tensor in rule.conversion.join(shards, config):
        whole = _own(tensor, shard) if here else torch.empty_like(tensor, device=shard.device)
        del tensor
        if owner is not None and ep_group is not None and group_size(ep_group) > 1:
            dist.broadcast(whole, dist.get_global_rank(ep_group, owner), group=ep_group)
        yield whole
        del whole


def _gather(shard: Tensor, group: Group | None) -> Tensor:
    """The shards of all TP ranks ``[tp, ...]`` on the first one; nothing of use elsewhere."""
    if group is None or group_size(group) == 1:
        return shard.unsqueeze(0)
    shard = shard.contiguous()
    first = group_rank(group) == 0
    shards = shard.new_empty(group_size(group) * first, *shard.shape)
    dist.gather(shard, list(shards.unbind(0)) if first else None, dst=dist.get_global_rank(group, 0), group=group)
    return shards


def _own(tensor: Tensor, parameter: Tensor) -> Tensor:
    """The tensor in one piece, in memory that is not the parameter's."""
    tensor = tensor.contiguous()
    is_view = tensor.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
    return tensor.clone() if is_view else tensor


def _to_first_stage(
    tensors: Iterator[Tensor], rule: Rule, source: int, config: RunConfig, group: Group
) -> Iterator[Tensor]:
    """Hand the rule's tensors, of one or two dimensions, from stage ``source`` to the first stage, which gets them."""
    if group_rank(group) == source:
        for tensor in tensors:
            shape = torch.tensor([*tensor.shape, 0][:2], device=tensor.device)
            dist.send(shape, dist.get_global_rank(group, 0), group=group)
            dist.send(tensor, dist.get_global_rank(group, 0), group=group)
            del tensor
        return
    device, dtype = config.launch.device, torch.float32 if rule.is_float32 else config.dtype
    for _ in rule.hugging_face:
        shape = torch.zeros(2, dtype=torch.int64, device=device)
        dist.recv(shape, dist.get_global_rank(group, source), group=group)
        size = [length for length in shape.tolist() if length]
        received = torch.empty(size, dtype=dtype, device=device)
        dist.recv(received, dist.get_global_rank(group, source), group=group)
        yield received
        del received
