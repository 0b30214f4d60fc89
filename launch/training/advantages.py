"""Advantages from the rewards of a prompt's group of responses."""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-6


def group_advantages(rewards: Tensor, group_ids: Tensor, kept: Tensor | None = None) -> Tensor:
    """(x - mean) / (sample std + 1e-6) within each group; a prompt with one response keeps x / (1 + 1e-6).

    Shao et al. 2024, "DeepSeekMath" (GRPO).

    Args:
        rewards: [n], one for each response.
        group_ids: [n] int64; all responses to a prompt lie on this rank.
        kept: [n] bool; the others count in no mean and no deviation, and have 0. Default: all are.

    Returns:
        [n], float64.
    """
    _, group, count = group_ids.unique(return_inverse=True, return_counts=True)
    kept = torch.ones_like(rewards, dtype=torch.bool) if kept is None else kept
    rewards, count = rewards.double(), count.double()

    def total(values: Tensor) -> Tensor:
        return torch.zeros_like(count).index_add_(0, group, torch.where(kept, values, 0))

    size = total(torch.ones_like(rewards))

    mean = torch.where(count > 1, total(rewards) / size.clamp(min=1), 0)
    centred = rewards - mean[group]
    variance = total(centred.square()) / (size - 1).clamp(min=1)
    std = torch.where(count > 1, variance.sqrt(), 1)
    return torch.where(kept, centred / (std[group] + EPSILON), 0)
