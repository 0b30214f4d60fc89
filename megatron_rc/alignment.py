"""Recognises rollout log-probs that are shifted by one position against the training ones.

Neighbouring pairs of valid tokens are compared straight and crosswise: with d(a, b) = min(|a - b|, 2) nats, a rollout
tensor that is one position late has a small d(train_t, rollout_{t+1}) and a large d(train_t, rollout_t). A lag is
reported where the crosswise distance is less than half of the straight one, over at least 1024 pairs of the batch;
honest batches stay near or above 1, because neighbouring tokens' log-probs have little to do with each other.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_rc.inputs import Part
from megatron_rc.statistics import Sums

MIN_PAIRS = 1024
MAX_PAIRS = 2**12  # of one rank: enough for the verdict, and no cost that grows
RATIO = 0.5
CLIP = 2.0


def shift_sums(part: Part, dtype: torch.dtype, limit: int) -> Sums:
    """The distances over about ``limit`` neighbouring pairs of a micro-batch, 0-D float64 each."""
    index = part.layout.neighbours(max(limit, 1)).to(part.mask.device)
    both = _pairs(part.mask, index).all(1)
    train, rollout = (_pairs(tensor.detach(), index).to(dtype) for tensor in (part.train, part.rollout))
    both = both & train.isfinite().all(1) & rollout.isfinite().all(1)

    def distance(train_column: int, rollout_column: int) -> Tensor:
        difference = (train[:, train_column] - rollout[:, rollout_column]).abs().clamp(max=CLIP)
        return torch.where(both, difference, 0).sum(dtype=torch.float64)

    return {
        "shift_pairs": both.sum().double(),
        "shift_0": (distance(0, 0) + distance(1, 1)) / 2,
        "shift_+1": distance(0, 1),
        "shift_-1": distance(1, 0),
    }


def _pairs(tensor: Tensor, index: Tensor) -> Tensor:
    """[k, 2]: each indexed token and the next, without a copy of the whole tensor."""
    return torch.take(tensor, torch.stack([index, index + 1], dim=1))


def find_lag(sums: Mapping[str, float]) -> int:
    """The positions by which the rollout log-probs are late against the training ones: 0, +1 or -1."""
    if sums["shift_pairs"] < MIN_PAIRS:
        return 0
    lag = min((1, -1), key=lambda candidate: sums[f"shift_{candidate:+d}"])
    return lag if sums[f"shift_{lag:+d}"] < RATIO * sums["shift_0"] else 0
