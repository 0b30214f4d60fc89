"""The first log-prob that cannot be used, found without looking at the host, and named alike on every rank.

A token's key is id · 2³² + 2 · position + policy, exact in float64 with ids below 2²¹; the smallest key of all ranks
wins. Without sequence ids, the id is the local index, and the rank that holds the sequence takes the place of its upper
bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rc.inputs import MAX_SEQUENCE_ID, Part, Shards
from megatron_rc.statistics import is_log_prob

_STRIDE = 2**32
_PIECE = 2**18  # tokens of a sequence that are looked at together
_LOCAL_IDS = 2**11  # sequences that a rank can tell apart where none has an id


def first_bad_key(shards: Shards, bad: Tensor) -> Tensor:
    """The smallest key of an unusable token on this rank, 0-D float64; +inf without one.

    Args:
        shards: the local tokens.
        bad: [n] float64, unusable tokens of each whole sequence, equal on all ranks of ``cp``: they look into the same
            one.
    """
    ids = shards.sequence_ids
    if shards.default_ids:
        ids = (shards.rank * _LOCAL_IDS + ids.clamp(max=_LOCAL_IDS - 1)).clamp(max=MAX_SEQUENCE_ID - 1)
    keys = [torch.full((1,), torch.inf, dtype=torch.float64, device=shards.device)]
    for part in shards.parts:
        count = part.layout.num_sequences
        if not count or not part.mask.numel():
            continue
        here = slice(part.first, part.first + count)
        chosen = torch.where(bad[here] > 0, ids[here].double(), torch.inf).argmin().view(1)
        keys.append(_first_of_sequence(part, chosen, shards.dtype) + ids[here][chosen].double() * _STRIDE)
    return torch.cat(keys).amin()


def _first_of_sequence(part: Part, sequence: Tensor, dtype: torch.dtype) -> Tensor:
    """[1] float64: 2 · position + policy of the first unusable local token of one sequence; +inf without one."""
    longest = max(part.layout.full_lengths) // part.layout.cp_size
    pieces = range(0, longest, _PIECE)
    return torch.stack(
        [_first_of_piece(part, sequence, dtype, start, min(start + _PIECE, longest)) for start in pieces]
    ).amin(0)


def _first_of_piece(part: Part, sequence: Tensor, dtype: torch.dtype, start: int, stop: int) -> Tensor:
    """The same of its local tokens from ``start`` to ``stop``."""
    layout, device = part.layout, part.mask.device
    lengths = layout.local_lengths.to(device)
    offsets = torch.arange(start, stop, device=device)
    if part.mask.dim() == 2:
        tokens = [tensor[:, start:stop].index_select(0, sequence).view(-1) for tensor in _tensors(part)]
    else:
        begin = (lengths.cumsum(0) - lengths)[sequence]
        tokens = [tensor[(begin + offsets).clamp(max=len(tensor) - 1)] for tensor in _tensors(part)]
    mask, train, rollout = tokens
    bad_train = ~is_log_prob(train.to(dtype))
    bad = mask & (offsets < lengths[sequence]) & (bad_train | ~is_log_prob(rollout.to(dtype)))
    # The first flag is the one that is furthest from the end.
    furthest = (bad * torch.arange(stop - start, 0, -1, dtype=torch.int32, device=device)).amax().long().view(1)
    place = (stop - start - furthest).clamp(max=stop - start - 1)
    key = 2.0 * layout.position_of(sequence, place + start) + (~bad_train[place]).double()
    return torch.where(furthest > 0, key, torch.inf)


def _tensors(part: Part) -> tuple[Tensor, Tensor, Tensor]:
    return part.mask, part.train.detach(), part.rollout.detach()


def describe_bad_token(key: float, count: float, default_ids: bool) -> str:
    """One sentence for the error: which token, and what to do."""
    sample, rest = divmod(int(key), _STRIDE)
    position, policy = divmod(rest, 2)
    where = f"sample {sample}"
    if default_ids:
        rank, index = divmod(sample, _LOCAL_IDS)
        where = f"sample {index} of data-parallel rank {rank} (no sequence_ids given)"
        # What lies behind the last key of a rank, or of all ranks, shares that key.
        if sample == MAX_SEQUENCE_ID - 1:
            where = f"a sample of data-parallel rank {rank} or a later one (give sequence_ids to know which)"
        elif index == _LOCAL_IDS - 1:
            where = f"sample {index} or a later one of data-parallel rank {rank} (give sequence_ids to know which)"
    return (
        f"the {('training', 'rollout')[policy]} log-prob of {where}, position {position} is NaN, infinite or positive "
        f"({count:.0f} such tokens in the batch): repair the log-probs, mask these tokens, or set bad_log_probs"
    )
