"""Bounds of the importance weights, such as min(ρ, 2), and their normalisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rc.numerics import NORMALIZE_LIMIT, within
from megatron_rc.settings.config import RolloutCorrectionConfig


@dataclass(frozen=True)
class Weights:
    """Importance weights of tokens, or of sequences whose tokens share one."""

    log: Tensor  # log w, unbounded
    raw: Tensor  # w = exp(log w), clamped
    bounded: Tensor  # w within its bounds


def bounded_weights(
    raw: Tensor, log: Tensor, config: RolloutCorrectionConfig, bound_scale: Tensor | None = None
) -> Tensor:
    """Return the weights within the bounds of ``rollout_is_mode``.

    - ``truncate``: min(w, upper). Ionides 2008, "Truncated Importance Sampling".
    - ``clamp``: min(max(w, lower), upper).
    - ``mask``: w if lower <= w <= upper, else 0; tested on log w. IcePop: Ling Team 2025, "Every Step Evolves".

    Args:
        raw: w.
        log: log w.
        config: the mode and the bounds.
        bound_scale: factor of the bounds in nats, for each weight; None: 1.
    """
    if config.is_mode == "mask":
        scaled = log if bound_scale is None else log / bound_scale
        return raw.masked_fill(~within(scaled, *config.is_log_bounds), 0)
    lower, upper = scaled_bounds(config, bound_scale)
    if config.is_mode == "truncate":
        return raw.clamp(max=upper)
    return raw.clamp(lower, upper)


def scaled_bounds(config: RolloutCorrectionConfig, bound_scale: Tensor | None) -> tuple[Any, Any]:
    """Return (lower, upper) of the weights, or (lower^f, upper^f) for each factor f of ``bound_scale``."""
    if bound_scale is None:
        return config.is_bounds
    lower, upper = config.is_log_bounds
    return (lower * bound_scale).exp(), (upper * bound_scale).exp()


def normalization(total: Tensor, count: Tensor) -> Tensor:
    """Return 1 / w̄ with w̄ = total / count, 0-D; 1 if w̄ <= 1e-125 or nothing is counted."""
    mean = total / count.clamp(min=1)
    return torch.where(mean > NORMALIZE_LIMIT, 1 / mean, 1.0)
