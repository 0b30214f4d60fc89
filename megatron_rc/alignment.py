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
from torch.nn.functional import pad

from megatron_rc.inputs import Part
from megatron_rc.parallel.blocks import Block, spread
from megatron_rc.statistics import Sums

MIN_PAIRS = 1024
RATIO = 0.5
CLIP = 2.0
_RUN_TOKENS = 2**13  # consecutive tokens that are looked at together
_MAX_RUNS = 4  # of one rank, evenly spread: enough for the verdict, and no cost that grows


_NAMES = ("shift_pairs", "shift_0", "shift_+1", "shift_-1")


def shift_sums(parts: Sequence[Part]) -> Sums:
    """The distances over neighbouring pairs in some runs of the local tokens, 0-D float64 each."""
    cuts = [(part, block) for part in parts for block in part.layout.blocks(_RUN_TOKENS, _MAX_RUNS)]
    runs = spread([(part, block) for part, block in cuts if block.shape[-1] > 1], _MAX_RUNS)
    sums = _distances(runs) if runs else torch.zeros(len(_NAMES), dtype=torch.float64, device=parts[0].mask.device)
    return dict(zip(_NAMES, sums.unbind(), strict=True))


def _distances(runs: Sequence[tuple[Part, Block]]) -> Tensor:
    """[4] float64: the values of ``_NAMES`` over some runs, which stand one after the other."""
    train = torch.cat([block.take(part.train.detach()).flatten() for part, block in runs]).float()
    rollout = torch.cat([block.take(part.rollout.detach()).flatten() for part, block in runs]).float()
    mask = torch.cat([block.take(part.mask).flatten() for part, block in runs])
    followed = torch.cat([_followed(part, block) for part, block in runs])
    pairs = (mask[:-1] & mask[1:] & followed[:-1]).float()
    for values in (train, rollout):
        values.nan_to_num_(0.0, 0.0, 0.0)
    straight = _distance(train, rollout)
    late, early = _distance(train[:-1], rollout[1:]), _distance(train[1:], rollout[:-1])
    first, second, late, early = (values @ pairs for values in (straight[:-1], straight[1:], late, early))
    return torch.stack([pairs.sum(), (first + second) / 2, late, early]).double()


def _distance(values: Tensor, others: Tensor) -> Tensor:
    return (values - others).abs_().clamp_(max=CLIP)


def _followed(part: Part, block: Block) -> Tensor:
    """[t] bool: the tokens of a run that are followed by the next position of their sequence."""
    neighbours = part.layout.neighbours(block, part.mask.device)
    return pad(neighbours.expand(*block.shape[:-1], block.shape[-1] - 1), (0, 1)).flatten()


def find_lag(sums: Mapping[str, float]) -> int:
    """The positions by which the rollout log-probs are late against the training ones: 0, +1 or -1."""
    if sums["shift_pairs"] < MIN_PAIRS:
        return 0
    lag = min((1, -1), key=lambda candidate: sums[f"shift_{candidate:+d}"])
    return lag if sums[f"shift_{lag:+d}"] < RATIO * sums["shift_0"] else 0
