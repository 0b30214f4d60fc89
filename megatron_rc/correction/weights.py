"""Importance weights within their bounds, such as min(ρ, 2), and their normalisation over the batch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megatron_rc.numerics import NORMALIZE_LIMIT, numbers, within
from megatron_rc.settings.config import RolloutCorrectionConfig


def bounded_weights(
    ratio: Tensor, log_ratio: Tensor, config: RolloutCorrectionConfig, scale: Tensor | None = None
) -> Tensor:
    """Weights after ``rollout_is_mode``, from w = ``ratio`` and the unclamped log w; ``scale`` multiplies log bounds.

    - ``truncate``: min(w, upper). Ionides 2008, "Truncated Importance Sampling".
    - ``clamp``: min(max(w, lower), upper).
    - ``mask``: w if lower <= w <= upper, else 0; tested on log w. IcePop: Ling Team 2025, "Every Step Evolves".
    """
    if config.is_mode == "mask":
        return ratio * numbers(within(log_ratio if scale is None else log_ratio / scale, *log_bounds(config)))
    bounds: Any = config.is_bounds if scale is None else scaled_bounds(config, scale)
    lower, upper = bounds
    return ratio.clamp(max=upper) if config.is_mode == "truncate" else ratio.clamp(lower, upper)


def log_bounds(config: RolloutCorrectionConfig) -> tuple[float, float]:
    """Bounds of the weights, in nats."""
    lower, upper = config.is_bounds
    return math.log(lower), math.log(upper)


def scaled_bounds(config: RolloutCorrectionConfig, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(lower^f, upper^f) of the weights, for each factor f."""
    lower, upper = log_bounds(config)
    return (lower * scale).exp(), (upper * scale).exp()


def normalization(total: Tensor, count: Tensor) -> Tensor:
    """1 / w̄ with w̄ = total / count, 0-D; 1 if w̄ <= 1e-8 or nothing is counted."""
    mean = total / count.clamp(min=1)
    return torch.where(mean > NORMALIZE_LIMIT, 1 / mean, 1.0)
