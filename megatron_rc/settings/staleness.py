"""Bounds by staleness: wider or tighter bounds for tokens of older weights.

Every bound in nats is multiplied by a factor f: a ratio's bounds [lo, hi] become [lo^f, hi^f], and an upper bound u of
k2 or k3 becomes f · u. A factor above 1 widens the bounds, because ratios of correct tokens spread with every optimizer
step between the versions. A factor below 1 trusts old tokens less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FIELD = "rollout_staleness_scale"


@dataclass(frozen=True)
class StalenessScale:
    """Factors of bounds, a step function of the staleness.

    Attributes:
        steps: the smallest staleness of each factor but the first; ascending, from 1 on.
        factors: one more than ``steps``. The first is 1; it applies below the first step.
    """

    steps: tuple[int, ...]
    factors: tuple[float, ...]

    def levels(self, staleness: Tensor) -> Tensor:
        """Return the index of the factor that applies to each staleness, int64, like ``staleness``."""
        steps = _on_device(self.steps, torch.int64, staleness.device)
        return torch.bucketize(staleness, steps, right=True)

    def of(self, levels: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the factor of each index that ``levels`` returned, like ``levels``."""
        factors = _on_device(self.factors, dtype, levels.device)
        return factors[levels]


def _on_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the numbers as a tensor on the device; the copy does not wait for earlier work of a GPU."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def parse_staleness_scale(text: object) -> StalenessScale | None:
    """Return the factors that ``"1:1.5,4:2"`` describes: 1.5 from a staleness of 1 on, 2 from 4 on; None for None.

    Raises:
        ValueError: another form, a staleness below 1, stalenesses out of order, or a factor that is not positive.
    """
    if text is None:
        return None
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{FIELD}={text!r} must be a comma list of staleness:factor, for example '1:1.5,4:2'")

    pairs = [_read_pair(text, part.strip()) for part in text.split(",")]
    steps = [step for step, _ in pairs]
    if steps != sorted(set(steps)):
        raise ValueError(f"{FIELD}={text!r} must name each staleness once, in ascending order")
    return StalenessScale(steps=tuple(steps), factors=(1.0, *(factor for _, factor in pairs)))


def _read_pair(text: str, part: str) -> tuple[int, float]:
    """Return the staleness and the factor of ``"1:1.5"``; ``text`` is the whole setting, for errors."""
    step_text, _, factor_text = part.partition(":")
    try:
        step = int(step_text)
        factor = float(factor_text)
    except ValueError:
        raise ValueError(f"{FIELD}={text!r}: {part!r} is not staleness:factor, for example '1:1.5'") from None

    # Python reads 1_0 as 10.
    if step < 1 or "_" in part:
        raise ValueError(
            f"{FIELD}={text!r}: {part!r} must begin with a staleness of 1 or more; staleness 0 has the plain thresholds"
        )
    if not 0 < factor < math.inf:
        raise ValueError(f"{FIELD}={text!r}: the factor of {part!r} must be a finite positive number")
    return step, factor
