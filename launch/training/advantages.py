"""Advantages from the rewards of a prompt's group of responses."""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-6


def group_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """(x - mean) / (sample std + 1e-6) within each group; a group of one keeps x / (1 + 1e-6).

    Shao et al. 2024, "DeepSeekMath" (GRPO).

    Args:
        rewards: [n], one for each response.
        group_ids: [n] int64; all responses to a prompt lie on this rank.

    Returns:
        [n], float64.
    """
    _, group, size = group_ids.unique(return_inverse=True, return_counts=True)
    rewards, size = rewards.double(), size.double()

    def total(values: Tensor) -> Tensor:
        return torch.zeros_like(size).index_add_(0, group, values)

    mean = torch.where(size > 1, total(rewards) / size, 0)
    centred = rewards - mean[group]
    variance = total(centred.square()) / (size - 1).clamp(min=1)
    std = torch.where(size > 1, variance.sqrt(), 1)
    return centred / (std[group] + EPSILON)
