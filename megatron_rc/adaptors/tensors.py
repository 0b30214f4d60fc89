"""Checks of the tensors that a program passes to its adaptor."""

from __future__ import annotations

from torch import Tensor

from megatron_rc.batch.result import CorrectionResult


def checked_tensor(name: str, value: object, shape: tuple[int, ...] | None = None, place: str = "") -> Tensor:
    """The value, a plain tensor of this shape; None stands for any [rows, tokens].

    Args:
        name: the program's name for it.
        value: the program's argument.
        shape: the expected shape.
        place: words behind the shape in the message, such as `` on CP rank 0 of 2``.

    Raises:
        ValueError: the value is no tensor, is nested, or has another shape.
    """
    expected = f"{'[rows, tokens]' if shape is None else shape}{place}"
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is {type(value).__name__}: expected a tensor of shape {expected}")
    if value.is_nested:
        raise ValueError(f"{name} is a nested tensor: expected it padded to shape {expected}")
    if value.dim() != 2 if shape is None else tuple(value.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}: expected {expected}")
    return value


def weights_and_mask(result: CorrectionResult) -> tuple[Tensor | None, Tensor]:
    """(weights or None, mask) of a correction of one tensor, which is not a list of them."""
    assert isinstance(result.mask, Tensor)
    assert result.weights is None or isinstance(result.weights, Tensor)
    return result.weights, result.mask
