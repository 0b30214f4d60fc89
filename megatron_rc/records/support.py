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
    """Select the supports of some positions.

    Args:
        ids: [ids], the kept tokens of all positions, one position after the other.
        counts: number of ids of each position, in any shape.
        index: indices into ``counts.flatten()``, in any order and shape; −1 makes a position without ids.

    Returns:
        (ids, counts) of the selected positions, in the order of ``index``; counts in its shape.
    """
    old_counts = counts.flatten().long()
    positions = index.flatten()
    new_counts = torch.where(positions >= 0, old_counts[positions.clamp(min=0)], 0)

    # All ids of a position move by the same distance: from its first place in the new list to that in the old one.
    old_starts = (old_counts.cumsum(0) - old_counts)[positions.clamp(min=0)]
    new_starts = new_counts.cumsum(0) - new_counts
    distances = (old_starts - new_starts).repeat_interleave(new_counts)
    old_places = torch.arange(len(distances), device=ids.device) + distances
    return ids[old_places], new_counts.view(index.shape).to(counts.dtype)


def sorted_support(ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Sort the ids of each position, and drop those that come twice: return (ids, counts).

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
    """Offsets of the supports, [positions + 1] int64: position i has the ids ``offsets[i]`` to ``offsets[i + 1]``."""
    return torch.nn.functional.pad(counts.flatten().long().cumsum(0), (1, 0))


def owners_of(counts: Tensor) -> Tensor:
    """The position that each id belongs to, [ids] int64, as an index into ``counts.flatten()``."""
    flat_counts = counts.flatten()
    return torch.arange(len(flat_counts), device=flat_counts.device).repeat_interleave(flat_counts.long())


def support_of(kept: Any, *, counts: Any = None, offsets: Any = None) -> tuple[Tensor, Tensor]:
    """Return (ids, counts), int32, of the kept tokens in another program's record, for all its positions.

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
        counts = _integers("their counts", counts)
    else:
        offsets = _integers("their offsets", offsets)
        if len(offsets) == 0 or offsets[0] != 0:
            raise ValueError(f"the offsets of the kept tokens begin with {offsets[:1].tolist()}: expected 0")
        counts = offsets.diff()
    total = int(counts.sum())
    if (counts < 0).any() or total != len(ids):
        raise ValueError(
            f"{len(ids)} kept tokens, but their counts sum to {total}, or one is negative: the record is damaged"
        )
    return ids, counts


def _of_lists(lists: Any) -> tuple[Tensor, Tensor]:
    """Return (ids, counts), int32, from a list of ids for each position; ValueError for anything else."""
    if not isinstance(lists, Sequence) or isinstance(lists, str):
        raise ValueError(f"the kept tokens are {type(lists).__name__}: expected a list of token ids for each position")
    for position, ids in enumerate(lists):
        # type() is compared, because True and False are instances of int.
        if not isinstance(ids, Sequence) or any(type(token) is not int or abs(token) >= 2**31 for token in ids):
            raise ValueError(f"the kept tokens of position {position} are {ids!r:.80}: expected a list of token ids")
    all_ids = [token for ids in lists for token in ids]
    counts = [len(ids) for ids in lists]
    return torch.tensor(all_ids, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32)


def _integers(name: str, values: Any) -> Tensor:
    """A list or a tensor of integers as int32, [length]; ValueError, with ``name``, for anything else."""
    expected = "expected a list of integers of 32 bits"
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name} are {values!r:.80}: {expected}") from None
    # An empty list becomes a tensor of floats.
    is_integer = not tensor.is_floating_point() or not tensor.numel()
    if tensor.dim() != 1 or not is_integer or (tensor.double().abs() >= 2**31).any():
        raise ValueError(f"{name} are {tensor.dtype} {tuple(tensor.shape)}: {expected}")
    return tensor.int()
