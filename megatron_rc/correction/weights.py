"""Importance weights: w = exp(log ρ) of a token, of a sequence or of its geometric mean, bounded and normalised.

``docs/design.md`` begins with the words and symbols that are used here.
"""

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
    """Weights after ``rollout_is_mode``.

    - ``truncate``: min(w, upper). Ionides 2008, "Truncated Importance Sampling".
    - ``clamp``: min(max(w, lower), upper).
    - ``mask``: w if lower <= w <= upper, else 0; compared with the unclamped log-ratio. IcePop: Ling Team 2025,
      "Every Step Evolves".

    Args:
        ratio: the unbounded weights w, any shape.
        log_ratio: log w, not clamped.
        config: the mode and the bounds.
        scale: multiplies the bounds in nats, broadcasts against ``log_ratio``; None: 1.
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
    lower, upper = ((bound * scale).exp() for bound in log_bounds(config))
    return lower, upper


def normalization(total: Tensor, count: Tensor) -> Tensor:
    """1 / w̄ with w̄ = total / count, 0-D; 1 if w̄ <= 1e-8 or nothing is counted."""
    mean = total / count.clamp(min=1)
    return torch.where(mean > NORMALIZE_LIMIT, 1 / mean, 1.0)
