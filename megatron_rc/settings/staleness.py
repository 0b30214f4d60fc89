"""Bounds by staleness: wider or tighter bounds for tokens of older weights.

Every bound in nats is multiplied by a factor f: a ratio's bounds [lo, hi] become [lo^f, hi^f], an upper bound u of k2
or k3 becomes f · u. f > 1 widens the bounds, as ratios of correct tokens spread with every step between the versions;
f < 1 trusts old tokens less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

FIELD = "rollout_staleness_scale"


@dataclass(frozen=True)
class StalenessScale:
    """Factors of bounds, a step function of the staleness."""

    steps: tuple[int, ...]  # the staleness from which each factor applies; ascending, from 1 on
    factors: tuple[float, ...]  # one more than steps; the first, below the first step, is 1

    def levels(self, staleness: Tensor) -> Tensor:
        """The index of the factor for each staleness, int64, like ``staleness``."""
        return torch.bucketize(staleness, _table(self.steps, torch.int64, staleness.device), right=True)

    def of(self, levels: Tensor, dtype: torch.dtype) -> Tensor:
        """The factor of each level."""
        return _table(self.factors, dtype, levels.device)[levels]


def _table(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The numbers on the device, without waiting for a GPU's earlier work."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def parse_staleness_scale(text: object) -> StalenessScale | None:
    """The factors that ``"1:1.5,4:2"`` describes: 1.5 from a staleness of 1 on, 2 from 4 on; or ValueError."""
    if text is None:
        return None
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{FIELD}={text!r} must be a comma list of staleness:factor, for example '1:1.5,4:2'")
    pairs = [_pair(text, part.strip()) for part in text.split(",")]
    steps, factors = tuple(step for step, _ in pairs), (1.0, *(factor for _, factor in pairs))
    if list(steps) != sorted(set(steps)):
        raise ValueError(f"{FIELD}={text!r} must name each staleness once, in ascending order")
    return StalenessScale(steps, factors)


def _pair(text: str, part: str) -> tuple[int, float]:
    step, _, factor = part.partition(":")
    try:
        found = int(step), float(factor)
    except ValueError:
        raise ValueError(f"{FIELD}={text!r}: {part!r} is not staleness:factor, for example '1:1.5'") from None
    if found[0] < 1 or "_" in part:
        raise ValueError(
            f"{FIELD}={text!r}: {part!r} must begin with a staleness of 1 or more; staleness 0 has the plain thresholds"
        )
    if not 0 < found[1] < math.inf:
        raise ValueError(f"{FIELD}={text!r}: the factor of {part!r} must be a finite positive number")
    return found
