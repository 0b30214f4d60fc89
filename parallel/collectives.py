"""Records of numbers that add up over ranks, and the few collectives that carry them.

A record is a dataclass whose fields are tensors, None, or records again, also in tuples and dicts. A tensor is a sum
unless its field says :func:`largest` or :func:`smallest`. No collective is made for a group of size 1.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.parallel.groups import Group, group_size

Pair = tuple[Tensor, Tensor]  # float64 sums and maxima
Kinds = tuple[list[Tensor], list[Tensor], list[Tensor]]  # sums, largest, smallest: found by the signs 0, 1 and -1
R = TypeVar("R")


def largest() -> Any:
    """A field of which the largest value of all ranks counts."""
    return dataclasses.field(metadata={"sign": 1})


def smallest() -> Any:
    """A field of which the smallest value of all ranks counts; it travels as the largest negative."""
    return dataclasses.field(metadata={"sign": -1})


def map_record(record: R, function: Callable[[Tensor, int], Any], sign: int = 0) -> R:
    """The record with ``function(tensor, sign)`` in the place of each tensor; sign: 0 sum, 1 largest, -1 smallest."""
    found: Any = record
    if isinstance(record, Tensor):
        found = function(record, sign)
    elif isinstance(record, tuple):
        found = tuple(map_record(value, function, sign) for value in record)
    elif isinstance(record, Mapping):
        found = {name: map_record(value, function, sign) for name, value in record.items()}
    elif dataclasses.is_dataclass(record):
        kind: Any = type(record)
        found = kind(*(map_record(getattr(record, name), function, sign) for name, sign in _signs(kind)))
    return cast(R, found)


@functools.cache
def _signs(record: type) -> list[tuple[str, int]]:
    """The names of a record's fields, each with its sign."""
    return [(field.name, field.metadata.get("sign", 0)) for field in dataclasses.fields(record)]


def flatten(record: object) -> Kinds:
    """The tensors of a record in the order of its fields: (sums, largest, smallest)."""
    found: Kinds = ([], [], [])

    def note(value: Tensor, sign: int) -> Tensor:
        found[sign].append(value)
        return value

    map_record(record, note)
    return found


def rebuild(record: R, kinds: Iterable[Iterable[Any]]) -> R:
    """A record of the same form with these values, in the order of :func:`flatten`."""
    rest = [iter(kind) for kind in kinds]
    return map_record(record, lambda _, sign: next(rest[sign]))


def concatenated(records: Sequence[R]) -> R:
    """The records of consecutive blocks as one: their tensors one behind the other, in float64."""

    def one(values: tuple[Tensor, ...]) -> Tensor:
        return (torch.cat(values) if len(values) > 1 else values[0]).double()

    kinds = zip(*map(flatten, records), strict=True)
    return rebuild(records[0], (map(one, zip(*kind, strict=True)) for kind in kinds))


def pack(record: object) -> Pair:
    """(sums, maxima) of a record, each one flat float64 tensor; smallest values are among the maxima, negative."""
    kinds = flatten(record)
    nothing = next(value for kind in kinds for value in kind).new_empty(0, dtype=torch.float64)
    sums, largest, smallest = (torch.cat([nothing, *(value.reshape(-1).double() for value in kind)]) for kind in kinds)
    return sums, torch.cat([largest, -smallest])


def unpack(record: R, pair: Pair) -> R:
    """The record of the same form and shapes that a pair of :func:`pack` holds, as views."""
    kinds = flatten(record)
    sums, maxima = pair
    num_largest = sum(value.numel() for value in kinds[1])
    flat = sums, maxima[:num_largest], -maxima[num_largest:]
    return rebuild(record, (_cut(values, kind) for values, kind in zip(flat, kinds, strict=True)))


def _cut(flat: Tensor, kind: Sequence[Tensor]) -> list[Tensor]:
    pieces = flat.split([value.numel() for value in kind])
    return [piece.view(value.shape) for piece, value in zip(pieces, kind, strict=True)]


def on_host(record: object) -> Any:
    """The record with Python floats, and lists of them, in the place of tensors. Host synchronisations: one."""
    kinds = flatten(record)
    numbers = iter(torch.cat([value.reshape(-1).double() for kind in kinds for value in kind]).tolist())
    return rebuild(record, [[_listed(numbers, tuple(value.shape)) for value in kind] for kind in kinds])


def _listed(numbers: Iterator[float], shape: tuple[int, ...]) -> Any:
    """The next numbers, in lists of this shape."""
    if len(shape) > 1:
        return [_listed(numbers, shape[1:]) for _ in range(shape[0])]
    return list(islice(numbers, shape[0])) if shape else next(numbers)


def reduce_pair(pair: Pair, group: Group | None) -> Pair:
    """The pair over the group. Collectives: one SUM, and one MAX where there are maxima."""
    sums, maxima = pair
    return all_reduce_sum(sums, group), all_reduce_max(maxima, group) if len(maxima) else maxima


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


def broadcast_record(record: R, group: Group | None) -> R:
    """The record of the group's last rank, on every rank of it. Collectives: one broadcast."""
    sums, maxima = pack(record)
    numbers = broadcast(torch.cat([sums, maxima]), group_size(group) - 1, group)
    return unpack(record, (numbers[: len(sums)], numbers[len(sums) :]))


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
