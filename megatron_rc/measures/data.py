"""Checks of the data: counts of impossible values on every rank, and the errors that they raise on the host.

An unusable log-prob is found without looking at the host, and named alike on every rank. A token's key is
id · 2³² + 8 · position + 4 · policy + kind; policy is 0 for π_train and 1 for π_rollout, and the kind is NaN, infinite
or positive. With ids below 2²¹ and positions below 2²⁹ a key is exact in float64; the smallest one of all ranks wins.
Without sequence ids, the id is the local index, and the rank that holds the sequence takes the place of its upper bits.
"""

from __future__ import annotations

import functools
import hashlib

import torch
from torch import Tensor

from megatron_rc.correction.inputs import PER_SEQUENCE, Part, Shards
from megatron_rc.correction.sequences import SequenceSums
from megatron_rc.measures.header import DataSums
from megatron_rc.measures.shift import find_lag, shift_sums
from megatron_rc.numerics import MAX_ZERO_LOG_PROBS, NUM_SEQUENCE_IDS, is_log_prob
from megatron_rc.settings.config import RolloutCorrectionConfig

_STRIDE = 2**32
_KINDS = ("NaN", "infinite", "positive")
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


def data_sums(
    shards: Shards, sums: SequenceSums, newer_tokens: Tensor, config: RolloutCorrectionConfig
) -> DataSums[Tensor]:
    """The counts of this rank; ``newer_tokens``, 0-D, have a version each that is above the current one."""
    trained, first = sums.response > 0, shards.is_first_cp_rank
    out_of_range = (shards.out_of_range & trained).sum(1, dtype=torch.float64) * first
    out_of_range[PER_SEQUENCE.index("policy_versions")] += newer_tokens
    for part in shards.parts:
        if part.advantages is not None:
            out_of_range[PER_SEQUENCE.index("advantages")] += (part.mask & ~part.advantages.isfinite()).sum()
    bad, number = sums.response - sums.valid, sums.valid.new_full((), fingerprint(config))
    # Log-probs are at most 0: except for rounding above it, which may cancel, all are 0 if their sum is.
    zeros = (sums.rollout == 0) & (sums.valid > MAX_ZERO_LOG_PROBS)
    return DataSums(
        out_of_range=out_of_range,
        bad_tokens=bad.sum() * first,
        default_ids=sums.valid.new_full((), shards.has_default_ids * first),
        zero_log_probs=zeros.sum(dtype=torch.float64) * first,
        shift=shift_sums(shards.parts),
        config_max=number,
        config_min=number,
        first_bad_key=first_bad_key(shards, bad),
    )


@functools.lru_cache(maxsize=64)
def fingerprint(config: RolloutCorrectionConfig) -> int:
    """A number below 2⁴⁸ that two configurations share only if all their fields are equal (or by a rare chance)."""
    return int(hashlib.sha256(repr(sorted(config.to_dict().items())).encode()).hexdigest()[:12], 16)


def check_data(data: DataSums[float], config: RolloutCorrectionConfig, *, allow_zero_log_probs: bool) -> None:
    """Raise ValueError for the first count that cannot be right; the counts are equal on every rank."""
    if not data.config_min == data.config_max == fingerprint(config):
        raise ValueError("config: the RolloutCorrectionConfig differs between ranks: give every rank the same fields")
    for name, remedy, count in zip(PER_SEQUENCE, _RANGES, data.out_of_range, strict=True):
        if count:
            raise ValueError(f"{name}: {count:.0f} values of the batch are out of range, all must {remedy}")
    if config.bad_log_probs == "error" and data.bad_tokens:
        raise ValueError(describe_bad_token(data.first_bad_key, data.bad_tokens, bool(data.default_ids)))
    if data.zero_log_probs and not allow_zero_log_probs:
        raise ValueError(
            f"rollout_log_probs: their sum is exactly 0 at the trained tokens of {data.zero_log_probs:.0f} sequences "
            f"of more than {MAX_ZERO_LOG_PROBS} such tokens, as if the engine returned none and all are 0: ask it for "
            "log-probs; if they are right (greedy sampling), pass allow_zero_log_probs=True"
        )
    lag = find_lag(data.shift)
    if lag:
        shifted = f"the rollout log-probs are shifted by {lag:+d} position against the training log-probs"
        remedy = "align both to the label tokens (labels = tokens shifted left by one, before any sharding)"
        raise ValueError(f"{shifted}: {remedy}")


def first_bad_key(shards: Shards, bad: Tensor) -> Tensor:
    """The smallest key of an unusable token on this rank, 0-D float64; +inf without one.

    All ranks of ``cp`` know ``bad``, [n] unusable tokens of whole sequences, so they look into the same sequence.
    """
    ids = shards.sequence_ids
    if shards.has_default_ids:
        last = _LOCAL_IDS - 1 if shards.rank * _LOCAL_IDS < NUM_SEQUENCE_IDS else 0
        ids = ids.clamp(max=last) + min(shards.rank * _LOCAL_IDS, NUM_SEQUENCE_IDS - 1)
    keys = torch.where(bad > 0, ids.double() * _STRIDE, torch.inf)
    found = [keys.new_full((1,), torch.inf)]
    for part in shards.parts:
        if part.layout.num_sequences and part.mask.numel():
            key, sequence = keys[part.sequences].min(0, keepdim=True)
            found.append(key + _first_in(part, sequence, shards.dtype))
    return torch.cat(found).amin()


def _first_in(part: Part, sequence: Tensor, dtype: torch.dtype) -> Tensor:
    """[1] float64: the key, without the id, of the first unusable local token of a sequence; +inf without one."""
    mask, train, rollout = _tokens_of(part, sequence)
    values = torch.stack([train, rollout]).to(dtype)
    bad = mask & ~is_log_prob(values)
    end = len(mask)
    places = torch.where(bad.any(0), torch.arange(end, device=mask.device), end)
    first = places.amin(0, keepdim=True)
    place = first.clamp(max=end - 1)
    policy = 1 - bad[0].take(place).long()
    value = values.take(policy * end + place)
    kind = 2 * value.isfinite() + value.isinf()
    key = 8 * part.layout.position_of(sequence, place) + 4 * policy + kind
    return torch.where(first < end, key.double(), torch.inf)


def _tokens_of(part: Part, sequence: Tensor) -> list[Tensor]:
    """[t] each: mask and log-probs of the local tokens of one sequence; packed, masked ones may follow its end."""
    tensors = (part.mask, part.train, part.rollout)
    if part.mask.dim() == 2:
        return [tensor.index_select(0, sequence).view(-1) for tensor in tensors]
    lengths = part.layout.local_lengths.to(part.mask.device, non_blocking=True)
    offsets = torch.arange(max(part.layout.full_lengths) // part.layout.cp_size, device=part.mask.device)
    index = ((lengths.cumsum(0) - lengths)[sequence] + offsets).clamp(max=len(part.mask) - 1)
    mask, train, rollout = (tensor[index] for tensor in tensors)
    return [mask & (offsets < lengths[sequence]), train, rollout]


def describe_bad_token(key: float, count: float, default_ids: bool) -> str:
    """One sentence for the error: the token and the remedy."""
    sample, rest = divmod(int(key), _STRIDE)
    position, rest = divmod(rest, 8)
    policy, kind = divmod(rest, 4)
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
        f"the {('training', 'rollout')[policy]} log-prob of {where}, position {position} is {_KINDS[kind]} "
        f"(tokens of the batch with NaN, infinite or positive log-probs: {count:.0f}): repair the log-probs, mask "
        "these tokens, or set bad_log_probs=reject_token, which rejects and counts them"
    )
