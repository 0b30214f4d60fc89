"""Records of numbers that are reduced over ranks, and the collectives that do it.

A record is a dataclass whose fields are tensors, None, records, or tuples or dicts of these. A tensor is reduced by
sum, unless its field is a :func:`largest` or a :func:`smallest`. A group of size 1 needs no collective.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.parallel.groups import Group, group_ranks, group_size

Pair = tuple[Tensor, Tensor]  # float64 sums and maxima
Kinds = tuple[list[Tensor], list[Tensor], list[Tensor]]  # sums, largest, smallest; a field's sign 0, 1, -1 is the index
R = TypeVar("R")


def largest() -> Any:
    """A record's field that is reduced by maximum."""
    return dataclasses.field(metadata={"sign": 1})


def smallest() -> Any:
    """A record's field that is reduced by minimum; it travels negated, among the maxima."""
    return dataclasses.field(metadata={"sign": -1})


@functools.cache
def _fields(kind: type) -> list[tuple[str, int]]:
    """The name and the sign of each field of a record."""
    return [(field.name, field.metadata.get("sign", 0)) for field in dataclasses.fields(kind)]


def flatten(record: Any, sign: int = 0, found: Kinds | None = None) -> Kinds:
    """The tensors of a record, in the order of its fields, as (sums, largest, smallest); added to ``found``."""
    found = ([], [], []) if found is None else found
    if isinstance(record, Tensor):
        found[sign].append(record)
    elif isinstance(record, tuple | dict):
        for value in record.values() if isinstance(record, dict) else record:
            flatten(value, sign, found)
    elif record is not None:
        for name, own in _fields(record.__class__):
            flatten(getattr(record, name), own, found)
    return found


def rebuild(record: R, kinds: Iterable[Iterable[Any]]) -> R:
    """A record like ``record`` with other values: (sums, largest, smallest) in the order of :func:`flatten`."""
    return cast(R, _filled(record, 0, [iter(kind) for kind in kinds]))


def _filled(record: Any, sign: int, rest: Sequence[Iterator[Any]]) -> Any:
    if record is None or isinstance(record, Tensor):
        return None if record is None else next(rest[sign])
    if isinstance(record, tuple):
        return tuple([_filled(value, sign, rest) for value in record])
    if isinstance(record, dict):
        return {name: _filled(value, sign, rest) for name, value in record.items()}
    return record.__class__(*[_filled(getattr(record, name), own, rest) for name, own in _fields(record.__class__)])


def map_record(record: R, function: Callable[[Tensor], Any]) -> R:
    """The record with ``function(tensor)`` instead of each tensor."""
    return rebuild(record, [map(function, kind) for kind in flatten(record)])


def concatenated(records: Sequence[R]) -> R:
    """The records of consecutive blocks as one: concatenated tensors in float64."""
    if len(records) == 1:
        return map_record(records[0], Tensor.double)
    kinds = zip(*map(flatten, records), strict=True)
    return rebuild(records[0], ([torch.cat(values).double() for values in zip(*kind, strict=True)] for kind in kinds))


def merged(records: Sequence[R]) -> R:
    """The sums, largest and smallest values of records of one form."""
    sums, maxima = zip(*map(pack, records), strict=True)
    return unpack(records[0], (torch.stack(sums).sum(0), torch.stack(maxima).amax(0)))


def pack(record: object) -> Pair:
    """(sums, maxima) of a record, two flat float64 tensors; smallest values stand negated among the maxima."""
    kinds = flatten(record)
    nothing = kinds[0][0].new_empty(0, dtype=torch.float64)
    sums, largest, smallest = (torch.cat([nothing, *(value.reshape(-1).double() for value in kind)]) for kind in kinds)
    return sums, torch.cat([largest, -smallest])


def unpack(record: R, pair: Pair) -> R:
    """The inverse of :func:`pack`: a record with the fields and shapes of ``record``, as views of the pair."""
    (sums, maxima), kinds = pair, flatten(record)
    num_largest = sum(value.numel() for value in kinds[1])
    flat = sums, maxima[:num_largest], -maxima[num_largest:]
    return rebuild(record, (_cut(values, kind) for values, kind in zip(flat, kinds, strict=True)))


def _cut(flat: Tensor, kind: Sequence[Tensor]) -> list[Tensor]:
    """The numbers of one kind in the shapes of its tensors, as views."""
    pieces = flat.split([value.numel() for value in kind])
    return [piece.view(value.shape) for piece, value in zip(pieces, kind, strict=True)]


def on_host(record: object) -> Any:
    """The record with Python floats, or lists of them, instead of tensors. Host synchronisations: one."""
    kinds = flatten(record)
    every = [value for kind in kinds for value in kind]
    found = iter(_cut(torch.cat([value.reshape(-1).double() for value in every]).cpu(), every))
    return rebuild(record, [[next(found).tolist() for _ in kind] for kind in kinds])


def reduce_pair(pair: Pair, group: Group | None) -> Pair:
    """The pair, reduced over the group. Collectives: one SUM, and one MAX if there are maxima."""
    sums, maxima = pair
    return all_reduce_sum(sums, group), all_reduce_max(maxima, group) if len(maxima) else maxima


def reduce_columns(pair: Pair, sizes: Sequence[int], groups: Sequence[Group | None]) -> Pair:
    """A pair of flat [rows · n] tables, of whose n columns ``sizes`` each are reduced over a group of their own.

    A group reduces one flat table of its own columns, whatever other groups its ranks are in.

    Collectives: for each distinct group one SUM, and one MAX if there are maxima.
    """
    if len(set(groups)) == 1:
        return reduce_pair(pair, groups[0])
    number = sum(sizes)
    parts = [list(values.view(len(values) // max(number, 1), number).split(list(sizes), 1)) for values in pair]
    for group, places in _places_of_groups(groups):
        tables = [torch.cat([part[place] for place in places], 1) for part in parts]
        reduced = reduce_pair((tables[0].flatten(), tables[1].flatten()), group)
        for part, table, values in zip(parts, tables, reduced, strict=True):
            columns = values.view(table.shape).split([sizes[place] for place in places], 1)
            for place, found in zip(places, columns, strict=True):
                part[place] = found
    return torch.cat(parts[0], 1).flatten(), torch.cat(parts[1], 1).flatten()


def all_reduce_sum(tensor: Tensor, group: Group | None) -> Tensor:
    """The sum over the group, as a new tensor on each of its ranks; no gradient. Collectives: one all-reduce."""
    return _all_reduce(tensor, group, dist.ReduceOp.SUM)


def all_reduce_max(tensor: Tensor, group: Group | None) -> Tensor:
    """The element-wise maximum over the group, as :func:`all_reduce_sum`."""
    return _all_reduce(tensor, group, dist.ReduceOp.MAX)


def sum_each(tensors: Sequence[Tensor], groups: Sequence[Group | None]) -> list[Tensor]:
    """The sum of each tensor over its own group, whose ranks list its tensors in the same order; itself for size 1.

    Collectives: one SUM for each distinct group.
    """
    found = list(tensors)
    for group, places in _places_of_groups(groups):
        total = all_reduce_sum(torch.cat([tensors[place].flatten() for place in places]), group)
        for place, piece in zip(places, total.split([tensors[place].numel() for place in places]), strict=True):
            found[place] = piece.view(tensors[place].shape)
    return found


def _places_of_groups(groups: Sequence[Group | None]) -> list[tuple[Group, list[int]]]:
    """Each distinct group of several ranks, with its places in the list.

    Every process takes its groups in the order of their ranks and names, so that processes in several groups cannot
    wait for each other in a circle.
    """
    distinct = [group for group in dict.fromkeys(groups) if group is not None and group_size(group) > 1]
    distinct.sort(key=lambda group: (group_ranks(group), group.group_name))
    return [(group, [place for place, other in enumerate(groups) if other == group]) for group in distinct]


def _all_reduce(tensor: Tensor, group: Group | None, operation: dist.ReduceOp.RedOpType) -> Tensor:
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    if group_size(group) > 1:
        dist.all_reduce(result, op=operation, group=group)
    return result


def broadcast(tensor: Tensor, source: int, group: Group | None) -> Tensor:
    """The tensor of the group's rank ``source``, as a new tensor on each of its ranks; no gradient.

    The other ranks pass any tensor of the same shape and dtype. Collectives: one broadcast of the tensor's size.
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
    """The text of the first rank that has one, on every rank of the group. Collectives: one gather of objects."""
    return next((one for one in every_text(text, group) if one is not None), None)


def every_text(text: str | None, group: Group | None) -> list[str | None]:
    """The texts of all ranks of the group, in rank order, on each of them. Collectives: one gather of objects."""
    if group is None or group_size(group) == 1:
        return [text]
    found: list[str | None] = [None] * group_size(group)
    dist.all_gather_object(found, text, group=group)
    return found
