"""Recognises rollout log-probs that are shifted by one position against the training ones.

Neighbouring pairs of valid tokens are compared straight and crosswise: with d(a, b) = min(|a - b|, 2) nats, a rollout
tensor that is one position late has a small d(train_t, rollout_{t+1}) and a large d(train_t, rollout_t). A lag is
reported where the crosswise distance is less than half of the straight one, over at least 512 pairs of the batch: so
1,024 tokens in responses of a few are enough. Honest batches stay near or above 1, because neighbouring tokens'
log-probs have little to do with each other; among 20,000 batches of 512 pairs, from unrelated policies that are certain
of 98 % of their tokens, the smallest quotient was 0.75.

Not every pair of a large batch is looked at, so that the cost does not grow with it. A rank's tokens, over all of its
micro-batches, are cut into at most 256 stretches of equal length (and one more a micro-batch), and 64 pairs are
compared in each, from its first trained token on. That token is looked for at 256 evenly spaced places of the stretch.
Up to 16,384 local tokens this compares every pair. Beyond, a response is found that is as long as the distance of these
places, which is local tokens / 65,536, or longer; a shorter one only where it happens to lie on a place. A shift is
missed where fewer than 512 pairs are found in the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rc.correction.header_records import ShiftSums
from megatron_rc.correction.shards import Part

MIN_PAIRS = 512
RATIO = 0.5
CLIP = 2.0
Window = tuple[Tensor, Tensor, Tensor, Tensor]  # flat: train, rollout, mask, is followed by the next position
_WINDOWS = 256  # of one rank, over all of its micro-batches, which have one each at least
_PAIRS = 64  # neighbouring pairs that a window holds
_LOOKS = 256  # places of a stretch where its first trained token is looked for


def shift_sums(parts: Sequence[Part]) -> Tensor:
    """[5] float64, the fields of :class:`ShiftSums`: distances over some neighbouring pairs of local tokens."""
    some = [part for part in parts if part.mask.numel()]
    if not some:
        return torch.zeros(5, dtype=torch.float64, device=parts[0].mask.device)
    stretch = max(_PAIRS, -(-sum(part.mask.numel() for part in some) // _WINDOWS))
    return _distances([_window(part, stretch) for part in some]).double()


def _window(part: Part, stretch: int) -> Window:
    """The tokens of a part that are looked at; how many depends on shapes alone, not on data."""
    count, device = part.mask.numel(), part.mask.device
    if stretch == _PAIRS:
        every = torch.arange(count, device=device)
        return part.train.reshape(-1), part.rollout.reshape(-1), part.mask.reshape(-1), part.layout.followed(every)
    places = _window_places(part.mask, stretch)
    taken = places.clamp(max=count - 1)
    followed = part.layout.followed(taken.view(-1)).view(taken.shape)
    # The last token of a window is the second of a pair only; beyond the end of the tokens there are none.
    followed[:, -1] = False
    train, rollout, mask = (tensor.take(taken).view(-1) for tensor in (part.train, part.rollout, part.mask))
    return train, rollout, mask, followed.view(-1)


def _window_places(mask: Tensor, stretch: int) -> Tensor:
    """[windows, 65] int64, places among the local tokens; those of the last window may lie beyond the end.

    No place but a window's last is in two windows, so that no pair is.
    """
    count, device = mask.numel(), mask.device
    begins = torch.arange(0, count, stretch, device=device).unsqueeze(1)
    width = min(stretch, count)
    looks = torch.arange(0, width, -(-width // _LOOKS), device=device)
    # Among equal values it is the first one; bools have no argmax.
    found = mask.take((begins + looks).clamp_(max=count - 1)).to(torch.uint8).argmax(1, keepdim=True)
    starts = begins + looks[found].clamp_(max=max(width - _PAIRS, 0))
    return starts + torch.arange(min(width, _PAIRS) + 1, device=device)


def _distances(windows: Sequence[Window]) -> Tensor:
    """[5] float32: the same, over windows that stand one after the other."""
    trains, rollouts, masks, flags = zip(*windows, strict=True)
    train, rollout = torch.cat(trains + rollouts).float().nan_to_num_(0.0, 0.0, 0.0).view(2, -1)
    mask = torch.cat(masks)
    pairs = (mask[:-1] & mask[1:] & torch.cat(flags)[:-1]).float()
    # The first or second train token of each pair against its first or second rollout token. Given an output, the loop
    # runs along the pairs; without one it would run along the overlapping views' other dimension.
    apart = pairs.new_empty(2, 2, len(pairs))
    train, rollout = train.unfold(0, 2, 1).t().unsqueeze(1), rollout.unfold(0, 2, 1).t().unsqueeze(0)
    torch.sub(train, rollout, out=apart)
    sums = apart.abs_().clamp_(max=CLIP).view(4, -1) @ pairs
    return torch.cat([pairs.sum().view(1), sums])


def find_lag(sums: ShiftSums) -> int:
    """The positions by which the rollout log-probs are late against the training ones: 0, +1 or -1."""
    # Of the first tokens of the pairs, and of the second ones.
    straight = (sums.straight + sums.straight_next) / 2
    crosswise, lag = min(((sums.late, 1), (sums.early, -1)), key=lambda one: one[0])
    return lag if sums.pairs >= MIN_PAIRS and crosswise < RATIO * straight else 0
