"""The few collectives that the correction makes. None is made for a group of size 1."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.parallel.groups import Group, group_size


def all_reduce_sum(tensor: Tensor, group: Group | None) -> Tensor:
    """The sum over the group, on every rank of it, as a new tensor.

    Collectives: one all-reduce of the tensor's size. Gradient: none.
    """
    return _all_reduce(tensor, group, dist.ReduceOp.SUM)


def all_reduce_max(tensor: Tensor, group: Group | None) -> Tensor:
    """The element-wise maximum over the group, on every rank of it, as a new tensor.

    Collectives: one all-reduce of the tensor's size. Gradient: none.
    """
    return _all_reduce(tensor, group, dist.ReduceOp.MAX)


def _all_reduce(tensor: Tensor, group: Group | None, operation: dist.ReduceOp.RedOpType) -> Tensor:
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    if group_size(group) > 1:
        dist.all_reduce(result, op=operation, group=group)
    return result


def broadcast(tensor: Tensor, source: int, group: Group | None) -> Tensor:
    """The tensor of the group's rank ``source``, on every rank of it, as a new tensor.

    Args:
        tensor: what to send; on the other ranks anything of the same shape and dtype.
        source: a rank inside the group, not a global one.
        group: who takes part.

    Collectives: one broadcast of the tensor's size. Gradient: none.
    """
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    if group is not None and group_size(group) > 1:
        dist.broadcast(result, src=dist.get_global_rank(group, source), group=group)
    return result


def first_text(text: str | None, group: Group | None) -> str | None:
    """The text of the first rank that has one, on every rank of the group: for the message of an error.

    Collectives: see :func:`every_text`.
    """
    return next((one for one in every_text(text, group) if one is not None), None)


def every_text(text: str | None, group: Group | None) -> list[str | None]:
    """The texts of all ranks, in their order, on every rank of the group.

    Collectives: one gather of objects, of any size.
    """
    if group is None or group_size(group) == 1:
        return [text]
    found: list[str | None] = [None] * group_size(group)
    dist.all_gather_object(found, text, group=group)
    return found
