"""What the blocks of a shard add up to: sums and maxima for each sequence, and for the batch."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.correction.inputs import Shards
from megatron_rc.correction.token_pass.expressions import ExpressionBlock
from megatron_rc.correction.token_pass.histogram import CodeCounter, bins_from_codes
from megatron_rc.correction.token_pass.terms import HOW, BlockTokens, BlockValues, Columns, How, block_terms, largest
from megatron_rc.settings.config import RolloutCorrectionConfig

_LONG_RUN = 512  # tokens: runs that may be kept until the end, a few bytes a token


@dataclass(frozen=True)
class ShardSums:
    """What all tokens of a shard add up to, float64.

    Attributes:
        names: of the rows of ``sequences``, then of ``sequence_max``.
        sequences: [k, n] sums over the local parts of whole sequences.
        sequence_max: [m, n] maxima likewise.
        batch: sums over the local tokens.
        batch_max: maxima likewise; a minimum is the largest negative.
    """

    names: tuple[str, ...]
    sequences: Tensor
    sequence_max: Tensor
    batch: Columns
    batch_max: Columns


class Accumulator:
    """Takes the terms of one block after the other, and adds them up at the end: few calls, however many blocks.

    Args:
        shards: the shard.
        config: decides which terms there are.
    """

    def __init__(self, shards: Shards, config: RolloutCorrectionConfig) -> None:
        self._names = _term_names(config, any(part.advantages is not None for part in shards.parts))
        self._num_sequences = shards.num_sequences
        self._nothing = torch.zeros(0, dtype=torch.float64, device=shards.device)
        self._codes = CodeCounter(shards.device)
        self._tables: list[list[Tensor]] = []
        # Of each block its sequences, and how many runs each of them has in it.
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
        exact_names, sequence_names, max_names, batch_names, batch_max_names = self._names
        zeros = self._codes.num_values - sequence[sequence_names.index("valid")].sum()
        bins = bins_from_codes(self._codes.counts, zeros)
        return ShardSums(
            names=(*exact_names, *sequence_names, *max_names),
            sequences=self._by_sequence(torch.cat([exact, sequence]), "sum"),
            sequence_max=self._by_sequence(sequence_max, "max"),
            batch={batch_names: batch.sum(1), "bins": bins},
            batch_max={batch_max_names: largest(batch_max)},
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
        return torch.tensor(counts, dtype=torch.int64, device=self._nothing.device)


def _joined(table: Tensor, each: int, how: How) -> Tensor:
    """[k, rows] from [k, rows · each]."""
    k, runs = table.shape
    table = table.view(-1, each)
    # A matrix product: sums along a few numbers each take a processor ten times as long.
    return (table @ table.new_ones(each) if how == "sum" else table.amax(1)).view(k, runs // each)


@functools.lru_cache(maxsize=64)
def _term_names(config: RolloutCorrectionConfig, token_advantages: bool) -> tuple[tuple[str, ...], ...]:
    """The names that every block has, found by running one masked token: writer and reader cannot disagree."""
    nothing, mask = torch.zeros(1, 1, dtype=torch.float32), torch.zeros(1, 1, dtype=torch.bool)
    negative, level = (
        (mask if token_advantages else None),
        (mask.long() if config.staleness_scale is not None else None),
    )
    tokens = BlockTokens(nothing, nothing, mask, negative, level)
    return block_terms(ExpressionBlock(tokens), tokens, config).names
