"""The test for rollout log-probs that are one position late or early against the training ones.

Two neighbouring valid tokens are compared straight and crosswise: with d(a, b) = min(|a - b|, 2) nats, a rollout tensor
that is one position late has a small d(train_t, rollout_t+1) and a large d(train_t, rollout_t). A lag is reported if
the mean crosswise distance is less than half of the straight one. Honest batches stay near or above 1.

Its limits: fewer than 512 pairs of tokens, or fewer than 192 different log-ratios (to the width of a histogram's bin)
prove nothing, because a policy that gives the same few answers over and over can look shifted by chance. Neighbours are
local tokens: where a chunk or a packed sequence ends beside the next one's trained tokens, a pair is compared that is
none. So batches of packed responses of two or three tokens may hide a shift. Other shifts than by one position are not
looked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.correction.sequences import BlockReductions
from megatron_rc.correction.tokens import TokenDecisions
from megatron_rc.measures.tokens import TokenMeasures

MIN_PAIRS = 512
MIN_DIFFERENT = 192  # bins of the histogram of log ρ that hold a token
SHIFT_RATIO = 0.5
_FARTHEST = 2.0  # nats; more says no more about a pair


@dataclass(frozen=True)
class Shift:
    """The position of the two policies' tokens against each other."""

    share: float  # the smaller crosswise distance, as a share of the straight one; 1 if the latter is 0
    lag: int  # the positions by which the rollout log-probs would then be late, +1 or -1
    is_enough: bool  # there are enough pairs, and different ones, to judge


def distances(decisions: TokenDecisions, reductions: BlockReductions) -> Tensor:
    """Compare valid neighbours of a block of tokens.

    Returns:
        [4] float64: the sums over pairs of neighbours of d(train_t, rollout_t), straight, of d(train_t, rollout_t+1),
        small if the rollout tensor is late, and of d(train_t+1, rollout_t), small if it is early; the number of pairs.
    """
    train = decisions.train
    rollout = decisions.rollout
    valid = decisions.valid
    here = slice(None, -1)
    following = slice(1, None)
    pairs = valid[..., here] & valid[..., following]
    late = train[..., here] - rollout[..., following]
    early = train[..., following] - rollout[..., here]
    apart = torch.stack([decisions.log_ratio[..., here], late, early]).abs().clamp(max=_FARTHEST)
    return reductions.totals([*torch.where(pairs, apart, decisions.zero).unbind(0), pairs])


def measure_shift(tokens: TokenMeasures[float]) -> Shift:
    """Return the shift that the measures of a whole batch's tokens show."""
    straight, late, early, num_pairs = tokens.distances
    crosswise, lag = min((late, 1), (early, -1))
    num_different = sum(count > 0 for count in tokens.bins)
    is_enough = num_pairs >= MIN_PAIRS and num_different >= MIN_DIFFERENT
    return Shift(crosswise / straight if straight else 1.0, lag, is_enough)


def find_lag(tokens: TokenMeasures[float]) -> int:
    """Return the positions by which the rollout log-probs are late against the training ones: 0, +1 or -1."""
    shift = measure_shift(tokens)
    return shift.lag if shift.is_enough and shift.share < SHIFT_RATIO else 0
