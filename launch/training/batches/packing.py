"""Packing of sequences into micro-batches; every rank computes the same result from the lengths of all ranks."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rc.launch.run_config import RunConfig

# Tokens of each sequence; 0 for a sequence without trained tokens, which is left out.
TokenCounts = Sequence[int]
# For each micro-batch, the indices of its sequences.
Bins = list[list[int]]


@dataclass(frozen=True)
class Packing:
    """Micro-batches of one data-parallel rank."""

    bins: list[Bins]  # micro-batches of each mini-batch
    num_micro_batches: list[int]  # number of micro-batches of each mini-batch; equal on all ranks
    width: int  # tokens of each micro-batch on this rank, padding included
    width_of_ranks: int  # sum of ``width`` over the ranks


def pack(ranks: Sequence[Sequence[TokenCounts]], rank: int, config: RunConfig) -> Packing:
    """Return the micro-batches of ``rank``: sequences joined to at most ``--rl-sequence-packing-bin-size`` tokens.

    Args:
        ranks: for each data-parallel rank, and each of its mini-batches, the token counts of the sequences.
        rank: a data-parallel rank.
        config: settings of the run.
    """
    capacity = config.training.rl_sequence_packing_bin_size
    unit = config.parallel.micro_batch_unit
    # All ranks make equally many micro-batches of a mini-batch: as many as the rank that needs most, rounded up.
    num_micro_batches = []
    for counts_of_ranks in zip(*ranks, strict=True):
        most_needed = max(_fewest_bins(counts, capacity) for counts in counts_of_ranks)
        num_micro_batches.append(math.ceil(most_needed / unit) * unit)

    bins_of_ranks = []
    widths = []
    for counts_of_mini_batches in ranks:
        # A rank may get more bins than it needs. They also stay within the capacity: with more bins, the fullest never
        # grows.
        bins = [
            balance(counts, num_bins)
            for counts, num_bins in zip(counts_of_mini_batches, num_micro_batches, strict=True)
        ]
        bins_of_ranks.append(bins)
        widths.append(_width(bins, counts_of_mini_batches, config.parallel.packing_unit))
    return Packing(
        bins=bins_of_ranks[rank],
        num_micro_batches=num_micro_batches,
        width=widths[rank],
        width_of_ranks=sum(widths),
    )


def balance(counts: TokenCounts, num_bins: int) -> Bins:
    """Distribute the indices of counts above 0 to ``num_bins`` bins: the largest first, each into the emptiest bin.

    Graham 1969, "Bounds on Multiprocessing Timing Anomalies" (LPT): the fullest bin has at most 4/3 of the optimum.
    """
    bins: Bins = [[] for _ in range(num_bins)]
    heap = [(0, index) for index in range(num_bins)]
    for item in sorted((i for i, count in enumerate(counts) if count), key=lambda i: -counts[i]):
        filled, index = heapq.heappop(heap)
        bins[index].append(item)
        heapq.heappush(heap, (filled + counts[item], index))
    return bins


def _fewest_bins(counts: TokenCounts, capacity: int) -> int:
    """Return the fewest bins of which :func:`balance` fills none with more than ``capacity`` tokens."""
    num_bins = max(1, math.ceil(sum(counts) / capacity))
    while _fullest(balance(counts, num_bins), counts) > capacity:
        num_bins += 1
    return num_bins


def _fullest(bins: Bins, counts: TokenCounts) -> int:
    return max(sum(counts[sequence] for sequence in sequences) for sequences in bins)


def _width(bins: Sequence[Bins], counts: Sequence[TokenCounts], unit: int) -> int:
    """Width of a rank's micro-batches: the tokens of its fullest one, rounded up to a multiple of ``unit``."""
    fullest = max(
        _fullest(bins_of_batch, counts_of_batch) for bins_of_batch, counts_of_batch in zip(bins, counts, strict=True)
    )
    return max(1, math.ceil(fullest / unit)) * unit
