"""Checks and metrics of the tensors that a program passes to its adaptor."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rc.batch.result import CorrectionResult
from megatron_rc.numerics import k3

MEASURED = ("kl", "k3_kl", "rollout_rs_masked_fraction", "rollout_is_mean")


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


def measured(
    prefix: str, log_ratio: Tensor, mask: Tensor, accepted: Tensor, weights: Tensor | None
) -> dict[str, Tensor]:
    """Values of each token whose mean over the mask is a metric, by the metric's name; finite and like the mask.

    ``MEASURED`` has the names without the prefix; the last one is absent without weights.
    """
    log_ratio = torch.where(mask & log_ratio.isfinite(), log_ratio, torch.zeros_like(log_ratio))
    values = [-log_ratio, k3(log_ratio), (mask & ~accepted).float(), *([] if weights is None else [weights])]
    return {f"{prefix}{name}": value for name, value in zip(MEASURED, values, strict=False)}
