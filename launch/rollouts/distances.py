"""How far the log-probs of a rollout engine lie from the trainer's, and how far rounding explains."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

# Mean |Δ log-prob| in nats that rounding the weights explains, several times over what small models show.
ROUNDING = {"fp32": 1e-3, "bf16": 0.1, "fp8-e4m3": 0.25, "int8": 0.25}
LAGS = (0, 1, -1)


def tolerance(args: argparse.Namespace) -> float:
    """The largest mean |Δ log-prob| in nats at which engine and trainer have the same weights."""
    given: float | None = args.rollout_check_tolerance
    if given is not None:
        return given
    # The trainer rounds as well.
    return max(ROUNDING[args.rollout_dtype], ROUNDING["bf16" if args.bf16 else "fp32"])


def lag_distances(train: Tensor, rollout: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
    """Σ|train_t - rollout_{t+lag}| over pairs of neighbouring trained tokens.

    Args:
        train: log-probs of the trainer, any shape; neighbours lie along the last dimension.
        rollout: of the engine, likewise.
        mask: bool, likewise.
        positions: in the whole sequence, likewise.

    Returns:
        [4] float64: the sums of ``LAGS``, and the number of pairs.
    """
    pairs = mask[..., 1:] & mask[..., :-1] & (positions.diff(dim=-1) == 1)
    train, rollout = (torch.where(mask, value.double(), 0) for value in (train, rollout))
    first, second = slice(None, -1), slice(1, None)
    sides = {0: (first, first), 1: (first, second), -1: (second, first)}
    sums = [
        torch.where(pairs, (train[..., here] - rollout[..., there]).abs(), 0).sum()
        for here, there in (sides[lag] for lag in LAGS)
    ]
    return torch.stack([*sums, pairs.sum().double()])
