"""What the blocks of a shard add up to: sums and maxima for each sequence, and for the batch."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.correction.histogram import CodeCounter, bins_from_codes
from megatron_rc.correction.shards import Shards
from megatron_rc.correction.token_pass.operations import How
from megatron_rc.correction.token_pass.terms import HOW, BlockValues, TermNames, largest

_LONG_RUN = 512  # tokens: the terms of such runs are kept until the end, at a few bytes a token; of shorter ones not


@dataclass(frozen=True)
class ShardSums:
    """What all tokens of a shard add up to, float64.

    Attributes:
        names: of the rows of ``sequences``, then of ``sequence_max``.
        sequences: [k, n] sums over the local parts of whole sequences.
        sequence_max: [m, n] maxima likewise.
        batch: [k] sums over the local tokens, in the order of the header.
        batch_max: [m] maxima likewise.
        bins: histogram of log ρ over the local tokens.
    """

    names: tuple[str, ...]
    sequences: Tensor
    sequence_max: Tensor
    batch: Tensor
    batch_max: Tensor
    bins: Tensor


class Accumulator:
    """Takes the terms of one block after the other, and adds them up at the end: few calls, however many blocks.

    Args:
        shards: the shard.
        names: of the blocks' terms.
    """

    def __init__(self, shards: Shards, names: TermNames) -> None:
        self._names = names
        self._num_sequences = shards.num_sequences
        self._nothing = torch.zeros(0, dtype=torch.float64, device=shards.device)
        self._codes = CodeCounter(shards.device)
        self._tables: list[list[Tensor]] = []
        # For each block: which sequences it holds, and how many runs each of them has in it.
        self._runs: list[tuple[slice, int]] = []

    def add(self, values: BlockValues, rows: slice) -> None:
        """Take the terms of the next block, which holds tokens of these sequences."""
        self._codes.add(values.codes)
        exact, *_ = values.kinds
        runs = len(exact[0])
        each = runs // (rows.stop - rows.start)
        tables = [torch.stack(terms) if terms else self._nothing.view(0, 1) for terms in values.kinds]
        if each > 1 and values.codes.numel() < _LONG_RUN * runs:
            tables = [_joined(table.double(), each, how) for table, how in zip(tables, HOW, strict=True)]
            each = 1
        self._tables.append(tables)
        self._runs.append((rows, each))

    def sums(self) -> ShardSums:
        """What all blocks together add up to."""
        tables = [torch.cat(blocks, dim=1).double() for blocks in zip(*self._tables, strict=True)]
        if not tables:
            tables = [self._nothing.expand(len(names), 0) for names in self._names]
        exact, sequence, sequence_max, batch, batch_max = tables
        exact_names, sequence_names, max_names, *_ = self._names
        zeros = self._codes.num_values - sequence[sequence_names.index("valid")].sum()
        bins = bins_from_codes(self._codes.counts, zeros)
        return ShardSums(
            names=(*exact_names, *sequence_names, *max_names),
            sequences=self._by_sequence(torch.cat([exact, sequence]), "sum"),
            sequence_max=self._by_sequence(sequence_max, "max"),
            batch=batch.sum(1),
            batch_max=largest(batch_max),
            bins=bins,
        )

    def _by_sequence(self, table: Tensor, how: How) -> Tensor:
        """[k, n] from [k, runs]; the runs of a sequence follow each other."""
        n = self._num_sequences
        if not len(table):
            return table.new_zeros(0, n)
        starts, ends = [rows.start for rows, _ in self._runs], [rows.stop for rows, _ in self._runs]
        runs = {runs for _, runs in self._runs}
        if len(runs) == 1 and [*starts, n] == [0, *ends]:
            return _joined(table, runs.pop(), how)
        table = table.t().contiguous()
        return torch.segment_reduce(table, how, lengths=self._run_counts, unsafe=True).t().contiguous()

    @functools.cached_property
    def _run_counts(self) -> Tensor:
        """[n] int64: the runs of each sequence, once all blocks are there."""
        counts = [0] * self._num_sequences
        for rows, each in self._runs:
            for row in range(rows.start, rows.stop):
                counts[row] += each
        return torch.tensor(counts, dtype=torch.int64).to(self._nothing.device, non_blocking=True)


def _joined(table: Tensor, each: int, how: How) -> Tensor:
    """[k, rows] from [k, rows · each]."""
    k, runs = table.shape
    table = table.view(-1, each)
    # A matrix product: sums along a few numbers each take a processor ten times as long.
    return (table @ table.new_ones(each) if how == "sum" else table.amax(1)).view(k, runs // each)
