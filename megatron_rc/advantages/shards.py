"""What the estimators check of a shard before they look at its tokens."""

from __future__ import annotations

from torch import Tensor

from megatron_rc.numerics import check_mask
from megatron_rc.parallel.groups import ParallelGroups
from megatron_rc.parallel.layout import SequenceLayout


def layout_of(mask: Tensor, layout: SequenceLayout | None, groups: ParallelGroups | None) -> SequenceLayout:
    """The layout of a shard; without one, padded rows cut as ``groups.cp`` says.

    Raises:
        ValueError: it is not that of this mask, or of this rank.
    """
    check_mask("response_mask", mask)
    return SequenceLayout.given(layout, "response_mask", mask, ParallelGroups.given(groups))


def check_tensor(name: str, values: object) -> None:
    """Raise ValueError for anything but a tensor."""
    if not isinstance(values, Tensor):
        raise ValueError(f"{name} is {type(values).__name__}: expected a tensor")


def check_tokens(name: str, values: Tensor, mask: Tensor) -> None:
    """Raise ValueError unless there is one float for each token."""
    check_tensor(name, values)
    if values.shape != mask.shape or not values.is_floating_point():
        raise ValueError(
            f"{name} is {values.dtype} {tuple(values.shape)}: expected a float for each of {tuple(mask.shape)} tokens"
        )


def check_sequences(name: str, values: Tensor, number: int) -> None:
    """Raise ValueError unless there is one float for each sequence."""
    check_tensor(name, values)
    if tuple(values.shape) != (number,) or not values.is_floating_point():
        raise ValueError(
            f"{name} is {values.dtype} {tuple(values.shape)}: expected a float for each of {number} sequences"
        )


def check_factor(name: str, value: float) -> None:
    """Raise ValueError unless a factor of the future lies in [0, 1]."""
    if not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"{name}={value!r} must be a number between 0 and 1")
