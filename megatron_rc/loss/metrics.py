"""Measures of the loss: sums and extremes over tokens, which merge over micro-batches, ranks and steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.parallel.collectives import largest

SUMS = (
    *("tokens", "log_ratio", "abs_log_ratio", "clipped_low", "clipped_high", "dual_clipped"),
    *("loss", "entropy", "reference_kl"),
)
MAXIMA = ("log_ratio", "-log_ratio")


@dataclass(frozen=True)
class LossStatistics:
    """Sums and maxima over the tokens of the response mask."""

    sums: Tensor  # [len(SUMS)] float64, in the order of ``SUMS``
    maxima: Tensor = largest()  # [len(MAXIMA)] float64, in the order of ``MAXIMA``; -inf without a token

    @classmethod
    def nothing(cls, device: torch.device | None = None) -> LossStatistics:
        """The statistics of no token: sums of 0, maxima of -inf."""
        zeros = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        return cls(zeros, torch.full((len(MAXIMA),), -torch.inf, dtype=torch.float64, device=device))

    def plus(self, **sums: Tensor) -> LossStatistics:
        """These statistics with 0-D numbers added to their sums, by name; ValueError for a name not in ``SUMS``."""
        unknown = sums.keys() - set(SUMS)
        if unknown:
            raise ValueError(f"{sorted(unknown)[0]} is no statistic of the loss: use {', '.join(SUMS)}")
        zero = self.sums.new_zeros(())
        return LossStatistics(
            self.sums + torch.stack([sums[name].detach().double() if name in sums else zero for name in SUMS]),
            self.maxima,
        )

    def merge(self, other: LossStatistics) -> LossStatistics:
        """The statistics of the tokens of both."""
        return LossStatistics(self.sums + other.sums, torch.maximum(self.maxima, other.maxima))


def derive_loss_metrics(sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
    """The metrics of ``docs/metrics.md`` that begin with ``loss/`` and ``policy/``, from global sums on the host."""
    tokens = max(sums["tokens"], 1)
    highest, lowest = (maxima["log_ratio"], -maxima["-log_ratio"]) if sums["tokens"] else (0.0, 0.0)
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
    }
