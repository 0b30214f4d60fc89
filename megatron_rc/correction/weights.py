"""Bounds of the importance weights, such as min(ρ, 2), and their normalisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rc.numerics import NORMALIZE_LIMIT, numbers, within
from megatron_rc.settings.config import RolloutCorrectionConfig


@dataclass(frozen=True)
class Weights:
    """Importance weights of tokens, or of sequences whose tokens share one."""

    log: Tensor  # log w, unbounded
    raw: Tensor  # w = exp(log w), clamped
    bounded: Tensor  # w within its bounds


def bounded_weights(log: Tensor, raw: Tensor, config: RolloutCorrectionConfig, scale: Tensor | None = None) -> Weights:
    """Weights w = ``raw`` after ``rollout_is_mode``; ``scale`` multiplies their bounds in nats.

    - ``truncate``: min(w, upper). Ionides 2008, "Truncated Importance Sampling".
    - ``clamp``: min(max(w, lower), upper).
    - ``mask``: w if lower <= w <= upper, else 0; tested on log w. IcePop: Ling Team 2025, "Every Step Evolves".
    """
    if config.is_mode == "mask":
        accept = within(log if scale is None else log / scale, *config.is_log_bounds)
        return Weights(log, raw, raw * numbers(accept))
    lower, upper = scaled_bounds(config, scale)
    return Weights(log, raw, raw.clamp(max=upper) if config.is_mode == "truncate" else raw.clamp(lower, upper))


def scaled_bounds(config: RolloutCorrectionConfig, scale: Tensor | None) -> tuple[Any, Any]:
    """(lower, upper) of the weights, or (lower^f, upper^f) for each factor f of ``scale``."""
    if scale is None:
        return config.is_bounds
    lower, upper = config.is_log_bounds
    return (lower * scale).exp(), (upper * scale).exp()


def normalization(total: Tensor, count: Tensor) -> Tensor:
    """1 / w̄ with w̄ = total / count, 0-D; 1 if w̄ <= 1e-125 or nothing is counted."""
    mean = total / count.clamp(min=1)
    return torch.where(mean > NORMALIZE_LIMIT, 1 / mean, 1.0)
