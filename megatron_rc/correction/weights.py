"""Importance weights from log-ratios: w = exp(log ρ) of a token, a sequence or its geometric mean, then bounded.

``docs/design.md`` begins with the words and symbols that are used here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_rc.numerics import NORMALIZE_LIMIT, exp_ratio, within
from megatron_rc.settings.config import RolloutCorrectionConfig


def log_bounds(config: RolloutCorrectionConfig) -> tuple[float, float]:
    """Bounds of the weights, in nats."""
    return math.log(config.is_bounds[0]), math.log(config.is_bounds[1])


def bounded_weights(
    log_ratio: Tensor, config: RolloutCorrectionConfig, out: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """Weights after ``rollout_is_mode``; the bounds of ``mask`` are compared with the unclamped log-ratio.

    ``truncate`` min(w, hi): Ionides 2008, "Truncated Importance Sampling". ``clamp``: min(max(w, lo), hi). ``mask``: w
    inside [lo, hi], else 0 (IcePop: Ling Team 2025, "Every Step Evolves"). ``scale``, like the log-ratio, multiplies
    the bounds in nats.
    """
    return apply_bounds(exp_ratio(log_ratio, out), log_ratio, config, scale)


def apply_bounds(
    weights: Tensor, log_ratio: Tensor, config: RolloutCorrectionConfig, scale: Tensor | None = None
) -> Tensor:
    """The second step of :func:`bounded_weights`, in place."""
    lower, upper = config.is_bounds
    if scale is not None:
        low, high = scaled_bounds(config, scale)
        if config.is_mode == "mask":
            return weights.mul_(within(log_ratio / scale, *log_bounds(config)))
        return weights.clamp_(max=high) if config.is_mode == "truncate" else weights.clamp_(low, high)
    if config.is_mode == "truncate":
        return weights.clamp_(max=upper)
    if config.is_mode == "clamp":
        return weights.clamp_(lower, upper)
    return weights.mul_(within(log_ratio, *log_bounds(config)))


def scaled_bounds(config: RolloutCorrectionConfig, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(lo^f, hi^f) of the weights, for each factor f."""
    low, high = ((bound * scale).exp() for bound in log_bounds(config))
    return low, high


def normalization(total: Tensor, count: Tensor) -> Tensor:
    """1 / w̄ with w̄ = total / count, 0-D; 1 where w̄ <= 1e-8 or nothing is counted."""
    mean = total / count.clamp(min=1)
    return torch.where(mean > NORMALIZE_LIMIT, 1 / mean, 1.0)
