"""The tokens that an engine kept at each position of a batch by top-p, top-k or min-p: their supports.

Two tensors hold them: ``support_ids`` [ids], the kept tokens of all positions, one position after the other, and
``support_counts``, the number of them at each position. A position with 0 ids counts the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def take_support(ids: Tensor, counts: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """The supports of some positions: (ids, counts) in the order of ``index``, counts in its shape.

    ``index`` has positions of ``counts.flatten()``; −1 gives a position without ids.
    """
    flat, chosen = counts.flatten().long(), index.flatten()
    starts = flat.cumsum(0) - flat
    taken = torch.where(chosen >= 0, flat[chosen.clamp(min=0)], 0)
    ends = taken.cumsum(0)
    # An id's place: its distance from the first id of its position, counted from that position's start.
    shift = (starts[chosen.clamp(min=0)] - (ends - taken)).repeat_interleave(taken)
    return ids[torch.arange(len(shift), device=ids.device) + shift], taken.view(index.shape).to(counts.dtype)


def sorted_support(ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The same supports with the ids of each position in ascending order, each once: (ids, counts).

    An engine may report the tokens by probability, and an id twice. Sorted once on the host, no device has to sort them
    in each pass. Ids that are sorted already are returned as they are.

    ``ids``: [ids] ≥ 0; ``counts``: ids of each position, in any shape.
    """
    span = 2**31  # ids lie below
    keys = owners_of(counts) * span + ids.long()
    if bool((keys.diff() > 0).all()):
        return ids, counts

    keys = keys.unique()  # in ascending order
    sorted_counts = torch.bincount(keys // span, minlength=counts.numel()).view(counts.shape)
    return (keys % span).to(ids.dtype), sorted_counts.to(counts.dtype)


def offsets_of(counts: Tensor) -> Tensor:
    """[positions + 1] int64: position i has the ids from ``offsets[i]`` to ``offsets[i + 1]``."""
    return torch.nn.functional.pad(counts.flatten().long().cumsum(0), (1, 0))


def owners_of(counts: Tensor) -> Tensor:
    """[ids] int64, the position of each id, in ``counts.flatten()``."""
    flat = counts.flatten()
    return torch.arange(len(flat), device=flat.device).repeat_interleave(flat.long())


def support_of(kept: Any, *, counts: Any = None, offsets: Any = None) -> tuple[Tensor, Tensor]:
    """(ids, counts) int32 of the kept tokens in another program's record, for all its positions.

    Args:
        kept: a list of ids for each position, if neither counts nor offsets are given (vLLM's ``sampling_mask``,
            SGLang's ``output_token_sampling_mask``); else the ids of all positions, as a list or a tensor.
        counts: number of ids of each position (prime-rl).
        offsets: first id of each position, and the end of all, from 0 (slime).

    Raises:
        ValueError: another form; names the position, or the numbers that do not agree.
    """
    if counts is None and offsets is None:
        return _of_lists(kept)
    ids = _integers("the kept tokens", kept)
    if offsets is None:
        sizes = _integers("their counts", counts)
    else:
        bounds = _integers("their offsets", offsets)
        if len(bounds) == 0 or bounds[0] != 0:
            raise ValueError(f"the offsets of the kept tokens begin with {bounds[:1].tolist()}: expected 0")
        sizes = bounds.diff()
    if (sizes < 0).any() or int(sizes.sum()) != len(ids):
        raise ValueError(f"{len(ids)} kept tokens came for positions with {int(sizes.sum())}: the record is damaged")
    return ids, sizes


def _of_lists(lists: Any) -> tuple[Tensor, Tensor]:
    if not isinstance(lists, Sequence) or isinstance(lists, str):
        raise ValueError(f"the kept tokens are {type(lists).__name__}: expected a list of token ids for each position")
    for position, ids in enumerate(lists):
        if not isinstance(ids, Sequence) or any(type(one) is not int or abs(one) >= 2**31 for one in ids):
            raise ValueError(f"the kept tokens of position {position} are {ids!r:.80}: expected a list of token ids")
    counts = torch.tensor([len(ids) for ids in lists], dtype=torch.int32)
    return torch.tensor([one for ids in lists for one in ids], dtype=torch.int32), counts


def _integers(name: str, values: Any) -> Tensor:
    """A list of integers as int32."""
    expected = "expected a list of integers of 32 bits"
    try:
        found = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name} are {values!r:.80}: {expected}") from None
    is_integer = not found.is_floating_point() or not found.numel()
    if found.dim() != 1 or not is_integer or (found.double().abs() >= 2**31).any():
        raise ValueError(f"{name} are {found.dtype} {tuple(found.shape)}: {expected}")
    return found.int()
