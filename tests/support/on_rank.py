"""Helpers of functions that run on one rank of the pool: its place, its collectives, and the error that it raises."""

import contextlib
import types
from unittest import mock

import torch.distributed as dist

from megatron_rc.parallel import ParallelGroups, collectives
from megatron_rc.parallel.groups import group_rank, group_size

COLLECTIVES = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor")


def cp_place():
    """This rank's context-parallel arguments of a layout."""
    cp = ParallelGroups.from_megatron().cp
    return {"cp_rank": group_rank(cp), "cp_size": group_size(cp)}


def all_ranks():
    """The group of all ranks; None in a process without groups."""
    return dist.group.WORLD if dist.is_initialized() else None


def shard_of(tensor, dim=-1):
    """This rank's part of a tensor that all ranks split, a copy."""
    return tensor.chunk(group_size(all_ranks()), dim=dim)[group_rank(all_ranks())].clone()


def outcome(function, *args, **kwargs):
    """The function's result, or the message of the ValueError that it raises."""
    try:
        return function(*args, **kwargs)
    except ValueError as error:
        return str(error)


@contextlib.contextmanager
def recorded(of_library=False):
    """(kind, ranks, numbers) of the collectives inside the block.

    Args:
        of_library: without the model's: those that Megatron calls, and those over TP, which make log-probs.
    """
    seen = []

    def watched(name):
        original = getattr(dist, name)

        def call(tensor, *args, group, **kwargs):
            if not (of_library and group is tensor_parallel_group()):
                kind = str(kwargs.get("op", "SUM")).split(".")[-1] if name == "all_reduce" else name.upper()
                seen.append((kind, group_size(group), tensor.numel()))
            return original(tensor, *args, group=group, **kwargs)

        return call

    calls = {name: watched(name) for name in COLLECTIVES}
    stand_in = types.SimpleNamespace(**vars(dist) | calls)
    with mock.patch.object(collectives, "dist", stand_in) if of_library else mock.patch.multiple(dist, **calls):
        yield seen


def tensor_parallel_group():
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()
