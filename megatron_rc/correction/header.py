"""What is known of a whole batch, as one vector that adds up over ranks and micro-batches.

What it says is declared once, in the records of ``header_records``; ``header_fields`` chooses those that a config
needs. The positions in the vector follow from these, the config and the counts that all ranks agree on, whatever the
data is; who writes and who reads both go by them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rc.correction.header_records import BatchHeader, CriterionSums, Source
from megatron_rc.correction.histogram import Histogram
from megatron_rc.loss.metrics import MAXIMA, SUMS

_TABLES = ("by_length", "by_reward", "by_staleness", "mini_batches", "shift")
Columns = dict[Source | str, Tensor]


@dataclass(frozen=True)
class HeaderFields:
    """What lies where in a vector: columns of sums, then columns of maxima.

    Attributes:
        records: the records by name, without those of the criteria.
        criteria: those by the criterion's name.
        sums: the columns that add up, by source or by name, with their shapes.
        maxima: the columns of which the largest counts.
    """

    records: Mapping[str, type[Any]]
    criteria: Mapping[str, type[CriterionSums]]
    sums: Mapping[Source | str, tuple[int, ...]]
    maxima: Mapping[Source | str, tuple[int, ...]]

    def names(self, source: Source) -> tuple[str, ...]:
        """The fields of one source, as ``record.field``."""
        return self._names[source]

    @functools.cached_property
    def _names(self) -> dict[Source, tuple[str, ...]]:
        records = (*self.records.items(), *self.criteria.items())
        return {source: field_names(records, source) for source in Source}

    def stack(self, source: Source, values: Mapping[str, Tensor]) -> Tensor:
        """The values of one source's fields, in their order.

        Raises:
            KeyError: a field that is not declared, or a declared one that is not there.
        """
        names = self.names(source)
        check_names(source.value, names, values)
        return torch.stack([values[name] for name in names])

    def pack(self, sums: Columns, maxima: Columns) -> tuple[Tensor, Tensor]:
        """([sums], [maxima]) float64.

        Raises:
            KeyError: a column that is not declared, or a declared one that is not there.
            ValueError: a column of another size.
        """
        return _packed(self.sums, sums), _packed(self.maxima, maxima)

    def __len__(self) -> int:
        return self.num_sums + self.num_maxima

    @functools.cached_property
    def num_sums(self) -> int:
        """How many numbers add up."""
        return sum(math.prod(shape) for shape in self.sums.values())

    @functools.cached_property
    def num_maxima(self) -> int:
        """How many numbers of the vector are maxima."""
        return sum(math.prod(shape) for shape in self.maxima.values())

    @functools.cached_property
    def _starts(self) -> dict[Source | str, int]:
        starts, start = {}, 0
        for column, shape in (*self.sums.items(), *self.maxima.items()):
            starts[column] = start
            start += math.prod(shape)
        return starts

    @functools.cached_property
    def with_step(self) -> HeaderFields:
        """The same, and what a step adds."""
        maxima = {**self.maxima, "loss_maxima": (len(MAXIMA),), "misuse": (1,), "factor": (1,)}
        return dataclasses.replace(self, sums={**self.sums, "loss_sums": (len(SUMS),)}, maxima=maxima)

    def _shape(self, column: Source | str) -> tuple[int, ...]:
        return self.sums[column] if column in self.sums else self.maxima[column]

    def column(self, header: Tensor, column: Source | str) -> Tensor:
        """One column, as a view."""
        shape, start = self._shape(column), self._starts[column]
        return header[start : start + math.prod(shape)].view(shape)

    def number(self, header: Tensor, name: str) -> Tensor:
        """One field of a record, ``record.field``, as a 0-D view."""
        return header[self._places[name]]

    @functools.cached_property
    def _places(self) -> dict[str, int]:
        """Where each field of a record, ``record.field``, lies in the vector."""
        return {name: self._starts[source] + i for source in Source for i, name in enumerate(self.names(source))}

    @functools.cached_property
    def _signed_places(self) -> dict[str, tuple[tuple[str, int, int], ...]]:
        """For each record its fields: name, the sign that the vector has them by, where they lie."""
        return {
            name: tuple(
                (one.name, one.metadata["sign"], self._places[f"{name}.{one.name}"])
                for one in dataclasses.fields(record)
            )
            for name, record in (*self.records.items(), *self.criteria.items())
        }

    def read(self, values: Sequence[float]) -> BatchHeader:
        """The vector on the host."""

        def record(name: str, kind: type[Any]) -> Any:
            return kind(**{one: sign * values[place] for one, sign, place in self._signed_places[name]})

        records: dict[str, Any] = {name: record(name, kind) for name, kind in self.records.items()}
        tables = {name: self.table(values, name) for name in _TABLES}
        return BatchHeader(
            **records,
            **tables,
            criteria={name: record(name, kind) for name, kind in self.criteria.items()},
            bins=Histogram(self.table(values, "bins_until")),
            weight_bins=[Histogram(bins) for bins in self.table(values, "weight_bins_until")],
        )

    def table(self, values: Sequence[float], name: str) -> Any:
        """A column on the host, as lists."""
        shape = self._shape(name)
        part = list(values[self._starts[name] : self._starts[name] + math.prod(shape)])
        if len(shape) < 2:
            return part
        width = shape[1]
        return [part[row * width : (row + 1) * width] for row in range(shape[0])]


NO_FIELDS = HeaderFields({}, {}, {}, {})


def step_fields(correction: HeaderFields | None) -> HeaderFields:
    """The fields of a step's header: the correction's, where it is made in the loss, and those of the step itself."""
    return (correction or NO_FIELDS).with_step


def normalization_sums(fields: HeaderFields, header: Tensor) -> tuple[Tensor, Tensor]:
    """0-D each: the sum of weights and the count of which the quotient is w̄."""
    return fields.number(header, "weights.normalize_weight"), fields.number(header, "weights.normalize_count")


def merge_headers(fields: HeaderFields, headers: Sequence[Tensor]) -> Tensor:
    """One vector of several batches: sums added, maxima taken."""
    stacked = torch.stack(list(headers))
    return torch.cat([stacked[:, : fields.num_sums].sum(0), stacked[:, fields.num_sums :].amax(0)])


def field_names(records: Iterable[tuple[str, type[Any]]], source: Source) -> tuple[str, ...]:
    """The fields of one source, as ``record.field``, in the order of the records."""
    return tuple(
        f"{name}.{one.name}"
        for name, record in records
        for one in dataclasses.fields(record)
        if one.metadata["source"] is source
    )


def check_names(what: str, declared: Iterable[object], given: Iterable[object]) -> None:
    """Raise KeyError unless what is given is what is declared."""
    declared, given = set(declared), set(given)
    if declared != given:
        missing, extra = (", ".join(sorted(map(str, one))) or "nothing" for one in (declared - given, given - declared))
        raise KeyError(f"{what}: {missing} is missing, {extra} is not declared")


def _packed(declared: Mapping[Source | str, tuple[int, ...]], given: Columns) -> Tensor:
    check_names("a header's columns", declared, given)
    for column, shape in declared.items():
        if tuple(given[column].shape) != shape:
            raise ValueError(f"a header's column {column} has shape {tuple(given[column].shape)}: declared are {shape}")
    return torch.cat([given[column].flatten() for column in declared])
