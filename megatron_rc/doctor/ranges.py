"""What the first releases of rollout correction recommend, and where this project thinks otherwise."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_rc.doctor.facts import Facts

_MIGRATION = "verl 2025-10, docs/advance/rollout_is_migration.md"


@dataclass(frozen=True)
class Range:
    """A range that a number should be in.

    Attributes:
        fact: the number.
        lowest: and ``highest``, that the range allows.
        source: who says so.
        ours: what is different here, and why; empty where nothing is.
    """

    fact: str
    lowest: float
    highest: float
    source: str
    ours: str = ""

    def words(self) -> str:
        """The range."""
        if math.isinf(self.highest):
            return f"{self.lowest:g} and more"
        if math.isinf(self.lowest):
            return f"{self.highest:g} and less"
        return f"{self.lowest:g} to {self.highest:g}"

    def complaint(self, facts: Facts) -> str | None:
        """What the range says of a number outside of it."""
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
        "rounding to bfloat16 leaves k3 near 0.001; at 0.1 a sequence of 50 tokens has "
        "lost any likeness, so precision is a verdict from k3 = 0.002 on",
    ),
    Range(
        "rollout_is_mean",
        0.5,
        2.0,
        _MIGRATION,
        "the mean ratio is exactly 1 where the engine reports what it sampled "
        "from: 0.01 and 4 standard errors off are already a sign of another fault",
    ),
    Range("rollout_is_eff_sample_size", 0.3, math.inf, _MIGRATION),
    Range("rollout_is_std", -math.inf, 1.0, _MIGRATION),
    Range("rollout_is_veto_fraction", -math.inf, 0.1, _MIGRATION),
    Range(
        "chi2_token",
        -math.inf,
        1.0,
        "verl 2026-01, docs/algo/rollout_corr.md",
        "0 is the same policy; the share of effective samples is 1 / (1 + χ²): 1 leaves half of them, 10 a tenth",
    ),
    Range(
        "chi2_seq",
        -math.inf,
        10.0,
        "as χ² of tokens, for sequences",
        "it grows like exp(tokens × variance), so it speaks against sequence weights at this length, not of a fault",
    ),
    Range(
        "rollout_rs_masked_fraction",
        -math.inf,
        0.3,
        "docs/metrics.md",
        "a verdict from 0.5 on; up to that it is a choice",
    ),
    Range(
        "probs_diff_mean",
        -math.inf,
        0.01,
        "verl, docs/faq/faq.rst (normal: below 0.005)",
        "it falls with the certainty of the model, which k3 does not hide: used only where k3 is not known",
    ),
    Range("mult_prob_error", -math.inf, 1.05, "NeMo-RL, docs/guides/dtensor-tp-accuracy.md", "likewise"),
    Range("abs_log_ratio", -math.inf, 0.1, "slime, its CI's limit", "likewise"),
)


@dataclass(frozen=True)
class Threshold:
    """A threshold of a correction, what is recommended for it, and what is done here."""

    what: str
    recommended: str
    ours: str


THRESHOLDS: tuple[Threshold, ...] = (
    Threshold(
        "weights of tokens, u", "1.5 to 5", "the first of 1.5, 2, 3 and 5 that truncates at most 1 % of the tokens"
    ),
    Threshold(
        "weights of sequences, u", "2 to 10", "2, where sequence weights leave half of the batch; else not at all"
    ),
    Threshold(
        "geometric mean of a sequence",
        "1.0002 to 1.001",
        "the bound that 95 % of the sequences keep: the mean of n log-ratios with deviation σ scatters by σ / √n, so "
        "that 1.001 cuts most responses of a few hundred tokens whose engine only rounds to bfloat16",
    ),
    Threshold("veto", "1e-4 to 1e-6", "no veto unless tails are found: one token rejects a whole sequence"),
)
