"""The first log-prob that cannot be used, found without looking at the host, and named alike on every rank.

A token's key is id · 2³² + 8 · position + 4 · policy + kind; policy is 0 for π_train and 1 for π_rollout, and the kind
says what the log-prob is: NaN, infinite or positive. With ids below 2²¹ and positions below 2²⁹ a key is exact in
float64; the smallest one of all ranks wins.
Without sequence ids, the id is the local index, and the rank that holds the sequence takes the place of its upper bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rc.correction.shards import Part, Shards
from megatron_rc.numerics import NUM_SEQUENCE_IDS, unusable

_STRIDE = 2**32
_KINDS = ("NaN", "infinite", "positive")
_PIECE = 2**18  # tokens of a sequence that are looked at together
_LOCAL_IDS = 2**11  # sequences that a rank can tell apart where none has an id


def first_bad_key(shards: Shards, bad: Tensor) -> Tensor:
    """The smallest key of an unusable token on this rank, [1] float64; +inf without one.

    Args:
        shards: the local tokens.
        bad: [n] float64, unusable tokens of each whole sequence, equal on all ranks of ``cp``: they look into the same
            one.
    """
    ids = shards.sequence_ids
    if shards.default_ids:
        last = _LOCAL_IDS - 1 if shards.rank * _LOCAL_IDS < NUM_SEQUENCE_IDS else 0
        ids = ids.clamp(max=last) + min(shards.rank * _LOCAL_IDS, NUM_SEQUENCE_IDS - 1)
    keys = torch.where(bad > 0, ids.double() * _STRIDE, torch.inf)
    found = [keys.new_full((1,), torch.inf)]
    for part in shards.parts:
        count = part.layout.num_sequences
        if count and part.mask.numel():
            key, sequence = keys[part.first : part.first + count].min(0, keepdim=True)
            longest = max(part.layout.full_lengths) // part.layout.cp_size
            for start in range(0, longest, _PIECE):
                stop = min(start + _PIECE, longest)
                found.append(key + _first_of_piece(part, sequence, shards.dtype, start, stop))
    return torch.cat(found).amin(0, keepdim=True)


def _first_of_piece(part: Part, sequence: Tensor, dtype: torch.dtype, start: int, stop: int) -> Tensor:
    """[1] float64: the key, but for the id, of the first unusable one among some local tokens of a sequence.

    +inf without one.
    """
    mask, train, rollout = _piece(part, sequence, start, stop)
    values = torch.stack([train, rollout]).to(dtype)
    bad = unusable(values)
    # The first flag is the one that is furthest from the end. Floats: on a CPU bools take several times as long.
    length = stop - start
    from_end = torch.arange(length, 0, -1, dtype=dtype, device=mask.device)
    furthest = from_end.mul_(torch.maximum(*bad)).mul_(mask).amax(0, keepdim=True)
    place = (length - furthest).clamp_(max=length - 1).long()
    policy = 1 - bad[0].take(place).long()
    value = values.take(policy * length + place)
    kind = 2 * value.isfinite() + value.isinf()
    key = 8 * part.layout.position_of(sequence, place + start) + 4 * policy + kind
    return torch.where(furthest > 0, key.double(), torch.inf)


def _piece(part: Part, sequence: Tensor, start: int, stop: int) -> list[Tensor]:
    """Mask and log-probs of the local tokens of one sequence from ``start`` to ``stop``; none beyond its end."""
    tensors = (part.mask, part.train, part.rollout)
    if part.mask.dim() == 2:
        return [tensor[:, start:stop].index_select(0, sequence).view(-1) for tensor in tensors]
    lengths = part.layout.local_lengths.to(part.mask.device, non_blocking=True)
    offsets = torch.arange(start, stop, device=part.mask.device)
    index = ((lengths.cumsum(0) - lengths)[sequence] + offsets).clamp(max=len(part.mask) - 1)
    mask, train, rollout = (tensor[index] for tensor in tensors)
    return [mask & (offsets < lengths[sequence]), train, rollout]


def describe_bad_token(key: float, count: float, default_ids: bool) -> str:
    """One sentence for the error: which token, and what to do."""
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
