"""Published ranges of metrics and thresholds, and this project's own."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_rc.doctor.facts import Facts

_MIGRATION = "verl 2025-10, docs/advance/rollout_is_migration.md"
_ANY = -math.inf


@dataclass(frozen=True)
class Range:
    """Published range of a number; docs/doctor.md says where this project's rules differ, and why."""

    fact: str
    lowest: float
    highest: float
    source: str

    def words(self) -> str:
        """The range in words."""
        if math.isinf(self.highest):
            return f"{self.lowest:g} and more"
        if math.isinf(self.lowest):
            return f"{self.highest:g} and less"
        return f"{self.lowest:g} to {self.highest:g}"

    def complaint(self, facts: Facts) -> str | None:
        """A sentence if the number is outside of the range, else None."""
        value = facts[self.fact]
        if math.isnan(value) or self.lowest <= value <= self.highest:
            return None
        return f"{self.fact} is {value:.3g}, recommended {self.words()} ({self.source})"


RANGES: tuple[Range, ...] = (
    Range("kl", -0.1, 0.1, _MIGRATION),
    Range("rollout_is_mean", 0.5, 2.0, _MIGRATION),
    Range("rollout_is_eff_sample_size", 0.3, math.inf, _MIGRATION),
    Range("rollout_is_std", _ANY, 1.0, _MIGRATION),
    Range("rollout_is_veto_fraction", _ANY, 0.1, _MIGRATION),
    Range("chi2_token", _ANY, 1.0, "verl 2026-01, docs/algo/rollout_corr.md"),
    Range("chi2_seq", _ANY, 10.0, "as χ² of tokens, for sequences"),
    Range("rollout_rs_masked_fraction", _ANY, 0.3, "docs/metrics.md"),
    Range("probs_diff_mean", _ANY, 0.01, "verl, docs/faq/faq.rst (normal: below 0.005)"),
    Range("mult_prob_error", _ANY, 1.05, "NeMo-RL, docs/guides/dtensor-tp-accuracy.md"),
    Range("abs_log_ratio", _ANY, 0.1, "slime, its CI's limit"),
)
