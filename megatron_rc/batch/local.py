"""The one loop over the blocks of a shard: decide, add up and measure the local tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_rc.correction.inputs import Shards
from megatron_rc.correction.sequences import SequenceSums, sum_tokens
from megatron_rc.correction.tokens import Runs, Tokens, decide_tokens, token_blocks
from megatron_rc.correction.verdicts import check_needs
from megatron_rc.measures.histogram import CodeCounter, bins_from_codes
from megatron_rc.measures.token_measures import SequenceMeasures, TokenMeasures, TokenTotals, measure_tokens
from megatron_rc.parallel.collectives import Pair, flatten, pack, rebuild
from megatron_rc.settings.config import RolloutCorrectionConfig, check_config

R = TypeVar("R")
# By default the compiler for CPUs makes several loops that read the tokens anew and pass results through memory; with
# these limits out of the way it makes one.
_ONE_LOOP: dict[str, Any] = dict.fromkeys(
    ("realize_opcount_threshold", "realize_reads_threshold", "max_fusion_size", "cpp.max_horizontal_fusion_size"), 10**4
)


# How sums, largest and smallest values of runs are put together, and their values of no run.
_COMBINE: tuple[tuple[float, Callable[[Tensor, int], Tensor]], ...] = (
    (0.0, torch.sum),
    (-torch.inf, torch.amax),
    (torch.inf, torch.amin),
)


@dataclass(frozen=True)
class LocalSums:
    """All that this rank knows of its own tokens.

    Attributes:
        shards: the input.
        config: the correction.
        sums: over the local parts of whole sequences: decisions.
        measures: over the local parts of whole sequences: measures.
        totals: over all local tokens: measures.
        bins: [bins] float64, histogram of log ρ over the local tokens.
        valid: for each micro-batch the valid tokens, bool.
        kept: for each micro-batch the tokens that all token-level criteria accept, bool.
        weights: for each micro-batch the bounded weights, 0 if invalid; None unless weights are token-level.
    """

    shards: Shards
    config: RolloutCorrectionConfig
    sums: SequenceSums
    measures: SequenceMeasures
    totals: TokenTotals
    bins: Tensor
    valid: list[Tensor]
    kept: list[Tensor]
    weights: list[Tensor] | None

    @property
    def pair(self) -> Pair:
        """([sums · n], [maxima · n]), to be reduced over ``cp``."""
        return pack((self.sums, self.measures))


@dataclass(frozen=True)
class _Found:
    """One block: results for each token, sums for each run."""

    valid: Tensor
    kept: Tensor
    weights: Tensor | None
    sums: SequenceSums
    measures: TokenMeasures


def sequence_sums(shards: Shards, config: RolloutCorrectionConfig, *, compile: bool = False) -> LocalSums:
    """Decide and measure the local tokens, block by block. Collectives: none.

    Args:
        shards: the local tokens.
        config: the correction.
        compile: run blocks of equally long sequences through ``torch.compile``.

    Raises:
        ValueError: a criterion needs advantages or group ids that are not there, or ``config`` is no config.
    """
    check_config(config)
    check_needs(shards, config)
    find = _Compiled(config) if compile else functools.partial(_find, config=config)
    valid, kept = _empty(shards, torch.bool), _empty(shards, torch.bool)
    weights = _empty(shards, shards.dtype) if config.rollout_is == "token" else None
    by_sequence, totals, counter = [], [], CodeCounter(shards.device)
    for number, block, tokens, runs in token_blocks(shards, config, compile=compile):
        found = find(tokens, runs)
        block.take(valid[number]).copy_(found.valid.view(block.shape))
        block.take(kept[number]).copy_(found.kept.view(block.shape))
        if weights is not None and found.weights is not None:
            block.take(weights[number]).copy_(found.weights.view(block.shape))
        first = shards.parts[number].sequences.start
        sequences = slice(first + block.sequences.start, first + block.sequences.stop)
        by_sequence.append((sequences, (found.sums, found.measures.sequences)))
        totals.append(found.measures.totals)
        counter.add(found.measures.codes)
        del found  # before the next block needs room
    sums, measures = _by_sequence(by_sequence, shards)
    zeros = counter.num_values - sums.valid.sum()
    return LocalSums(
        shards, config, sums, measures, _over_all(totals), bins_from_codes(counter.counts, zeros), valid, kept, weights
    )


def _find(tokens: Tokens, runs: Runs, config: RolloutCorrectionConfig) -> _Found:
    """The arithmetic on one block: plain expressions, also inside ``torch.compile``."""
    decisions = decide_tokens(tokens, config)
    return _Found(
        decisions.valid,
        decisions.kept,
        decisions.weights,
        sum_tokens(tokens, decisions, runs, config),
        measure_tokens(tokens, decisions, runs, config),
    )


class _Compiled:
    """``_find`` through ``torch.compile``, which makes a program for one shape.

    Blocks of another shape than the first one, and flat blocks, in which other sequences lie every time, run as they
    stand.
    """

    def __init__(self, config: RolloutCorrectionConfig) -> None:
        self._config = config
        self._shape: torch.Size | None = None

    def __call__(self, tokens: Tokens, runs: Runs) -> _Found:
        if self._shape is None and runs.lengths is None:
            self._shape = tokens.mask.shape
        if runs.lengths is not None or tokens.mask.shape != self._shape:
            return _find(tokens, runs, self._config)
        zero = torch.zeros(len(tokens.mask), 1, dtype=torch.float32, device=tokens.mask.device)
        given = (tokens.train, tokens.rollout, tokens.mask.view(torch.uint8), tokens.negative, tokens.level, zero)
        valid, kept, weights, sums, measures = _compiled(self._config, zero.device.type)(*given)
        return _Found(valid.view(torch.bool), kept.view(torch.bool), weights, sums, measures)


@functools.lru_cache(maxsize=64)
def _compiled(config: RolloutCorrectionConfig, device: str) -> Callable[..., tuple[Any, ...]]:
    """The program as a function of tensors alone: fields of records would be looked at before every call.

    A compiler can vectorise reads and writes of uint8, not of bool. And it may make one loop of everything only if
    each token's result depends on the run, as the sums do: so ``zero``, [runs, 1], is in the mask.
    """

    def program(
        train: Tensor, rollout: Tensor, mask: Tensor, negative: Tensor | None, level: Tensor | None, zero: Tensor
    ) -> tuple[Any, ...]:
        found = _find(Tokens(train, rollout, mask.float() + zero != 0, negative, level), Runs(), config)
        valid, kept = (torch.where(flags, 1.0, 0.0).to(torch.uint8) for flags in (found.valid, found.kept))
        return valid, kept, found.weights, found.sums, found.measures

    compiled: Callable[..., tuple[Any, ...]] = torch.compile(
        program, dynamic=False, options=_ONE_LOOP if device == "cpu" else None
    )
    return compiled


def _empty(shards: Shards, dtype: torch.dtype) -> list[Tensor]:
    """Room for a result of each token, one tensor a micro-batch."""
    return [torch.empty(part.layout.shape, dtype=dtype, device=part.mask.device) for part in shards.parts]


def _by_sequence(blocks: list[tuple[slice, R]], shards: Shards) -> R:
    """The sums of all sequences, [n] float64, from those of the runs; 0 or ∓inf for a sequence without a token."""
    found = []
    for kind, (filler, combine) in enumerate(_COMBINE):
        columns = [(sequences, flatten(record)[kind]) for sequences, record in blocks]
        size = len(columns[0][1]), shards.num_sequences
        table = torch.full(size, filler, dtype=torch.float64, device=shards.device)
        for sequences, values in columns:
            number = sequences.stop - sequences.start
            if number and values:
                table[:, sequences] = combine(_stacked(values).view(size[0], number, -1), 2)
        found.append(table.unbind())
    return rebuild(blocks[0][1], found)


def _over_all(blocks: list[R]) -> R:
    """The sums and extremes over all runs of all blocks, 0-D float64; extremes of nothing are infinite."""
    found = []
    for kind, (filler, combine) in enumerate(_COMBINE):
        values = [_stacked(flatten(block)[kind]) for block in blocks]
        nothing = values[0].new_full((len(values[0]), 1), filler)
        found.append(combine(torch.cat([*values, nothing], dim=1), 1).unbind())
    return rebuild(blocks[0], found)


def _stacked(values: list[Tensor]) -> Tensor:
    """[k, runs] float64, from k tensors [runs]; all of one dtype are converted together."""
    rows = list(values)
    for dtype in {value.dtype for value in values} - {torch.float64}:
        places = [place for place, value in enumerate(values) if value.dtype == dtype]
        for place, row in zip(places, torch.stack([values[place] for place in places]).double(), strict=True):
            rows[place] = row
    return torch.stack(rows)
