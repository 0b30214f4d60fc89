"""Checks of a shard, before an estimator looks at its tokens."""

from __future__ import annotations

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


def check_tokens(name: str, values: Tensor, mask: Tensor) -> None:
    """Raise ValueError unless there is one float for each token."""
    check_tensors({}, **{name: values})
    if values.shape != mask.shape or not values.is_floating_point():
        raise ValueError(
            f"{name} is {values.dtype} {tuple(values.shape)}: expected a float for each of {tuple(mask.shape)} tokens"
        )


def check_sequences(name: str, values: Tensor, number: int) -> None:
    """Raise ValueError unless there is one float for each sequence."""
    check_tensors({}, **{name: values})
    if tuple(values.shape) != (number,) or not values.is_floating_point():
        raise ValueError(
            f"{name} is {values.dtype} {tuple(values.shape)}: expected a float for each of {number} sequences"
        )
