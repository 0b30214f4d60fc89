"""Recognises rollout log-probs that are shifted by one position against the training ones.

Neighbouring pairs of valid tokens are compared straight and crosswise: with d(a, b) = min(|a - b|, 2) nats, a rollout
tensor that is one position late has a small d(train_t, rollout_{t+1}) and a large d(train_t, rollout_t). A lag is
reported where the crosswise distance is less than half of the straight one, over at least 512 pairs of the batch: so
1,024 tokens in responses of a few are enough. Honest batches stay near or above 1, because neighbouring tokens'
log-probs have little to do with each other; among 20,000 batches of 512 pairs, from unrelated policies that are certain
of 98 % of their tokens, the smallest quotient was 0.75.

Not every pair of a large batch is looked at, so that the cost does not grow with it. A rank's tokens, over all of its
micro-batches, are cut into at most 256 stretches of equal length (and one more a micro-batch), and 64 pairs are
compared in each, from its first trained token on. That token is looked for at up to 256 evenly spaced places of the
stretch. Up to 16,384 local tokens this compares every pair. Beyond, a response is found that is as long as the distance
of these places, which is local tokens / 65,536, or longer; a shorter one only where it happens to lie on a place. A
shift is missed where fewer than 512 pairs are found in the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_rc.correction.header_records import ShiftSums
from megatron_rc.correction.shards import Part

MIN_PAIRS = 512
RATIO = 0.5
CLIP = 2.0
_WINDOWS = 256  # of one rank, over all of its micro-batches, which have one each at least
_PAIRS = 64  # neighbouring pairs that a window holds
_LOOKS = 256  # places of a stretch, at most, where its first trained token is looked for


def shift_sums(parts: Sequence[Part]) -> Tensor:
    """[5] float64, the fields of :class:`ShiftSums`: distances over some neighbouring pairs of local tokens."""
    some = [part for part in parts if part.mask.numel()]
    if not some:
        return torch.zeros(5, dtype=torch.float64, device=parts[0].mask.device)
    stretch = max(_PAIRS, -(-sum(part.mask.numel() for part in some) // _WINDOWS))
    windows = zip(*(_windows(part, stretch) for part in some), strict=True)
    return _distances(*(torch.cat(values) for values in windows)).double()


def _windows(part: Part, stretch: int) -> tuple[Tensor, ...]:
    """The tokens of a part that are looked at, window by window: flat train, rollout, mask, is followed by the next.

    How many they are depends on shapes alone, not on data.
    """
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
    """[windows, 65] int64, places in the flat mask; beyond its end the last one stands again.

    No place but a window's last is in two windows, so that no pair is.
    """
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
    """[5] float32: the same, over tokens of which each may be followed by its neighbour."""
    pairs = (mask[:-1] & mask[1:] & followed[:-1]).float()
    # The first or second train token of each pair against its first or second rollout token.
    trains, rollouts = (
        torch.stack([values[:-1], values[1:]]).float().nan_to_num_(0.0, 0.0, 0.0) for values in (train, rollout)
    )
    apart = (trains.unsqueeze(1) - rollouts).abs_().clamp_(max=CLIP)
    return torch.cat([pairs.sum().view(1), apart.view(4, -1) @ pairs])


def find_lag(sums: ShiftSums) -> int:
    """The positions by which the rollout log-probs are late against the training ones: 0, +1 or -1."""
    # Of the first tokens of the pairs, and of the second ones.
    straight = (sums.straight + sums.straight_next) / 2
    crosswise, lag = min(((sums.late, 1), (sums.early, -1)), key=lambda one: one[0])
    return lag if sums.pairs >= MIN_PAIRS and crosswise < RATIO * straight else 0
