"""Published ranges of metrics and thresholds, and this project's own."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_rc.doctor.facts import Facts

_MIGRATION = "verl 2025-10, docs/advance/rollout_is_migration.md"
_ANY = -math.inf
_WITHOUT_K3 = "used only if k3 is unknown"


@dataclass(frozen=True)
class Range:
    """Published range of a number; ``ours`` is this project's rule and its reason, if that is another one."""

    fact: str
    lowest: float
    highest: float
    source: str
    ours: str = ""

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
    Range(
        "kl",
        -0.1,
        0.1,
        _MIGRATION,
        "rounding to bfloat16 leaves k3 near 0.001, and at 0.1 nats a token the two probabilities of 50 tokens differ "
        "by a factor of e⁵ = 148; so `precision` is a verdict from k3 = 0.002 on",
    ),
    Range("rollout_is_mean", 0.5, 2.0, _MIGRATION),
    Range("rollout_is_eff_sample_size", 0.3, math.inf, _MIGRATION),
    Range("rollout_is_std", _ANY, 1.0, _MIGRATION),
    Range("rollout_is_veto_fraction", _ANY, 0.1, _MIGRATION),
    Range(
        "chi2_token",
        _ANY,
        1.0,
        "verl 2026-01, docs/algo/rollout_corr.md",
        "0 is the same policy; the effective sample size is 1 / (1 + χ²), so 1 leaves half of the batch, 9 a tenth",
    ),
    Range(
        "chi2_seq",
        _ANY,
        10.0,
        "as χ² of tokens, for sequences",
        "it grows like exp(tokens × variance), so a large value speaks against sequence weights, not of a fault",
    ),
    Range("rollout_rs_masked_fraction", _ANY, 0.3, "docs/metrics.md", "a verdict from 0.5 on; less is a choice"),
    Range(
        "probs_diff_mean",
        _ANY,
        0.01,
        "verl, docs/faq/faq.rst (normal: below 0.005)",
        "it gets small for a model that is sure of its tokens, which k3 does not; used only if k3 is unknown",
    ),
    Range("mult_prob_error", _ANY, 1.05, "NeMo-RL, docs/guides/dtensor-tp-accuracy.md", _WITHOUT_K3),
    Range("abs_log_ratio", _ANY, 0.1, "slime, its CI's limit", _WITHOUT_K3),
)
