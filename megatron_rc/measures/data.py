"""Checks of the data: counts of impossible values on every rank, and the errors that they raise on the host.

An unusable log-prob is found without looking at the host, and named alike on every rank. Each unusable token has the
number id · 2²⁷ + position and two keys, 5 · number + kind, with the kinds of log π_train and of log π_rollout
(:func:`megatron_rc.numerics.log_prob_kinds`). The smallest keys of all ranks are those of the token with the lowest
number. With ids below 2²¹ and positions below 2²⁷ a key is exact in float64. Without sequence ids, the id is the local
index, and the rank that holds the sequence takes the place of its upper bits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor

from megatron_rc.correction.denominators import N
from megatron_rc.correction.inputs import PER_SEQUENCE, Part, Shards
from megatron_rc.correction.sequences import SequenceSums
from megatron_rc.correction.tokens import Tokens
from megatron_rc.measures.shift import find_lag
from megatron_rc.measures.tokens import TokenMeasures
from megatron_rc.numerics import MAX_ZERO_LOG_PROBS, NUM_KINDS, NUM_SEQUENCE_IDS, USABLE, log_prob_kinds
from megatron_rc.parallel.collectives import largest, smallest
from megatron_rc.parallel.layout import Block
from megatron_rc.settings.config import RolloutCorrectionConfig

_NUM_POSITIONS = 2**27
# Both kinds of a token are usable only if several tokens share its number, so that each hides the other's kind.
_KINDS = ("infinite", "not usable", "positive", "infinite", "NaN")
_NO_NUMBER = NUM_SEQUENCE_IDS * _NUM_POSITIONS  # id · 2²⁷ + position of a token is below
NO_KEY = _NO_NUMBER * NUM_KINDS  # every key is below
_LOCAL_IDS = 2**11  # sequences that a rank can tell apart if none has an id
# In the order of PER_SEQUENCE.
_RANGES = (
    "lie in [0, 2²¹)",
    "lie in [0, num_mini_batches)",
    "lie in [0, num_groups)",
    "be at most current_version",
    "be finite",
    "be finite",
)


@dataclass(frozen=True)
class DataSums(Generic[N]):
    """Counts of impossible data, and of differences between ranks, from which every rank finds the same errors."""

    out_of_range: Any  # [6] sequences or tokens whose value was out of range, in the order of PER_SEQUENCE
    bad_tokens: N  # tokens of the response mask without two usable log-probs
    zero_log_probs: N  # sequences whose rollout log-probs sum to exactly 0
    config_max: N = largest()  # the largest fingerprint of a rank's configuration
    config_min: N = smallest()  # the smallest fingerprint
    has_default_ids: N = largest()  # 1 if the sequences of any rank have no ids, else 0


def key_ids(shards: Shards) -> Tensor:
    """Return the id of each sequence in the keys of its tokens, [n] int64; without ids the rank and the index."""
    ids = shards.sequence_ids
    if not shards.has_default_ids:
        return ids
    first = min(shards.rank * _LOCAL_IDS, NUM_SEQUENCE_IDS - 1)
    last = min(first + _LOCAL_IDS, NUM_SEQUENCE_IDS) - 1
    if first:
        ids = ids + first
    if first + len(ids) - 1 > last:
        # Sequences beyond the last id of this rank share it.
        ids = ids.clamp(max=last)
    return ids


def first_bad_keys(tokens: Tokens, bad: Tensor, part: Part, block: Block, shards: Shards, ids: Tensor) -> Tensor:
    """Return the keys of the first unusable token of a block, [2] int64; without one numbers from NO_KEY on.

    Args:
        tokens: the tokens of the block.
        bad: bool, the unusable ones.
        part: the micro-batch that the block is of.
        block: the block.
        shards: the local tokens.
        ids: :func:`key_ids` of all local sequences.
    """
    positions = part.layout.block_positions(block, shards.counting)
    numbers = torch.add(positions, block.expand(ids[part.sequences]), alpha=_NUM_POSITIONS)
    if not numbers.numel():
        return numbers.new_full((2,), NO_KEY)
    # The kinds of only the first unusable token are computed. If there is none, it is any token, and its number is
    # above every other.
    no_number = _number(_NO_NUMBER, tokens.mask.device, torch.int64)
    number, index = torch.where(bad, numbers, no_number).flatten().min(0, keepdim=True)
    kinds = log_prob_kinds(tokens.log_probs.flatten(1).index_select(1, index))
    return torch.add(kinds, number, alpha=NUM_KINDS).squeeze(1)


def data_columns(sums: SequenceSums) -> dict[str, Tensor]:
    """Return flags of whole sequences that are counted over the batch: ``zero_log_probs``, an engine gave none."""
    # Log-probs are at most 0: except for rounding above it, which may cancel, all are 0 if their sum is.
    return {"zero_log_probs": (sums.sums["rollout"] == 0) & (sums.valid > MAX_ZERO_LOG_PROBS)}


def data_sums(
    shards: Shards, sums: SequenceSums, config: RolloutCorrectionConfig, *, bad_tokens: Tensor, zero_log_probs: Tensor
) -> DataSums[Tensor]:
    """Return the counts of this rank.

    Values of sequences count on the first rank of the CP group, values of tokens on the rank that holds them.

    Args:
        shards: the local input.
        sums: the sums over whole sequences.
        config: its fingerprint is compared between ranks.
        bad_tokens: the number of unusable local tokens.
        zero_log_probs: the number of sequences without rollout log-probs.
    """
    out_of_range = sums.valid.new_zeros(len(PER_SEQUENCE))
    for name, wrong in shards.out_of_range.items():
        out_of_range[PER_SEQUENCE.index(name)] += (wrong & (sums.response > 0) & shards.counts_here).sum()
    for part in shards.parts:
        if part.advantages is not None:
            out_of_range[PER_SEQUENCE.index("advantages")] += (part.mask & ~part.advantages.isfinite()).sum()
        if part.versions is not None:
            newer = part.versions > (shards.counts.current_version or 0)
            out_of_range[PER_SEQUENCE.index("policy_versions")] += (part.mask & newer).sum()
    fingerprint = _number(config.fingerprint, shards.device)
    return DataSums(
        out_of_range=out_of_range,
        bad_tokens=bad_tokens,
        zero_log_probs=zero_log_probs,
        config_max=fingerprint,
        config_min=fingerprint,
        has_default_ids=_number(shards.has_default_ids, shards.device),
    )


@functools.lru_cache(maxsize=64)
def _number(value: float, device: torch.device, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return a number on the device, 0-D, sent there once."""
    return torch.full((), value, dtype=dtype, device=device)


def check_data(
    data: DataSums[float],
    tokens: TokenMeasures[float],
    config: RolloutCorrectionConfig,
    *,
    allow_zero_log_probs: bool,
) -> None:
    """Raise ValueError for the first number that cannot be right; the numbers are equal on every rank."""
    if not data.config_min == data.config_max == config.fingerprint:
        raise ValueError("config: the RolloutCorrectionConfig differs between ranks: give every rank the same fields")
    for name, remedy, count in zip(PER_SEQUENCE, _RANGES, data.out_of_range, strict=True):
        if count:
            raise ValueError(f"{name}: {count:.0f} values of the batch are out of range, all must {remedy}")
    if config.bad_log_probs == "error" and data.bad_tokens:
        raise ValueError(describe_bad_token(tokens.first_bad_keys, data.bad_tokens, bool(data.has_default_ids)))
    if data.zero_log_probs and not allow_zero_log_probs:
        raise ValueError(
            f"rollout_log_probs: their sum is exactly 0 at the trained tokens of {data.zero_log_probs:.0f} sequences "
            f"of more than {MAX_ZERO_LOG_PROBS} such tokens, as if the engine returned none and all are 0: ask it for "
            "log-probs; if they are right (greedy sampling), pass allow_zero_log_probs=True"
        )
    lag = find_lag(tokens)
    if lag:
        raise ValueError(
            f"the rollout log-probs are shifted by {lag:+d} position against the training log-probs: align both to the "
            "label tokens (labels = tokens shifted left by one, before any sharding)"
        )


def describe_bad_token(keys: list[float], count: float, default_ids: bool) -> str:
    """Return one sentence for the error: the token of two keys, the number of such tokens, and the remedy."""
    number, train_kind = divmod(int(keys[0]), NUM_KINDS)
    rollout_kind = int(keys[1]) % NUM_KINDS
    sample, position = divmod(number, _NUM_POSITIONS)
    policy, kind = ("training", train_kind) if train_kind != USABLE else ("rollout", rollout_kind)
    where = f"sample {sample}"
    if default_ids:
        rank, index = divmod(sample, _LOCAL_IDS)
        where = f"sample {index} of data-parallel rank {rank} (no sequence_ids given)"
        # Sequences beyond the last key of a rank, and ranks beyond the last of all, share that last key.
        if sample == NUM_SEQUENCE_IDS - 1:
            where = f"a sample of data-parallel rank {rank} or a later one (give sequence_ids to know which)"
        elif index == _LOCAL_IDS - 1:
            where = f"sample {index} or a later one of data-parallel rank {rank} (give sequence_ids to know which)"
    return (
        f"the {policy} log-prob of {where}, position {position} is {_KINDS[kind]} (tokens of the batch with NaN, "
        f"infinite or positive log-probs: {count:.0f}): repair the log-probs, mask these tokens, or set "
        "bad_log_probs=reject_token, which rejects and counts them"
    )
