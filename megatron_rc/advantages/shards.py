"""Checks of a shard, before an estimator looks at its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rc.numerics import check_mask
from megatron_rc.parallel.arguments import check_tensors
from megatron_rc.parallel.groups import ParallelGroups
from megatron_rc.parallel.layout import SequenceLayout


def layout_of(mask: Tensor, layout: SequenceLayout | None, groups: ParallelGroups | None) -> SequenceLayout:
    """The layout of a shard; without one, padded rows cut as ``groups.cp`` says.

    Raises:
        ValueError: it does not fit this mask, or this rank.
    """
    check_tensors({}, response_mask=mask)
    check_mask("response_mask", mask)
    return SequenceLayout.given(layout, "response_mask", mask, ParallelGroups.given(groups))


def kept_sequences(group_ids: Tensor, kept: Tensor | None, number: int) -> Tensor:
    """Return which sequences count in baselines, [n] bool: ``kept``, or all of them for None.

    Args:
        group_ids: [n] int64, the prompt of each sequence.
        kept: [n] bool, or None.
        number: n.

    Raises:
        ValueError: ``group_ids`` or ``kept`` has another shape or dtype.
    """
    check_tensors({"kept": kept}, group_ids=group_ids)
    if kept is None:
        kept = torch.ones_like(group_ids, dtype=torch.bool)
    for name, tensor, dtype in (("group_ids", group_ids, torch.int64), ("kept", kept, torch.bool)):
        if tensor.dtype != dtype or tensor.shape != (number,):
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}: expected {dtype} ({number},), one a sequence"
            )
    return kept


def check_floats(name: str, values: Tensor, shape: Sequence[int], each: str) -> None:
    """Raise ValueError unless a tensor holds one float for each token or sequence.

    Args:
        name: name of the argument, for the message.
        values: the argument.
        shape: the wanted shape.
        each: "tokens" or "sequences", for the message.
    """
    check_tensors({}, **{name: values})
    if tuple(values.shape) != tuple(shape) or not values.is_floating_point():
        number = shape[0] if len(shape) == 1 else tuple(shape)
        raise ValueError(
            f"{name} is {values.dtype} {tuple(values.shape)}: expected a float for each of {number} {each}"
        )
