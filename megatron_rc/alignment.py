"""Recognises rollout log-probs that are shifted by one position against the training ones.

Neighbouring pairs of valid tokens are compared straight and crosswise: with d(a, b) = min(|a - b|, 2) nats, a rollout
tensor that is one position late has a small d(train_t, rollout_{t+1}) and a large d(train_t, rollout_t). A lag is
reported where the crosswise distance is less than half of the straight one, over at least 1024 pairs of the batch;
honest batches stay near or above 1, because neighbouring tokens' log-probs have little to do with each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_rc.inputs import Part
from megatron_rc.parallel.blocks import Block
from megatron_rc.statistics import Sums

MIN_PAIRS = 1024
RATIO = 0.5
CLIP = 2.0
_RUN_TOKENS = 2**13  # consecutive tokens that are looked at together
_MAX_RUNS = 4  # of one rank, evenly spread: enough for the verdict, and no cost that grows


def shift_sums(parts: Sequence[Part], dtype: torch.dtype) -> Sums:
    """The distances over neighbouring pairs in some runs of the local tokens, 0-D float64 each."""
    runs = [(part, block) for part in parts for block in part.layout.blocks(_RUN_TOKENS) if block.shape[-1] > 1]
    step = max(1, -(-len(runs) // _MAX_RUNS))
    chosen = [_run_sums(part, block, dtype) for part, block in runs[::step]]
    zeros = torch.zeros(len(_NAMES), dtype=torch.float64, device=parts[0].mask.device)
    return dict(zip(_NAMES, torch.stack([zeros, *chosen]).sum(0).unbind(), strict=True))


_NAMES = ("shift_pairs", "shift_0", "shift_+1", "shift_-1")


def _run_sums(part: Part, block: Block, dtype: torch.dtype) -> Tensor:
    """[4] float64: the values of ``_NAMES`` over one run."""
    tensors = (block.take(tensor.detach()).to(dtype) for tensor in (part.train, part.rollout))
    train, rollout = (tensor.nan_to_num(0.0, 0.0, 0.0) for tensor in tensors)
    mask = block.take(part.mask)
    both = (mask[..., :-1] & mask[..., 1:] & part.layout.neighbours(block, mask.device)).to(dtype)
    ones = torch.stack([train[..., :-1], train[..., 1:], train[..., :-1], train[..., 1:]])
    others = torch.stack([rollout[..., :-1], rollout[..., 1:], rollout[..., 1:], rollout[..., :-1]])
    distances = ones.sub_(others).abs_().clamp_(max=CLIP).mul_(both).view(4, -1).sum(1, dtype=torch.float64)
    straight = distances[:2].mean(0, keepdim=True)
    return torch.cat([both.sum(dtype=torch.float64).view(1), straight, distances[2:]])


def find_lag(sums: Mapping[str, float]) -> int:
    """The positions by which the rollout log-probs are late against the training ones: 0, +1 or -1."""
    if sums["shift_pairs"] < MIN_PAIRS:
        return 0
    lag = min((1, -1), key=lambda candidate: sums[f"shift_{candidate:+d}"])
    return lag if sums[f"shift_{lag:+d}"] < RATIO * sums["shift_0"] else 0
