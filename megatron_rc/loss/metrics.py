"""Measures of the loss: sums and extremes over tokens, which merge over micro-batches, ranks and steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.parallel.collectives import largest

# Sums over the tokens of the response mask; log_ratio is log π_θ/π_old of the token.
SUMS = (
    "tokens",
    "log_ratio",
    "abs_log_ratio",
    "clipped_low",
    "clipped_high",
    "dual_clipped",
    "loss",
    "entropy",
    "reference_kl",
    "divergence",
)
# Largest values over these tokens. The smallest log ratio is the negative of the second.
MAXIMA = ("log_ratio", "-log_ratio")


@dataclass(frozen=True)
class LossStatistics:
    """Sums and maxima over the tokens of the response mask.

    Attributes:
        sums: [len(SUMS)] float64, in the order of ``SUMS``.
        maxima: [len(MAXIMA)] float64, in the order of ``MAXIMA``; -inf without a token.
    """

    sums: Tensor
    maxima: Tensor = largest()

    @classmethod
    def nothing(cls, device: torch.device | None = None) -> LossStatistics:
        """The statistics of no token: sums of 0, maxima of -inf."""
        sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        maxima = torch.full((len(MAXIMA),), -torch.inf, dtype=torch.float64, device=device)
        return cls(sums, maxima)

    def plus(self, **sums: Tensor) -> LossStatistics:
        """These statistics with 0-D numbers added to their sums, by name; ValueError for a name not in ``SUMS``."""
        unknown = sorted(sums.keys() - set(SUMS))
        if unknown:
            raise ValueError(f"{unknown[0]} is no statistic of the loss: use {', '.join(SUMS)}")
        zero = self.sums.new_zeros(())
        added = torch.stack([sums[name].detach().double() if name in sums else zero for name in SUMS])
        return LossStatistics(self.sums + added, self.maxima)

    def merge(self, other: LossStatistics) -> LossStatistics:
        """The statistics of the tokens of both."""
        return LossStatistics(self.sums + other.sums, torch.maximum(self.maxima, other.maxima))


def derive_loss_metrics(sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
    """The metrics of ``docs/metrics.md`` that begin with ``loss/`` and ``policy/``.

    Args:
        sums: the global sums on the host, by the names of ``SUMS``.
        maxima: the global maxima on the host, by the names of ``MAXIMA``.
    """
    tokens = max(sums["tokens"], 1)
    # Without a token the extremes are infinite.
    highest = maxima["log_ratio"] if sums["tokens"] else 0.0
    lowest = -maxima["-log_ratio"] if sums["tokens"] else 0.0
    return {
        "loss/total": sums["loss"],
        "policy/approx_kl": -sums["log_ratio"] / tokens,
        "policy/abs_log_ratio": sums["abs_log_ratio"] / tokens,
        "policy/log_ratio_max": highest,
        "policy/log_ratio_min": lowest,
        "policy/clip_fraction_low": sums["clipped_low"] / tokens,
        "policy/clip_fraction_high": sums["clipped_high"] / tokens,
        "policy/dual_clip_fraction": sums["dual_clipped"] / tokens,
        "policy/entropy": sums["entropy"] / tokens,
        "policy/reference_kl": sums["reference_kl"] / tokens,
        "policy/divergence": sums["divergence"] / tokens,
    }
