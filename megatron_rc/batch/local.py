"""The one loop over the blocks of a shard: decide, add up and measure the local tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_rc.correction.inputs import Shards, check_needs
from megatron_rc.correction.sequences import BlockSequences, SequenceSums, sum_tokens
from megatron_rc.correction.tokens import Tokens, decide_tokens, token_blocks
from megatron_rc.measures.histogram import CodeCounter, bins_from_codes, codes_of
from megatron_rc.measures.sequence_measures import add_sequences
from megatron_rc.measures.token_measures import (
    LocalSums,
    SequenceMeasures,
    TokenSums,
    measure_sequences,
    measure_tokens,
)
from megatron_rc.parallel.collectives import concatenated
from megatron_rc.settings.config import RolloutCorrectionConfig, check_config

# By default the compiler for CPUs makes several loops that read the tokens anew and pass results through memory; with
# these limits out of the way it makes one.
_ONE_LOOP: dict[str, Any] = dict.fromkeys(
    ("realize_opcount_threshold", "realize_reads_threshold", "max_fusion_size", "cpp.max_horizontal_fusion_size"), 10**4
)
# Of each token: valid, kept, weight (or None) and the histogram's code. Of each sequence: sums and measures.
Found = tuple[tuple[Tensor, Tensor, Tensor | None, Tensor], tuple[SequenceSums, SequenceMeasures, TokenSums[Tensor]]]


def sequence_sums(shards: Shards, config: RolloutCorrectionConfig, *, compile: bool = False) -> LocalSums:
    """Decide and measure the local tokens, block by block. Collectives: none.

    Args:
        shards: the local tokens.
        config: the correction.
        compile: run blocks of equally long sequences through ``torch.compile``.

    Raises:
        ValueError: the config needs advantages, prompts or versions that are not there, or is no config.
    """
    check_config(config)
    has_advantages = shards.advantages is not None or shards.parts[0].advantages is not None
    check_needs(config, shards.counts, has_advantages=has_advantages)
    shape = None
    valid, kept = _room(shards, torch.bool), _room(shards, torch.bool)
    weights = _room(shards, shards.dtype) if config.rollout_is == "token" else None
    records, counter = [], CodeCounter(shards.device)
    for number, block, tokens in token_blocks(shards, config, compile=compile):
        lengths = None if block.lengths is None else block.lengths.to(shards.device, non_blocking=True)
        sequences = BlockSequences(lengths)
        if compile and sequences.lengths is None and shape in (None, tokens.mask.shape):
            shape = tokens.mask.shape
            (*of_tokens, codes), record = _find_compiled(tokens, config)
        else:
            (*of_tokens, codes), record = _find(tokens, sequences, config)
        for room, values in zip((valid, kept, weights), of_tokens, strict=True):
            if room is not None and values is not None:
                block.take(room[number]).copy_(values)
        counter.add(codes)
        records.append(record)
        del of_tokens, codes, values  # before the next block needs room
    sums, measures, per_sequence = concatenated(records)
    every = torch.ones_like(sums.valid, dtype=torch.bool)
    bins = bins_from_codes(counter.counts, counter.num_values - sums.valid.sum())
    totals = add_sequences(per_sequence, sums, every)
    return LocalSums(shards, config, sums, measures, totals, bins, valid, kept, weights)


def _find(tokens: Tokens, sequences: BlockSequences, config: RolloutCorrectionConfig) -> Found:
    """The arithmetic on one block: plain expressions, also inside ``torch.compile``."""
    decisions = decide_tokens(tokens, config)
    sums = sum_tokens(tokens, decisions, sequences, config)
    measures = measure_sequences(decisions, sequences, config), measure_tokens(decisions, sequences, config)
    codes = codes_of(decisions.log_ratio)  # invalid tokens have the code of 0
    return (decisions.valid, decisions.kept, decisions.weights, codes), (sums, *measures)


def _find_compiled(tokens: Tokens, config: RolloutCorrectionConfig) -> Found:
    """``_find`` through ``torch.compile``, which makes a program for one shape: for all blocks of the first shape."""
    zero = torch.zeros(len(tokens.mask), 1, dtype=torch.float32, device=tokens.mask.device)
    given = (tokens.train, tokens.rollout, tokens.mask.view(torch.uint8), tokens.negative, tokens.level, zero)
    found: Found = _compiled(config, zero.device.type)(*given)
    return found


@functools.lru_cache(maxsize=64)
def _compiled(config: RolloutCorrectionConfig, device: str) -> Callable[..., Any]:
    """The program as a function of tensors alone: fields of records would be looked at before every call.

    A compiler vectorises reads and writes of uint8, not of bool. It makes one loop of everything only if each token's
    result depends on the sequence, as the sums do: so ``zero``, [n, 1], is in the mask.
    """

    def program(
        train: Tensor, rollout: Tensor, mask: Tensor, negative: Tensor | None, level: Tensor | None, zero: Tensor
    ) -> Found:
        tokens = Tokens(train, rollout, mask.float() + zero != 0, negative, level)
        (valid, kept, weights, codes), record = _find(tokens, BlockSequences(), config)
        valid, kept = (torch.where(flags, 1.0, 0.0).to(torch.uint8) for flags in (valid, kept))
        return (valid, kept, weights, codes), record

    compiled: Callable[..., Any] = torch.compile(program, dynamic=False, options=_ONE_LOOP if device == "cpu" else None)
    return compiled


def _room(shards: Shards, dtype: torch.dtype) -> list[Tensor]:
    """An empty tensor for a result of each token, one a micro-batch."""
    return [torch.empty(part.layout.shape, dtype=dtype, device=part.mask.device) for part in shards.parts]
