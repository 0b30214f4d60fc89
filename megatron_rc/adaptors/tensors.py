"""What an adaptor says of an argument that is no tensor of the shape that the program hands over."""

from __future__ import annotations

from torch import Tensor


def checked_tensor(name: str, value: object, shape: tuple[int, ...] | None = None, where: str = "") -> Tensor:
    """The value, a plain tensor of this shape; None stands for any [rows, tokens].

    Args:
        name: what the program calls it.
        value: what it handed over.
        shape: expected.
        where: what the shape follows from, behind it: `` on CP rank 0 of 2``.

    Raises:
        ValueError: the value is no tensor, a nested one, or of another shape.
    """
    expected = f"{'[rows, tokens]' if shape is None else shape}{where}"
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is {type(value).__name__}: expected a tensor of shape {expected}")
    if value.is_nested:
        raise ValueError(f"{name} is a nested tensor: expected it padded to shape {expected}")
    if value.dim() != 2 if shape is None else tuple(value.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}: expected {expected}")
    return value
