"""Every metric of the correction: its name, numerator and denominator, and what docs/metrics.md says about it.

A mean is a quotient of two sums, never a mean of means. The records ``Metric`` and ``Numbers`` come first, then the
table: one row is one metric, and docs/metrics.md has the same rows.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_rc.measures.distributions import derive_quantiles
from megatron_rc.measures.header import REWARD_SIGNS, BatchHeader, Breakdowns
from megatron_rc.measures.tokens import Moments, raw_excess_name
from megatron_rc.numerics import NORMALIZE_LIMIT
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.criterion import Criterion

# verl's oldest dashboards say the word twice in metrics of the policies: mismatch/mismatch_kl.
_OLDEST_PREFIX = "mismatch/"
_OLDEST_NAME_START = "mismatch_"


@dataclass(frozen=True)
class Numbers:
    """What a metric is made of: the numbers of a whole batch; for some metrics a criterion, or a bucket of tokens."""

    header: BatchHeader[float]
    config: RolloutCorrectionConfig
    criterion: Criterion | None = None  # of metrics that each criterion has
    bucket: tuple[float, float, float] = (0.0, 0.0, 0.0)  # valid tokens, rejected tokens, Σ log ρ: of breakdowns

    def total(self, name: str) -> float:
        """Return a sum over sequences, by its name in ``BatchHeader.totals``."""
        return self.header.totals[name]

    @property
    def tokens(self) -> float:
        """The number of valid tokens: T."""
        return self.total("tokens")

    @property
    def sequences(self) -> float:
        """The number of sequences with a valid token: S."""
        return self.total("sequences")

    def of_tokens(self, name: str) -> Moments[float]:
        """Return the moments of a quantity over valid tokens."""
        return self.header.tokens.moments[name]

    def of_sequences(self, name: str) -> Moments[float]:
        """Return the moments of a quantity over sequences."""
        return self.header.sequence_moments[name]

    @property
    def accepted(self) -> float:
        """The number of accepted tokens."""
        accepted: float = sum(counts[2] for counts in self.header.denominators.counts)
        return accepted

    @property
    def mean_weight(self) -> float:
        """w̄, the mean weight that batch normalisation divides by."""
        return ratio(self.header.denominators.total_weight, self.header.denominators.weight_count)

    @property
    def is_normalized(self) -> bool:
        """True if the weights were divided by w̄."""
        return self.config.rollout_is_batch_normalize and self.mean_weight > NORMALIZE_LIMIT

    @property
    def divisor(self) -> float:
        """The number that the weights were divided by: w̄, or 1."""
        return self.mean_weight if self.is_normalized else 1.0

    @property
    def name(self) -> str:
        """The name of the criterion."""
        return "" if self.criterion is None else self.criterion.name

    @property
    def is_negated(self) -> bool:
        """True if the criterion has bounds on ρ: its metrics describe -log ρ, as verl's: high and low change places."""
        return self.criterion is not None and self.criterion.bounds.on_ratio

    @property
    def sign(self) -> float:
        """-1 if the criterion's metrics describe -log ρ, else 1."""
        return -1.0 if self.is_negated else 1.0

    @property
    def sequences_outside(self) -> tuple[float, float]:
        """Shares of sequences whose statistic is above the criterion's bounds, and below them."""
        above = self.total(f"{self.name}_above")
        below = self.total(f"{self.name}_below")
        return ratio(above, self.sequences), ratio(below, self.sequences)

    @property
    def units_outside(self) -> tuple[float, float]:
        """The same shares of what the criterion tests: of tokens, or of sequences."""
        if self.criterion is None or not self.criterion.of_tokens:
            return self.sequences_outside
        above = self.header.tokens.totals[f"{self.name}_above"]
        return ratio(above, self.tokens), ratio(self.total(f"{self.name}_rejected") - above, self.tokens)

    def range_of(self, moments: Moments[float]) -> tuple[float, float]:
        """Return (smallest, largest) value of the criterion's statistic; of -log ρ if the metrics describe that."""
        smallest = extreme(moments.smallest)
        largest = extreme(moments.largest)
        return (0.0 - largest, 0.0 - smallest) if self.is_negated else (smallest, largest)

    @property
    def tested_range(self) -> tuple[float, float]:
        """(smallest, largest) number that the criterion tests, of a token or of a sequence."""
        is_of_tokens = self.criterion is not None and self.criterion.of_tokens
        return self.range_of(self.of_tokens(self.name) if is_of_tokens else self.of_sequences(self.name))

    @property
    def statistic_range(self) -> tuple[float, float]:
        """(smallest, largest) statistic of a sequence."""
        return self.range_of(self.of_sequences(self.name))


@dataclass(frozen=True)
class Metric:
    """One metric of the correction.

    Attributes:
        name: without the prefix; ``<…>`` stands for the name of a criterion or of a bucket.
        numerator: function from the numbers of the batch to the numerator, or to the metric if nothing is divided.
        over: the denominator: ``T`` valid tokens, ``S`` sequences with a valid token, ``T of the bucket``; empty:
            nothing is divided.
        formula: what one token or sequence adds, in words or symbols, for docs/metrics.md.
        values: the range of the metric, for docs/metrics.md.
        advice: one sentence for docs/metrics.md: a bad value, and what to do.
        when: whether a batch has this metric; None: always.
    """

    name: str
    numerator: Callable[[Numbers], float]
    over: Literal["T", "S", "T of the bucket", ""]
    formula: str
    values: str
    advice: str
    when: Callable[[Numbers], bool] | None = None

    def value(self, numbers: Numbers) -> float:
        """Return the metric; 0 if nothing was counted."""
        numerator = self.numerator(numbers)
        if self.over == "T":
            return ratio(numerator, numbers.tokens)
        if self.over == "S":
            return ratio(numerator, numbers.sequences)
        if self.over == "T of the bucket":
            return ratio(numerator, numbers.bucket[0])
        return numerator + 0.0  # a negative zero becomes a positive one


def ratio(numerator: float, denominator: float) -> float:
    """Return the quotient; 0 if nothing was counted."""
    # + 0.0 turns a negative zero into a positive one.
    return numerator / denominator + 0.0 if denominator else 0.0


def extreme(value: float | None) -> float:
    """Return a largest or smallest value; 0 of no values."""
    return 0.0 if value is None or math.isinf(value) else value + 0.0


def eff_sample_size(weights: Moments[float]) -> float:
    """Return (Σ w)² / (n Σ w²) of n weights, in (0, 1]; 0 of no weights, or if all of them are 0.

    Kong 1992, "A Note on Importance Sampling using Standardized Weights".
    """
    # Rounding may take equal weights to just above 1.
    return min(ratio(weights.total * weights.total, weights.count * weights.squared), 1.0)


def sequence_eff_sample_size(header: BatchHeader[float]) -> float:
    """Effective sample size of the unbounded weights w = Π ρ of the sequences with a valid token; 0 without one."""
    return eff_sample_size(header.sequence_moments["sequence_ratio"])


def std(moments: Moments[float], *, lost: int = 0) -> float:
    """Return the standard deviation, with ``count - lost`` in its denominator; 0 for too few values.

    ``lost`` is 1 for the deviation of a sample, as verl's over sequences.
    """
    if moments.count <= lost:
        return 0.0
    squared_distances = moments.squared - moments.total * moments.total / moments.count
    return math.sqrt(max(squared_distances, 0.0) / (moments.count - lost))


def weight_std(weights: Moments[float], excess: Moments[float], *, lost: int = 0) -> float:
    """Return the standard deviation of weights w, from the moments of w and of w - 1.

    A small variance must not be the difference of two large numbers: weights around 1 are taken less 1.
    """
    if not weights.count:
        return 0.0
    mean = weights.total / weights.count
    return std(excess if mean > 0.5 else weights, lost=lost)


POLICY = (
    Metric(
        name="kl",
        numerator=lambda batch: -batch.total("log_ratio"),
        over="T",
        formula="−l",
        values="any",
        advice="far from 0: the engine samples another policy. Look at temperature, precision, stale weights",
    ),
    Metric(
        name="k3_kl",
        numerator=lambda batch: batch.header.tokens.totals["k3"],
        over="T",
        formula="ρ − 1 − l",
        values="≥ 0",
        advice=("the same with less noise, never negative; far above `kl`: few tokens with a huge ρ. Reject them"),
    ),
    Metric(
        name="training_ppl",
        numerator=lambda batch: batch.of_sequences("training_ppl").total,
        over="S",
        formula="exp(−M) of π_train",
        values="[1, e⁸⁰]",
        advice="rising, and `rollout_ppl` not: the trainer's side drifts",
    ),
    Metric(
        name="rollout_ppl",
        numerator=lambda batch: batch.of_sequences("rollout_ppl").total,
        over="S",
        formula="exp(−M) of π_rollout",
        values="[1, e⁸⁰]",
        advice="rising, and `training_ppl` not: the engine's side drifts",
    ),
    Metric(
        name="training_log_ppl",
        numerator=lambda batch: batch.of_sequences("training_log_ppl").total,
        over="S",
        formula="−M of π_train",
        values="≥ 0",
        advice="as `training_ppl`, on a scale that long tails do not bend",
    ),
    Metric(
        name="rollout_log_ppl",
        numerator=lambda batch: batch.of_sequences("rollout_log_ppl").total,
        over="S",
        formula="−M of π_rollout",
        values="≥ 0",
        advice="as `rollout_ppl`, on a scale that long tails do not bend",
    ),
    Metric(
        name="log_ppl_diff",
        numerator=lambda batch: batch.of_sequences("log_ppl_diff").total,
        over="S",
        formula="M_rollout − M_train",
        values="any",
        advice="steadily above 0: the trainer likes the samples less than the engine did",
    ),
    Metric(
        name="log_ppl_abs_diff",
        numerator=lambda batch: batch.of_sequences("log_ppl_abs_diff").total,
        over="S",
        formula="\\|M_rollout − M_train\\|",
        values="≥ 0",
        advice="far above the absolute value of `log_ppl_diff`: errors of both signs, as rounding makes them",
    ),
    Metric(
        name="log_ppl_diff_max",
        numerator=lambda batch: extreme(batch.of_sequences("log_ppl_diff").largest),
        over="",
        formula="largest M_rollout − M_train",
        values="any",
        advice="a long tail: single sequences are far off; reject them (`seq_mean_k1`)",
    ),
    Metric(
        name="log_ppl_diff_min",
        numerator=lambda batch: extreme(batch.of_sequences("log_ppl_diff").smallest),
        over="",
        formula="smallest M_rollout − M_train",
        values="any",
        advice="as `log_ppl_diff_max`",
    ),
    Metric(
        name="ppl_ratio",
        numerator=lambda batch: batch.of_sequences("ppl_ratio").total,
        over="S",
        formula="exp(M_rollout − M_train)",
        values="> 0",
        advice="as `log_ppl_diff`, as a ratio",
    ),
    Metric(
        name="chi2_token",
        # E[ρ²] - 1 = E[(ρ - 1)²] + 2 E[ρ - 1]
        numerator=lambda batch: batch.of_tokens("ratio_excess").squared + 2 * batch.of_tokens("ratio_excess").total,
        over="T",
        formula="ρ² − 1",
        values="≥ −1",
        advice="> 1: token weights have more variance than signal; truncate lower, or reject",
    ),
    Metric(
        name="chi2_seq",
        numerator=lambda batch: (
            batch.of_sequences("sequence_ratio_excess").squared + 2 * batch.of_sequences("sequence_ratio_excess").total
        ),
        over="S",
        formula="(Π ρ)² − 1",
        values="≥ −1",
        advice="> 1: the same of sequence weights, which grow with the length; use token or geometric ones",
    ),
    Metric(
        name="num_tokens",
        numerator=lambda batch: batch.tokens,
        over="",
        formula="T",
        values="≥ 0",
        advice="falling: responses are lost before the correction; look at the masks",
    ),
    Metric(
        name="num_sequences",
        numerator=lambda batch: batch.sequences,
        over="",
        formula="S",
        values="≥ 0",
        advice="as `num_tokens`",
    ),
)

BAD_LOG_PROBS = Metric(
    name="bad_log_probs",
    numerator=lambda batch: batch.header.data.bad_tokens,
    over="",
    formula="number of NaN, infinite or positive log-probs (> 1e-4)",
    values="≥ 0",
    advice="> 0: repair the engine. Only if `bad_log_probs` rejects; otherwise `check()` raises",
    when=lambda batch: batch.config.bad_log_probs != "error",
)


def _sampled_weight(batch: Numbers) -> str:
    """Return the name of the quantity whose effective sample size is that of the unbounded weights."""
    return "raw_weight" if batch.config.weighs_single_tokens else "sampled_weight"


def _extremes_of(batch: Numbers) -> str:
    """Return the name of the quantity whose extremes are those of the bounded weights."""
    # verl's extremes of sequence weights are those before any bound.
    return "weight" if batch.config.weighs_tokens else "raw_weight"


_WEIGHT_ADVICE = {
    "mean": "far from 1: the correction scales the loss; look at `kl` first, then normalise",
    "std": "> 1: noise; lower u, or a coarser level",
    "max": "raw far above u: outliers are cut here; if they come often, reject them",
    "min": "near 0: tokens that the trainer would never sample; a veto or a lower bound rejects them",
    "eff_sample_size": "< 0.5: half of the batch is lost to the spread of the weights. Bounded and applied are equal",
}
_WEIGHT_FORMULA = {
    "mean": "w",
    "std": "standard deviation of w, divided by T",
    "max": "largest w",
    "min": "smallest w",
    "eff_sample_size": "(Σw)² / (T Σw²); raw without the upper limit of exp(20)",
}


def _share_outside(batch: Numbers, *, of_sequences: str, of_tokens: str) -> float:
    """Return the share of weights on one side of their bounds: of sequences at sequence level, else of tokens."""
    if batch.config.rollout_is == "sequence":
        return ratio(batch.total(of_sequences), batch.sequences)
    return ratio(batch.total(of_tokens), batch.tokens)


def _weight_metric(stage: str, kind: str, numerator: Callable[[Numbers], float]) -> Metric:
    """Return one metric of all weights at one stage: ``raw_``, bounded (no word) or ``applied_``."""
    return Metric(
        name=f"rollout_is_{stage}{kind}",
        numerator=numerator,
        over="T" if kind == "mean" else "",
        formula=_WEIGHT_FORMULA[kind],
        values="(0, 1], 0 if all w are 0" if kind == "eff_sample_size" else "≥ 0",
        advice=_WEIGHT_ADVICE[kind],
    )


WEIGHTS = (
    _weight_metric("raw_", "mean", lambda batch: batch.of_tokens("raw_weight").total),
    _weight_metric("", "mean", lambda batch: batch.of_tokens("weight").total),
    _weight_metric("applied_", "mean", lambda batch: batch.of_tokens("weight").total / batch.divisor),
    _weight_metric(
        "raw_",
        "std",
        lambda batch: weight_std(batch.of_tokens("raw_weight"), batch.of_tokens(raw_excess_name(batch.config))),
    ),
    _weight_metric("", "std", lambda batch: weight_std(batch.of_tokens("weight"), batch.of_tokens("weight_excess"))),
    _weight_metric(
        "applied_",
        "std",
        lambda batch: weight_std(batch.of_tokens("weight"), batch.of_tokens("weight_excess")) / batch.divisor,
    ),
    _weight_metric("raw_", "max", lambda batch: extreme(batch.of_tokens("raw_weight").largest)),
    _weight_metric("", "max", lambda batch: extreme(batch.of_tokens(_extremes_of(batch)).largest)),
    _weight_metric("applied_", "max", lambda batch: extreme(batch.of_tokens("weight").largest) / batch.divisor),
    _weight_metric("raw_", "min", lambda batch: extreme(batch.of_tokens("raw_weight").smallest)),
    _weight_metric("", "min", lambda batch: extreme(batch.of_tokens(_extremes_of(batch)).smallest)),
    _weight_metric("applied_", "min", lambda batch: extreme(batch.of_tokens("weight").smallest) / batch.divisor),
    _weight_metric("raw_", "eff_sample_size", lambda batch: eff_sample_size(batch.of_tokens(_sampled_weight(batch)))),
    _weight_metric("", "eff_sample_size", lambda batch: eff_sample_size(batch.of_tokens("weight"))),
    _weight_metric("applied_", "eff_sample_size", lambda batch: eff_sample_size(batch.of_tokens("weight"))),
    Metric(
        name="rollout_is_ratio_fraction_high",
        numerator=lambda batch: _share_outside(batch, of_sequences="mean_above", of_tokens="above"),
        over="",
        formula="share with raw w > u; of S at sequence level, else of T",
        values="[0, 1]",
        advice="> 0.1: the bounds bias the gradient; bring the policies closer",
    ),
    Metric(
        name="rollout_is_ratio_fraction_low",
        numerator=lambda batch: _share_outside(batch, of_sequences="mean_below", of_tokens="below"),
        over="",
        formula="share with raw w < lo; of S at sequence level, else of T",
        values="[0, 1]",
        advice="> 0.1: the bounds bias the gradient; bring the policies closer",
    ),
    Metric(
        name="rollout_is_oob_ratio",
        numerator=lambda batch: batch.total("above") + batch.total("below"),
        over="T",
        formula="1 if raw w is outside of [lo, u]",
        values="[0, 1]",
        advice="as `rollout_is_ratio_fraction_high`. Only with `clamp` and `mask`",
        when=lambda batch: batch.config.is_mode != "truncate",
    ),
    Metric(
        name="rollout_is_masked_fraction",
        numerator=lambda batch: batch.total("above") + batch.total("below"),
        over="T",
        formula="1 if raw w is outside of [lo, u]",
        values="[0, 1]",
        advice="> 0.1: that share of the tokens trains nothing. Only with `mask`",
        when=lambda batch: batch.config.is_mode == "mask",
    ),
    Metric(
        name="rollout_is_seq_masked_fraction",
        numerator=lambda batch: batch.total("sequences_outside"),
        over="S",
        formula="1 if it has such a token",
        values="[0, 1]",
        advice="near 1 with long responses, and harmless at token level. Only with `mask`",
        when=lambda batch: batch.config.is_mode == "mask",
    ),
    Metric(
        name="rollout_is_batch_norm_factor",
        numerator=lambda batch: batch.divisor,
        over="",
        formula=(
            "w̄, what the weights are divided by: Σw / T at token level, else the mean over S of one weight each; under "
            "m' with the scope `accepted`"
        ),
        values="> 0",
        advice=(
            "far from 1: look at `rollout_is_mean`. 1 if nothing was divided (next row). Only with "
            "`rollout_is_batch_normalize`"
        ),
        when=lambda batch: batch.config.rollout_is_batch_normalize,
    ),
    Metric(
        name="rollout_is_batch_norm_skipped",
        numerator=lambda batch: float(batch.mean_weight <= NORMALIZE_LIMIT),
        over="",
        formula=(
            "1 if w̄ was not divided by: w̄ ≤ 1e-125, all weights are 0 or at their limit; if the correction is made in "
            "the loss w̄ < 1e-25, because the float32 gradients that were multiplied by such weights have no digits left"
        ),
        values="0, 1",
        advice=("1: no weight is left, the policies have nothing in common. Only with `rollout_is_batch_normalize`"),
        when=lambda batch: batch.config.rollout_is_batch_normalize,
    ),
)

SEQUENCE_WEIGHTS = (
    Metric(
        name="rollout_is_seq_mean",
        numerator=lambda batch: batch.of_sequences("mean_weight").total,
        over="S",
        formula="q",
        values="≥ 0",
        advice="far from 1: as `rollout_is_mean`; far from that one: long and short responses differ",
    ),
    Metric(
        name="rollout_is_seq_std",
        numerator=lambda batch: weight_std(
            batch.of_sequences("mean_weight"), batch.of_sequences("mean_weight_excess"), lost=1
        ),
        over="",
        formula="standard deviation of q, divided by S − 1",
        values="≥ 0",
        advice="> 1: whole responses are up- or down-weighted",
    ),
    Metric(
        name="rollout_is_seq_max",
        numerator=lambda batch: extreme(batch.of_sequences("mean_weight").largest),
        over="",
        formula="largest q",
        values="≥ 0",
        advice="at u: this response is far off",
    ),
    Metric(
        name="rollout_is_seq_min",
        numerator=lambda batch: extreme(batch.of_sequences("mean_weight").smallest),
        over="",
        formula="smallest q",
        values="≥ 0",
        advice="at lo or 0: this response is far off",
    ),
    Metric(
        name="rollout_is_seq_max_deviation",
        numerator=lambda batch: max(
            abs(extreme(batch.of_sequences("mean_weight_excess").largest)),
            abs(extreme(batch.of_sequences("mean_weight_excess").smallest)),
        ),
        over="",
        formula="largest \\|q − 1\\|",
        values="≥ 0",
        advice="`rollout_is_seq_max` and `rollout_is_seq_min` in one number",
    ),
    Metric(
        name="rollout_is_seq_fraction_high",
        numerator=lambda batch: batch.total("mean_above"),
        over="S",
        formula="1 if its mean *raw* weight is > u",
        values="[0, 1]",
        advice="> 0.1: as `rollout_is_ratio_fraction_high`, for responses",
    ),
    Metric(
        name="rollout_is_seq_fraction_low",
        numerator=lambda batch: batch.total("mean_below"),
        over="S",
        formula="1 if its mean *raw* weight is < lo",
        values="[0, 1]",
        advice="> 0.1: as `rollout_is_ratio_fraction_low`, for responses",
    ),
)

REJECTION = (
    Metric(
        name="rollout_rs_masked_fraction",
        numerator=lambda batch: batch.tokens - batch.accepted,
        over="T",
        formula="1 if the token is rejected",
        values="[0, 1]",
        advice=(
            "> 0.3: most of the sampling is wasted; fix the mismatch, or widen the bounds. 1: every step is skipped"
        ),
    ),
    Metric(
        name="rollout_rs_seq_masked_fraction",
        numerator=lambda batch: batch.total("rejected_sequences"),
        over="S",
        formula="1 if it loses a token",
        values="[0, 1]",
        advice="as above for sequence criteria; near 1 for token criteria with long responses",
    ),
)

CRITERION = (
    Metric(
        name="rollout_rs_<criterion>_masked_fraction",
        numerator=lambda batch: batch.total(f"{batch.name}_rejected"),
        over="T",
        formula="1 if this criterion rejects the token by itself",
        values="[0, 1]",
        advice="tells which criterion does it. 0 for good: it does nothing, drop it",
    ),
    Metric(
        name="rollout_rs_<criterion>_seq_masked_fraction",
        numerator=lambda batch: batch.total(f"{batch.name}_rejected_sequences"),
        over="S",
        formula="1 if it loses a token to this criterion",
        values="[0, 1]",
        advice="the same, of sequences",
    ),
)

VETO = (
    Metric(
        name="rollout_is_veto_fraction",
        numerator=lambda batch: batch.total("veto_rejected_sequences"),
        over="S",
        formula="1 if the veto rejects it, or would reject it without `rollout_is_apply=False`",
        values="[0, 1]",
        advice="> 0.05: too strict for the length, or the engine is broken. Only with a veto",
    ),
    Metric(
        name="rollout_is_catastrophic_token_fraction",
        numerator=lambda batch: batch.total("veto_rejected"),
        over="T",
        formula="1 if ρ is below the veto's threshold",
        values="[0, 1]",
        advice="> 1e-4: look at these tokens. Only with a veto",
    ),
)

MEASURED = (
    Metric(
        name="rollout_rs_<measured>_mean",
        numerator=lambda batch: batch.sign * batch.total(f"{batch.name}_statistic"),
        over="T",
        formula="x; a sequence's x counts once for each of its tokens",
        values="k1 any, else ≥ 0",
        advice="near or beyond a bound: the bound cuts through the middle of the batch, not its tail",
    ),
    Metric(
        name="rollout_rs_<measured>_std",
        numerator=lambda batch: std(batch.of_tokens(batch.name)),
        over="",
        formula="standard deviation of x clamped to its bounds, divided by T",
        values="≥ 0",
        advice="as wide as the bounds are apart: they cut most of the batch",
    ),
    Metric(
        name="rollout_rs_<measured>_max",
        numerator=lambda batch: batch.tested_range[1],
        over="",
        formula="largest x, over its units",
        values="k1 any, else ≥ 0",
        advice="far beyond a bound: an outlier, which the criterion removes",
    ),
    Metric(
        name="rollout_rs_<measured>_min",
        numerator=lambda batch: batch.tested_range[0],
        over="",
        formula="smallest x, over its units",
        values="k1 any, else ≥ 0",
        advice="far beyond a bound: an outlier, which the criterion removes",
    ),
    Metric(
        name="rollout_rs_<measured>_fraction_high",
        numerator=lambda batch: batch.units_outside[1 if batch.is_negated else 0],
        over="",
        formula="share of units with x above its bound; k1: **ρ below lo**",
        values="[0, 1]",
        advice="> 0.1: widen the bound, or fix the engine",
    ),
    Metric(
        name="rollout_rs_<measured>_fraction_low",
        numerator=lambda batch: batch.units_outside[0] if batch.is_negated else 0.0,
        over="",
        formula="share of units with x below its bound; k1: **ρ above hi**; else 0",
        values="[0, 1]",
        advice="as `rollout_rs_<measured>_fraction_high`",
    ),
    Metric(
        name="rollout_rs_<measured>_seq_mean",
        numerator=lambda batch: batch.sign * batch.of_sequences(batch.name).total,
        over="S",
        formula="a sequence's x",
        values="k1 any, else ≥ 0",
        advice="as `rollout_rs_<measured>_mean`",
    ),
    Metric(
        name="rollout_rs_<measured>_seq_std",
        numerator=lambda batch: std(batch.of_sequences(batch.name), lost=1),
        over="",
        formula="standard deviation of a sequence's x, divided by S − 1",
        values="≥ 0",
        advice="as `rollout_rs_<measured>_std`",
    ),
    Metric(
        name="rollout_rs_<measured>_seq_max",
        numerator=lambda batch: batch.statistic_range[1],
        over="",
        formula="largest x of a sequence",
        values="k1 any, else ≥ 0",
        advice="as `rollout_rs_<measured>_max`",
    ),
    Metric(
        name="rollout_rs_<measured>_seq_min",
        numerator=lambda batch: batch.statistic_range[0],
        over="",
        formula="smallest x of a sequence",
        values="k1 any, else ≥ 0",
        advice="as `rollout_rs_<measured>_min`",
    ),
    Metric(
        name="rollout_rs_<measured>_seq_max_deviation",
        numerator=lambda batch: max(abs(value) for value in batch.statistic_range),
        over="",
        formula="largest absolute x of a sequence",
        values="≥ 0",
        advice="the two rows above in one number",
    ),
    Metric(
        name="rollout_rs_<measured>_seq_fraction_high",
        numerator=lambda batch: batch.sequences_outside[1 if batch.is_negated else 0],
        over="",
        formula="share of S with x above the bound; k1: ρ below lo",
        values="[0, 1]",
        advice="as `rollout_rs_<measured>_fraction_high`",
    ),
)

# Only of criteria with bounds on ρ.
RATIO = (
    Metric(
        name="rollout_rs_<ratio>_seq_fraction_low",
        numerator=lambda batch: batch.sequences_outside[0],
        over="",
        formula="share of S with x below the bound: ρ above hi",
        values="[0, 1]",
        advice="as `rollout_rs_<measured>_fraction_low`",
    ),
    Metric(
        name="rollout_rs_<ratio>_rho_fraction_above",
        numerator=lambda batch: batch.units_outside[0],
        over="",
        formula="share of units with ρ above hi",
        values="[0, 1]",
        advice=(
            "much larger than `rollout_rs_<ratio>_rho_fraction_below`: the policies differ in one direction; "
            "asymmetric bounds may fit"
        ),
    ),
    Metric(
        name="rollout_rs_<ratio>_rho_fraction_below",
        numerator=lambda batch: batch.units_outside[1],
        over="",
        formula="share of units with ρ below lo",
        values="[0, 1]",
        advice="much larger than `rollout_rs_<ratio>_rho_fraction_above`: the same",
    ),
)

# As verl named them in 2025-11, when there was one criterion: only if one measured criterion has bounds on ρ.
VERL_RATIO = (
    Metric(
        name="rollout_rs_ratio_fraction_high",
        numerator=lambda batch: batch.units_outside[0],
        over="",
        formula="`rollout_rs_<ratio>_rho_fraction_above`, if one criterion has bounds on ρ",
        values="[0, 1]",
        advice="the name of verl in 2025-11",
    ),
    Metric(
        name="rollout_rs_ratio_fraction_low",
        numerator=lambda batch: batch.units_outside[1],
        over="",
        formula="`rollout_rs_<ratio>_rho_fraction_below`, likewise",
        values="[0, 1]",
        advice="the name of verl in 2025-11",
    ),
)


def _masked_fraction(bucket: str, advice: str) -> Metric:
    """Return the metric of the rejected tokens of a bucket."""
    return Metric(
        name=f"rollout_rs_masked_fraction_{bucket}",
        numerator=lambda batch: batch.bucket[1],
        over="T of the bucket",
        formula="1 if the token is rejected",
        values="[0, 1]",
        advice=advice,
    )


def _token_fraction(bucket: str, advice: str) -> Metric:
    """Return the metric of the share of a bucket's tokens; the breakdowns hold all valid tokens."""
    return Metric(
        name=f"{bucket}_token_fraction",
        numerator=lambda batch: batch.bucket[0],
        over="T",
        formula="1 if the token is in the bucket",
        values="[0, 1]",
        advice=advice,
    )


def _bucket_kl(bucket: str, advice: str) -> Metric:
    """Return the metric of the two policies' distance at the tokens of a bucket."""
    return Metric(
        name=f"{bucket}_kl",
        numerator=lambda batch: -batch.bucket[2],
        over="T of the bucket",
        formula="−l",
        values="any",
        advice=advice,
    )


LENGTH = (
    _masked_fraction(
        "length_<from>_<to>",
        "rising with the length: the criterion punishes long responses; use `seq_mean` in place of `seq_sum`",
    ),
)
REWARD = (
    _masked_fraction("reward_<sign>", "unequal: rejection shifts the mean advantage; compare it before and after"),
)
STALENESS = (
    _masked_fraction("staleness_<steps>", "rising: old samples are useless; sample more often"),
    _token_fraction("staleness_<steps>", "the last one large: raise `max_staleness` to see more, or sample more often"),
    _bucket_kl("staleness_<steps>", "large at 0 already: not staleness, the engine"),
)
TURN = (
    _masked_fraction(
        "turn_<turn>",
        "rising: the engines disagree more behind long contexts, or about observations; see the turn's `kl`",
    ),
    _token_fraction("turn_<turn>", "the last one large: most tokens are in late turns; see `--max-turns`"),
    _bucket_kl(
        "turn_<turn>",
        "near 0 at turn 0 and large later: an observation has other tokens in the trainer than in the engine",
    ),
)


def derive_metrics(header: BatchHeader[float], config: RolloutCorrectionConfig) -> dict[str, float]:
    """Return every metric of one rollout batch; ``docs/metrics.md`` describes them.

    Args:
        header: the numbers of the whole batch, reduced over all ranks and copied to the host.
        config: the correction; it says which metrics there are.

    Returns:
        The value of each metric by its name, which begins with ``config.metric_prefix``. Names are verl's where verl
        has the metric. Without a valid token every value is 0, except ``rollout_is_batch_norm_factor`` and
        ``rollout_is_batch_norm_skipped``, which are 1.
    """
    batch = Numbers(header, config)
    metrics = values_of(POLICY, batch)
    if config.metric_prefix == _OLDEST_PREFIX:
        metrics = {_OLDEST_NAME_START + name: value for name, value in metrics.items()}
    metrics |= derive_quantiles(header, config)
    if config.rollout_is is not None:
        metrics |= values_of(WEIGHTS + SEQUENCE_WEIGHTS, batch)
    metrics |= values_of(REJECTION, batch) | _criteria_metrics(batch)
    if config.rollout_token_veto_threshold is not None:
        metrics |= values_of(VETO, batch)
    for bucket_metrics, label, bucket in _buckets(header.breakdowns):
        metrics |= values_of(bucket_metrics, dataclasses.replace(batch, bucket=bucket), label)
    metrics |= values_of([BAD_LOG_PROBS], batch)
    return {config.metric_prefix + name: value for name, value in metrics.items()}


def values_of(metrics: Sequence[Metric], numbers: Numbers, label: str = "") -> dict[str, float]:
    """Return the value of each metric by its name, without those that do not apply to the batch (``Metric.when``).

    Args:
        metrics: rows of this module's tables.
        numbers: the numbers of the batch, from which the values are computed.
        label: the name of the criterion or of the bucket; replaces the placeholder ``<…>`` in the metrics' names.
    """
    return {
        re.sub(r"<.*>", label, metric.name): metric.value(numbers)
        for metric in metrics
        if metric.when is None or metric.when(numbers)
    }


def _criteria_metrics(batch: Numbers) -> dict[str, float]:
    """Return the metrics of each criterion; the only one with bounds on ρ has those of verl's first names too."""
    metrics: dict[str, float] = {}
    with_bounds_on_ratio = []
    for criterion in batch.config.criteria:
        numbers = dataclasses.replace(batch, criterion=criterion)
        metrics |= values_of(CRITERION, numbers, criterion.name)
        if criterion.is_measured:
            metrics |= values_of(MEASURED, numbers, criterion.name)
            if criterion.bounds.on_ratio:
                metrics |= values_of(RATIO, numbers, criterion.name)
                with_bounds_on_ratio.append(numbers)
    if len(with_bounds_on_ratio) == 1:
        metrics |= values_of(VERL_RATIO, with_bounds_on_ratio[0])
    return metrics


def _buckets(tables: Breakdowns) -> Iterator[tuple[Sequence[Metric], str, tuple[float, float, float]]]:
    """Yield (metrics, name of the bucket, its numbers) of each bucket that holds a valid token."""
    has_turns = any(row[0] for row in tables.by_turn[1:])
    for metrics, table, label in (
        (LENGTH, tables.by_length, lambda octave: f"{2**octave}_{2 ** (octave + 1) - 1}"),
        (REWARD, tables.by_reward, lambda index: REWARD_SIGNS[index]),
        (STALENESS, tables.by_staleness, str),
        # Turn 0 alone would repeat the whole batch.
        (TURN, tables.by_turn if has_turns else [], str),
    ):
        for index, row in enumerate(table):
            if row[0]:
                yield metrics, label(index), tuple(row)
