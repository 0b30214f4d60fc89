"""Records of numbers that are reduced over ranks, and the collectives that do it.

A record is a dataclass whose fields are tensors, None, records, or tuples or dicts of these. A tensor is reduced by
sum, unless its field is a :func:`largest` or a :func:`smallest`. A group of size 1 needs no collective.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.parallel.groups import Group, group_ranks, group_size

Pair = tuple[Tensor, Tensor]  # float64 sums and maxima
R = TypeVar("R")

# Reductions of a field.
_SUM = "sum"
_LARGEST = "largest"
_SMALLEST = "smallest"


def largest() -> Any:
    """Declare a record's field that is reduced by maximum."""
    return dataclasses.field(metadata={"reduction": _LARGEST})


def smallest() -> Any:
    """Declare a record's field that is reduced by minimum; it travels negated, among the maxima."""
    return dataclasses.field(metadata={"reduction": _SMALLEST})


@functools.cache
def _fields(record_type: type) -> list[tuple[str, str]]:
    """Return the name and the reduction of each field of a record."""
    return [(field.name, field.metadata.get("reduction", _SUM)) for field in dataclasses.fields(record_type)]


@dataclass(frozen=True)
class Leaves:
    """The tensors of a record, by the reduction of their fields, in the order of the fields."""

    sums: list[Any] = field(default_factory=list)
    largest: list[Any] = field(default_factory=list)
    smallest: list[Any] = field(default_factory=list)

    def of(self, reduction: str) -> list[Any]:
        """Return the tensors of one reduction."""
        return {_SUM: self.sums, _LARGEST: self.largest, _SMALLEST: self.smallest}[reduction]

    def map(self, function: Callable[[Tensor], Any]) -> Leaves:
        """Return ``function(tensor)`` for each tensor."""
        return Leaves(
            sums=[function(tensor) for tensor in self.sums],
            largest=[function(tensor) for tensor in self.largest],
            smallest=[function(tensor) for tensor in self.smallest],
        )


def flatten(record: Any) -> Leaves:
    """Return the tensors of a record."""
    leaves = Leaves()
    _collect(record, _SUM, leaves)
    return leaves


def _collect(record: Any, reduction: str, leaves: Leaves) -> None:
    """Add the tensors of a record, or of a field of this reduction, to ``leaves``."""
    if record is None:
        return
    if isinstance(record, Tensor):
        leaves.of(reduction).append(record)
    elif isinstance(record, dict):
        for value in record.values():
            _collect(value, reduction, leaves)
    elif isinstance(record, tuple):
        for value in record:
            _collect(value, reduction, leaves)
    else:
        for name, field_reduction in _fields(record.__class__):
            _collect(getattr(record, name), field_reduction, leaves)


def rebuild(record: R, leaves: Leaves) -> R:
    """Return a record of the form of ``record`` with other values: the inverse of :func:`flatten`."""
    values = {_SUM: iter(leaves.sums), _LARGEST: iter(leaves.largest), _SMALLEST: iter(leaves.smallest)}
    return cast(R, _filled(record, _SUM, values))


def _filled(record: Any, reduction: str, values: Mapping[str, Iterator[Any]]) -> Any:
    """Return a record, or a field of this reduction, with the next values instead of its tensors."""
    if record is None:
        return None
    if isinstance(record, Tensor):
        return next(values[reduction])
    if isinstance(record, dict):
        return {name: _filled(value, reduction, values) for name, value in record.items()}
    if isinstance(record, tuple):
        return tuple(_filled(value, reduction, values) for value in record)
    record_type = record.__class__
    filled_fields = [
        _filled(getattr(record, name), field_reduction, values) for name, field_reduction in _fields(record_type)
    ]
    return record_type(*filled_fields)


def concatenated(records: Sequence[R]) -> R:
    """Return the records of consecutive sequences, whose tensors are [n], as one."""
    if len(records) == 1:
        return records[0]
    flattened = [flatten(record) for record in records]
    joined = Leaves(
        sums=[torch.cat(tensors) for tensors in zip(*(leaves.sums for leaves in flattened), strict=True)],
        largest=[torch.cat(tensors) for tensors in zip(*(leaves.largest for leaves in flattened), strict=True)],
        smallest=[torch.cat(tensors) for tensors in zip(*(leaves.smallest for leaves in flattened), strict=True)],
    )
    return rebuild(records[0], joined)


def merged(records: Sequence[R]) -> R:
    """Return the sums, largest and smallest values of records of one form."""
    if len(records) == 1:
        return records[0]
    pairs = [pack(record) for record in records]
    sums = torch.stack([sums for sums, _ in pairs]).sum(0)
    maxima = torch.stack([maxima for _, maxima in pairs]).amax(0)
    return unpack(records[0], (sums, maxima))


def pack(record: object) -> Pair:
    """Return (sums, maxima) of a record: two flat float64 tensors, so that one SUM and one MAX reduce all its tensors.

    ``maxima`` has the tensors that are reduced by maximum, then those that are reduced by minimum, negated: the
    smallest x is minus the largest -x.
    """
    leaves = flatten(record)
    sums = torch.cat([tensor.reshape(-1) for tensor in leaves.sums]).double()
    maxima = [tensor.reshape(-1) for tensor in leaves.largest]
    smallest = [tensor.reshape(-1) for tensor in leaves.smallest]
    if smallest:
        maxima.append(-torch.cat(smallest))
    return sums, torch.cat(maxima).double() if maxima else sums[:0]


def unpack(record: R, pair: Pair) -> R:
    """Return a record with the values of a pair: the inverse of :func:`pack`.

    Args:
        record: gives the fields and shapes; its values are not read.
        pair: the result of ``pack`` for a record of this form, reduced or not. Sums and largest values are views of it.
    """
    sums, maxima = pair
    leaves = flatten(record)
    num_largest = sum(tensor.numel() for tensor in leaves.largest)
    largest = maxima[:num_largest]
    negated_smallest = maxima[num_largest:]
    values = Leaves(
        sums=_split(sums, leaves.sums),
        largest=_split(largest, leaves.largest),
        smallest=_split(-negated_smallest, leaves.smallest) if leaves.smallest else [],
    )
    return rebuild(record, values)


def _split(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return a flat tensor's pieces in the shapes of other tensors, as views."""
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


def on_host(record: object) -> Any:
    """Return the record with Python floats, or lists of them, instead of tensors. Host synchronisations: one."""
    leaves = flatten(record)
    # In the order in which Leaves.map() visits them.
    tensors = [*leaves.sums, *leaves.largest, *leaves.smallest]
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).double().cpu()
    values = iter(_split(flat, tensors))
    return rebuild(record, leaves.map(lambda tensor: next(values).tolist()))


def reduce_pair(pair: Pair, group: Group | None) -> Pair:
    """Return the pair, reduced over the group. Collectives: one SUM, and one MAX if there are maxima."""
    if group_size(group) == 1:
        return pair
    sums, maxima = pair
    return all_reduce_sum(sums, group), all_reduce_max(maxima, group) if len(maxima) else maxima


def reduce_columns(pair: Pair, sizes: Sequence[int], groups: Sequence[Group | None]) -> Pair:
    """Reduce a pair of flat [rows · n] tables whose columns belong to several groups.

    A group reduces one flat table of its own columns, whatever other groups its ranks are in.

    Args:
        pair: the tables, n columns each.
        sizes: how many columns belong to each entry of ``groups``, one after the other; they add up to n. Not read if
            all entries are the same group.
        groups: at least one; the group of each run of columns. The same group may come again.

    Collectives: for each distinct group one SUM, and one MAX if there are maxima.
    """
    if len(set(groups)) == 1:
        return reduce_pair(pair, groups[0])
    # The columns of each entry of ``groups``.
    sums = _columns(pair[0], sizes)
    maxima = _columns(pair[1], sizes)

    for group, indices in _indices_of_groups(groups):
        sizes_of_group = [sizes[index] for index in indices]
        sums_of_group = torch.cat([sums[index] for index in indices], dim=1).flatten()
        maxima_of_group = torch.cat([maxima[index] for index in indices], dim=1).flatten()

        reduced_sums, reduced_maxima = reduce_pair((sums_of_group, maxima_of_group), group)
        for index, columns in zip(indices, _columns(reduced_sums, sizes_of_group), strict=True):
            sums[index] = columns
        for index, columns in zip(indices, _columns(reduced_maxima, sizes_of_group), strict=True):
            maxima[index] = columns

    return torch.cat(sums, dim=1).flatten(), torch.cat(maxima, dim=1).flatten()


def _columns(flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Return the runs of columns of a flat table whose rows have ``sum(sizes)`` numbers: [rows, size] views."""
    num_columns = sum(sizes)
    num_rows = len(flat) // max(num_columns, 1)
    return list(flat.view(num_rows, num_columns).split(list(sizes), dim=1))


def all_reduce_sum(tensor: Tensor, group: Group | None) -> Tensor:
    """Return the sum over the group, a new tensor on each of its ranks; no gradient. Collectives: one all-reduce."""
    return _all_reduce(tensor, group, dist.ReduceOp.SUM)


def all_reduce_max(tensor: Tensor, group: Group | None) -> Tensor:
    """Return the element-wise maximum over the group, as :func:`all_reduce_sum`."""
    return _all_reduce(tensor, group, dist.ReduceOp.MAX)


def sum_each(tensors: Sequence[Tensor], groups: Sequence[Group | None]) -> list[Tensor]:
    """Return the sum of each tensor over its own group; the tensor itself for a group of size 1.

    The ranks of a group list its tensors in the same order.

    Collectives: one SUM for each distinct group.
    """
    sums = list(tensors)
    for group, indices in _indices_of_groups(groups):
        tensors_of_group = [tensors[index] for index in indices]
        flat_sum = all_reduce_sum(torch.cat([tensor.flatten() for tensor in tensors_of_group]), group)
        sums_of_group = _split(flat_sum, tensors_of_group)
        for index, sum_of_tensor in zip(indices, sums_of_group, strict=True):
            sums[index] = sum_of_tensor
    return sums


def _indices_of_groups(groups: Sequence[Group | None]) -> list[tuple[Group, list[int]]]:
    """Return each distinct group of several ranks, with its indices in the list.

    Every process takes its groups in the order of their ranks and names, so that processes in several groups cannot
    wait for each other in a circle.
    """
    distinct = [group for group in dict.fromkeys(groups) if group is not None and group_size(group) > 1]
    distinct.sort(key=lambda group: (group_ranks(group), group.group_name))
    return [
        (group, [index for index, group_of_entry in enumerate(groups) if group_of_entry == group]) for group in distinct
    ]


def _all_reduce(tensor: Tensor, group: Group | None, operation: dist.ReduceOp.RedOpType) -> Tensor:
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    if group_size(group) > 1:
        dist.all_reduce(result, op=operation, group=group)
    return result


def broadcast(tensor: Tensor, source: int, group: Group | None) -> Tensor:
    """Return the tensor of the group's rank ``source``, a new tensor on each of its ranks; no gradient.

    The other ranks pass any tensor of the same shape and dtype. Collectives: one broadcast of the tensor's size.
    """
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    if group is not None and group_size(group) > 1:
        dist.broadcast(result, src=dist.get_global_rank(group, source), group=group)
    return result


def broadcast_record(record: R, group: Group | None) -> R:
    """Return the record of the group's last rank, on every rank of it. Collectives: one broadcast."""
    if group_size(group) == 1:
        return record
    sums, maxima = pack(record)
    last_rank = group_size(group) - 1
    flat = broadcast(torch.cat([sums, maxima]), last_rank, group)
    return unpack(record, (flat[: len(sums)], flat[len(sums) :]))


def every_text(text: str | None, group: Group | None) -> list[str | None]:
    """Return the texts of all ranks of the group, in rank order, on each of them.

    Collectives: one gather of objects.
    """
    if group is None or group_size(group) == 1:
        return [text]
    texts: list[str | None] = [None] * group_size(group)
    dist.all_gather_object(texts, text, group=group)
    return texts
