"""Published ranges of metrics and thresholds, and this project's own."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_rc.doctor.facts import Facts

_MIGRATION = "verl 2025-10, docs/advance/rollout_is_migration.md"


@dataclass(frozen=True)
class Range:
    """Published range of a number.

    Attributes:
        fact: name of the number.
        lowest: lower end of the range.
        highest: upper end of the range.
        source: the publication.
        ours: this project's rule and its reason; empty if it is the same range.
    """

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
    Range(
        "rollout_is_mean",
        0.5,
        2.0,
        _MIGRATION,
        "the mean ratio is exactly 1 if the engine reports the probabilities that it sampled with; a difference of "
        "0.01 and 4 standard errors shows another fault",
    ),
    Range("rollout_is_eff_sample_size", 0.3, math.inf, _MIGRATION),
    Range("rollout_is_std", -math.inf, 1.0, _MIGRATION),
    Range("rollout_is_veto_fraction", -math.inf, 0.1, _MIGRATION),
    Range(
        "chi2_token",
        -math.inf,
        1.0,
        "verl 2026-01, docs/algo/rollout_corr.md",
        "0 is the same policy; the effective sample size is 1 / (1 + χ²), so 1 leaves half of the batch, 9 a tenth",
    ),
    Range(
        "chi2_seq",
        -math.inf,
        10.0,
        "as χ² of tokens, for sequences",
        "it grows like exp(tokens × variance), so a large value speaks against sequence weights, not of a fault",
    ),
    Range(
        "rollout_rs_masked_fraction",
        -math.inf,
        0.3,
        "docs/metrics.md",
        "a verdict from 0.5 on; less is a choice",
    ),
    Range(
        "probs_diff_mean",
        -math.inf,
        0.01,
        "verl, docs/faq/faq.rst (normal: below 0.005)",
        "it gets small for a model that is sure of its tokens, which k3 does not; used only if k3 is unknown",
    ),
    Range(
        "mult_prob_error", -math.inf, 1.05, "NeMo-RL, docs/guides/dtensor-tp-accuracy.md", "used only if k3 is unknown"
    ),
    Range("abs_log_ratio", -math.inf, 0.1, "slime, its CI's limit", "used only if k3 is unknown"),
)


@dataclass(frozen=True)
class Threshold:
    """A threshold of a correction, its published range, and this project's choice."""

    what: str
    recommended: str
    ours: str


THRESHOLDS: tuple[Threshold, ...] = (
    Threshold(
        "weights of tokens, u", "1.5 to 5", "the first of 1.5, 2, 3 and 5 that truncates at most 1 % of the tokens"
    ),
    Threshold(
        "weights of sequences, u", "2 to 10", "2, if sequence weights leave half of the batch; else no sequence weights"
    ),
    Threshold(
        "geometric mean of a sequence",
        "1.0002 to 1.001",
        "the bounds that accept 95 % of the sequences: the mean of n log-ratios with deviation σ has a deviation of "
        "σ / √n, so 1.001 rejects most responses of a few hundred tokens even if the engine only rounds to bfloat16",
    ),
    Threshold(
        "veto", "1e-4 to 1e-6", "no veto unless the doctor finds `tails`, because one token rejects a whole sequence"
    ),
)
