"""Recognises rollout log-probs that are shifted by one position against the training ones.

Neighbouring pairs of valid tokens are compared straight and crosswise: with d(a, b) = min(|a - b|, 2) nats, a rollout
tensor that is one position late has a small d(train_t, rollout_{t+1}) and a large d(train_t, rollout_t). A lag is
reported where the crosswise distance is less than half of the straight one, over at least 512 pairs of the batch: so
1,024 tokens in responses of a few are enough. Honest batches stay near or above 1, because neighbouring tokens'
log-probs have little to do with each other; among 20,000 batches of 512 pairs, from unrelated policies that are certain
of 98 % of their tokens, the smallest quotient was 0.75.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rc.correction.header_records import ShiftSums
from megatron_rc.correction.inputs import Part
from megatron_rc.parallel.blocks import Block, spread

MIN_PAIRS = 512
RATIO = 0.5
CLIP = 2.0
_RUN_TOKENS = 2**13  # consecutive tokens that are looked at together
_MAX_RUNS = 4  # of one rank, evenly spread: enough for the verdict, and no cost that grows


def shift_sums(parts: Sequence[Part]) -> Tensor:
    """[5] float64, the fields of :class:`ShiftSums`: distances over neighbouring pairs in some runs of local tokens."""
    cuts = [(part, block) for part in parts for block in part.layout.blocks(_RUN_TOKENS, _MAX_RUNS)]
    runs = spread([(part, block) for part, block in cuts if block.shape[-1] > 1], _MAX_RUNS)
    if not runs:
        return torch.zeros(5, dtype=torch.float64, device=parts[0].mask.device)
    return _distances(runs).double()


def _distances(runs: Sequence[tuple[Part, Block]]) -> Tensor:
    """[5] float32: the same, over some runs that stand one after the other."""
    values = [block.take(part.train).flatten() for part, block in runs]
    values += [block.take(part.rollout).flatten() for part, block in runs]
    train, rollout = torch.cat(values).float().nan_to_num_(0.0, 0.0, 0.0).view(2, -1)
    mask = torch.cat([block.take(part.mask).flatten() for part, block in runs])
    pairs = (mask[:-1] & mask[1:] & _followed(runs)).float()
    # The first or second train token of each pair against its first or second rollout token. Given an output, the loop
    # runs along the pairs; without one it would run along the overlapping views' other dimension.
    apart = pairs.new_empty(2, 2, len(pairs))
    train, rollout = train.unfold(0, 2, 1).t().unsqueeze(1), rollout.unfold(0, 2, 1).t().unsqueeze(0)
    torch.sub(train, rollout, out=apart)
    sums = apart.abs_().clamp_(max=CLIP).view(4, -1) @ pairs
    return torch.cat([pairs.sum().view(1), sums])


def _followed(runs: Sequence[tuple[Part, Block]]) -> Tensor:
    """[t - 1] bool: all but the last token of the runs, True where the next position of its sequence comes next."""
    sizes = [math.prod(block.shape) for _, block in runs]
    flags = torch.zeros(sum(sizes), dtype=torch.bool, device=runs[0][0].mask.device)
    for (part, block), own in zip(runs, flags.split(sizes), strict=True):
        own.view(block.shape)[..., :-1] = part.layout.neighbours(block, flags.device)
    return flags[:-1]


def find_lag(sums: ShiftSums) -> int:
    """The positions by which the rollout log-probs are late against the training ones: 0, +1 or -1."""
    # Of the first tokens of the pairs, and of the second ones.
    straight = (sums.straight + sums.straight_next) / 2
    crosswise, lag = min(((sums.late, 1), (sums.early, -1)), key=lambda one: one[0])
    return lag if sums.pairs >= MIN_PAIRS and crosswise < RATIO * straight else 0
