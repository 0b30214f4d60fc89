"""Recognises rollout log-probs that are shifted by one position against the training ones.

Neighbouring pairs of valid tokens are compared straight and crosswise: with d(a, b) = min(|a - b|, 2) nats, a rollout
tensor that is one position late has a small d(train_t, rollout_{t+1}) and a large d(train_t, rollout_t). A lag is
reported if the crosswise distance is less than half of the straight one. Honest batches stay near or above 1: among
3,000 batches of 512 pairs, from unrelated policies that are certain of 98 % of their tokens, the smallest quotient was
0.70. Pairs that look alike count once: a hash puts each into one of 256 cells, and the means of the cells are averaged.

A rank with more than 16,384 tokens compares 64 pairs in each of 256 stretches of its tokens, so that the cost does not
grow with them. ``docs/design.md``, "Errors in the data", says which shifts that misses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_rc.correction.inputs import Part
from megatron_rc.measures.histogram import NUM_CODES, codes_of

MIN_PAIRS = 512
CELLS, MIN_CELLS = 256, 192
RATIO = 0.5
CLIP = 2.0
ROWS = 5  # numbers of a cell: its pairs, and the sums of their four distances
_UNITS = 2.0**20  # of a nat
_FACTOR = 2654435761  # 2^32 / golden ratio, as Fibonacci hashing has it
_WINDOWS = 256  # of one rank, over all of its micro-batches, which have one each at least
_PAIRS = 64  # neighbouring pairs that a window holds
_LOOKS = 256  # places of a stretch, at most, where its first trained token is looked for


@dataclass(frozen=True)
class Shift:
    """The position of the two policies' tokens against each other."""

    share: float  # the smaller crosswise distance, as a share of the straight one; 1 if both are 0
    lag: int  # the positions by which the rollout log-probs would then be late, +1 or -1
    is_enough: bool  # there are enough pairs, and different ones, to judge


def shift_sums(parts: Sequence[Part]) -> Tensor:
    """[5, cells] float64: pairs, and distances of train_t and train_t+1 to rollout_t and rollout_t+1 in 2^-20 nats."""
    some = [part for part in parts if part.mask.numel()]
    if not some:
        return torch.zeros(ROWS, CELLS, dtype=torch.float64, device=parts[0].mask.device)
    stretch = max(_PAIRS, -(-sum(part.mask.numel() for part in some) // _WINDOWS))
    windows = zip(*(_windows(part, stretch) for part in some), strict=True)
    return _distances(*(torch.cat(values) for values in windows))


def _windows(part: Part, stretch: int) -> tuple[Tensor, ...]:
    """Flat train, rollout, mask and "is followed by the next" of the tokens to compare; shapes depend on no data."""
    tokens = tuple(tensor.reshape(-1) for tensor in (part.train, part.rollout, part.mask))
    if stretch == _PAIRS:
        every = torch.arange(part.mask.numel(), device=part.mask.device)
        return *tokens, part.layout.followed(every)
    places = _window_places(tokens[-1], stretch)
    followed = part.layout.followed(places)
    # The last token of a window is only the second of a pair.
    followed[:, -1] = False
    taken = places.view(-1)
    return *(values.index_select(0, taken) for values in tokens), followed.view(-1)


def _window_places(mask: Tensor, stretch: int) -> Tensor:
    """[windows, 65] int64, places in the flat mask, its last place for those beyond; no pair is in two windows."""
    step = -(-stretch // _LOOKS)
    looks_each = -(-stretch // step)
    stretch = looks_each * step
    looks = mask[::step]
    rest = -len(looks) % looks_each
    looks = (pad(looks, (0, rest)) if rest else looks).view(-1, looks_each)
    # Of equal values ``max`` finds the first one.
    starts = looks.max(1).indices.mul_(step).clamp_(max=stretch - _PAIRS)
    starts += torch.arange(0, len(mask), stretch, device=mask.device)
    places = starts.unsqueeze(1) + torch.arange(_PAIRS + 1, device=mask.device)
    return places.clamp_(max=len(mask) - 1)


def _distances(train: Tensor, rollout: Tensor, mask: Tensor, followed: Tensor) -> Tensor:
    """[5, cells] float64, as :func:`shift_sums`, over tokens that may be followed by their neighbour."""
    pairs = (mask[:-1] & mask[1:] & followed[:-1]).double()
    train, rollout = train.float(), rollout.float()
    # The first or second train token of each pair against its first or second rollout token.
    tokens = torch.stack([train[:-1], train[1:], rollout[:-1], rollout[1:]]).nan_to_num_(0.0, 0.0, 0.0)
    apart = (tokens[:2].unsqueeze(1) - tokens[2:]).abs_().clamp_(max=CLIP)
    # In whole numbers, which add up to the same in any order.
    values = apart.view(4, -1).mul_(_UNITS).round_() * pairs
    sums = values.new_zeros(ROWS, CELLS)
    return sums.index_add_(1, _cells(tokens[:2]), torch.cat([pairs.unsqueeze(0), values]))


def _cells(pairs: Tensor) -> Tensor:
    """[t] int64: the cell of each of [2, t] pairs, by bits from the middle of products with odd numbers."""
    first, second = codes_of(pairs) * _FACTOR
    return torch.add(second, first, alpha=NUM_CODES).bitwise_right_shift_(24).bitwise_and_(CELLS - 1)


def measure_shift(sums: Sequence[Sequence[float]]) -> Shift:
    """The shift that the sums of the whole batch show: ``[5][cells]`` of :func:`shift_sums`."""
    cells = [(count, *(value / count for value in values)) for count, *values in zip(*sums, strict=True) if count]
    straight, late, early, straight_next = (sum(cell[row] for cell in cells) for row in range(1, ROWS))
    crosswise, lag = min((late, 1), (early, -1))
    straight = (straight + straight_next) / 2
    is_enough = sum(cell[0] for cell in cells) >= MIN_PAIRS and len(cells) >= MIN_CELLS
    return Shift(crosswise / straight if straight else 1.0, lag, is_enough)


def find_lag(sums: Sequence[Sequence[float]]) -> int:
    """The positions by which the rollout log-probs are late against the training ones: 0, +1 or -1."""
    shift = measure_shift(sums)
    return shift.lag if shift.is_enough and shift.share < RATIO else 0
