"""Random batches, results of two programs on them, and what differs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS = 48
WIDTH = 12
# Weights and losses in float32, by formulas that round at other places.
TOLERANCE = 2e-6


@dataclass(frozen=True)
class Batch:
    """Ragged responses, [ROWS, WIDTH] each; the mask is bool, and values outside of it are finite."""

    old: Tensor  # log π_old
    rollout: Tensor  # log π_rollout
    new: Tensor  # log π_θ
    advantages: Tensor  # equal over a response
    mask: Tensor

    @classmethod
    def random(cls, seed: int) -> Batch:
        """The batch of this seed in float32; its first response has the whole width."""
        generator = torch.Generator().manual_seed(seed)
        rollout = -0.2 - 2 * torch.rand(ROWS, WIDTH, generator=generator)
        old = (rollout + 0.4 * torch.randn(ROWS, WIDTH, generator=generator)).clamp(max=0)
        # Most ratios π_θ / π_old are within the clip range: clipped tokens have no gradient to compare.
        new = (old + 0.2 * torch.randn(ROWS, WIDTH, generator=generator)).clamp(max=0)
        lengths = torch.randint(1, WIDTH + 1, (ROWS, 1), generator=generator)
        lengths[0] = WIDTH
        advantages = torch.randn(ROWS, 1, generator=generator).expand(ROWS, WIDTH).contiguous()
        return cls(old, rollout, new, advantages, torch.arange(WIDTH) < lengths)


@dataclass(frozen=True)
class Comparison:
    """One result of both programs.

    Attributes:
        name: settings, result and layout.
        difference: the largest |ours - theirs| / max(1, |theirs|); infinite if only one of two numbers is finite.
        tolerance: the largest difference that rounding explains; 0 for decisions.
        numbers: how many numbers were compared.
    """

    name: str
    difference: float
    tolerance: float
    numbers: int

    @classmethod
    def of(cls, name: str, ours: Tensor, theirs: Tensor, tolerance: float = TOLERANCE) -> Comparison:
        """The comparison of two tensors.

        Raises:
            ValueError: they differ in shape, or have no numbers.
        """
        if ours.shape != theirs.shape or not ours.numel():
            raise ValueError(f"{name}: ours has shape {tuple(ours.shape)}, the host's {tuple(theirs.shape)}")
        ours = ours.detach().double()
        theirs = theirs.detach().double()
        apart = ((ours - theirs).abs() / theirs.abs().clamp(min=1)).nan_to_num(nan=math.inf, posinf=math.inf)
        alike = (ours == theirs) | (ours.isnan() & theirs.isnan())
        return cls(name, float(torch.where(alike, 0.0, apart).max()), tolerance, ours.numel())

    @property
    def fits(self) -> bool:
        """Whether rounding explains the difference."""
        return self.difference <= self.tolerance

    def line(self) -> str:
        """The comparison in one line."""
        if not self.fits:
            return f"DIFFERS  {self.name}: by up to {self.difference:.3g}, allowed is {self.tolerance:.3g}"
        rounding = f", up to rounding: {self.difference:.1e}" if self.difference else ""
        return f"equal    {self.name}, {self.numbers} number{'s' * (self.numbers > 1)}{rounding}"


def report(host: str, comparisons: Sequence[Comparison], left_out: Sequence[str] = ()) -> tuple[str, int]:
    """(text, exit status): 0 if everything fits, 1 if something differs."""
    wrong = sum(not comparison.fits for comparison in comparisons)
    verdict = f"{host} and megatron_rc agree in all {len(comparisons)} results"
    if left_out:
        verdict = f"{host} and megatron_rc agree in the {len(comparisons)} results that were compared; not all were"
    if wrong:
        verdict = f"{wrong} of {len(comparisons)} results of {host} differ"
    lines = [
        *(comparison.line() for comparison in comparisons),
        *(f"left out {reason}" for reason in left_out),
        verdict,
    ]
    return "\n".join(lines) + "\n", int(wrong > 0)
