"""The measures of tokens, of sequences and of the whole batch, as records that merge over ranks and micro-batches.

Each field is added up over ranks, unless its default says that the largest or smallest counts. What is known of the
whole batch at the end is its header: denominators, metrics and errors are read from it.

``N`` is the type of a number: a tensor while the records are computed on the device, a float after their copy to the
host. Tables have no ``N``: they are tensors on the device and lists on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

from torch import Tensor

from megatron_rc.correction.denominators import Denominators, N
from megatron_rc.parallel.collectives import largest, smallest


@dataclass(frozen=True)
class SideCounts(Generic[N]):
    """How many lie above their bounds, and how many below."""

    above: N
    below: N


@dataclass(frozen=True)
class SampleSums(Generic[N]):
    """Sums of weights w from which their effective sample size (Σ w)² / (n Σ w²) follows.

    They are not computed from Σ (w - 1): for a tiny weight w - 1 is rounded to -1, and w is lost.
    """

    weight: N  # Σ w
    squared: N  # Σ w²


@dataclass(frozen=True)
class WeightMeasures:
    """Sums over the valid tokens of each sequence, [n] float64, of token-level weights w."""

    raw_excess: Tensor | None  # Σ (w - 1) of the unbounded weights; None if they are ρ
    outside: SideCounts[Tensor]  # tokens whose weight is outside of its bounds


@dataclass(frozen=True)
class SequenceMeasures:
    """Sums over the valid tokens of each whole sequence, [n] float64."""

    excess: Tensor  # Σ (ρ_t - 1)
    weights: WeightMeasures | None  # None unless weights are token-level
    accepted: dict[str, Tensor]  # for each criterion on tokens or turns, by name, the tokens that it accepts
    of_turns: dict[str, Tensor]  # for each criterion on turns, Σ over the tokens of their turn's statistic


@dataclass(frozen=True)
class TestedSums(Generic[N]):
    """The number x that a criterion tests, over valid tokens; a sequence's statistic counts once for each token."""

    high: N  # tests that fail above the upper bound; the others fail below the lower one
    clamped: N  # Σ x, each clamped to the bounds
    clamped_squared: N  # Σ x², each x clamped to the bounds
    max: N = largest()
    min: N = smallest()


@dataclass(frozen=True)
class SpreadSums(Generic[N]):
    """Ratios w over valid tokens; the extremes are those of log w, of bounded weights those of w itself."""

    excess_squared: N  # Σ (w - 1)²
    max: N = largest()
    min: N = smallest()


@dataclass(frozen=True)
class TokenWeightSums(Generic[N]):
    """Token-level weights over valid tokens, before and within their bounds."""

    raw: SpreadSums[N] | None  # unbounded weights, with the extremes of their logs; None if they are ρ
    raw_sample: SampleSums[N]  # unbounded weights; those of several tokens (prefix, turn) may reach exp(300) here
    bounded: SpreadSums[N]
    bounded_sample: SampleSums[N]


@dataclass(frozen=True)
class TokenSums(Generic[N]):
    """Sums and extremes over all valid tokens: of a block's sequences [n], later of the whole batch."""

    k3: N  # Σ k3
    ratio: SpreadSums[N]  # ρ, and log ρ
    weights: TokenWeightSums[N] | None  # None unless weights are token-level
    tests: dict[str, TestedSums[N]]  # by the name of each criterion on tokens or turns


@dataclass(frozen=True)
class PerplexitySums(Generic[N]):
    """The mean x over the valid tokens of each sequence."""

    log: N  # Σ x over sequences
    plain: N  # Σ exp(x) over sequences


@dataclass(frozen=True)
class PolicySums(Generic[N]):
    """How far the two policies are apart, over sequences with a valid token, in tokens or sequences."""

    valid: N  # valid tokens
    sequences: N  # sequences with a valid token
    log_ratio: N  # Σ log ρ over tokens
    excess: N  # Σ (ρ - 1) over tokens
    training: PerplexitySums[N]  # of -log π_train
    rollout: PerplexitySums[N]  # of -log π_rollout
    difference: PerplexitySums[N]  # of -log ρ
    abs_difference: N  # Σ over sequences of the absolute mean of log ρ
    sequence_excess: N  # Σ (Π ρ - 1), Π ρ limited to exp(±20)
    sequence_excess_squared: N  # Σ (Π ρ - 1)², likewise
    sequence_sample: SampleSums[N]  # Π ρ, limited to exp(±300)
    sequences_with_rejected: N  # sequences with a valid token that is rejected
    difference_max: N = largest()  # of the means over a sequence's tokens of -log ρ
    difference_min: N = smallest()


@dataclass(frozen=True)
class WeightMoments(Generic[N]):
    """Weights w; the extremes are those of log w for unbounded weights, of w itself for bounded ones."""

    total: N  # Σ w
    excess_squared: N  # Σ (w - 1)²
    sample: SampleSums[N]  # the same weights; unbounded ones of several tokens may reach exp(300) here
    max: N = largest()
    min: N = smallest()


@dataclass(frozen=True)
class MeanWeightSums(Generic[N]):
    """The mean bounded weight m of each sequence's tokens, over sequences."""

    total: N  # Σ m
    excess_squared: N  # Σ (m - 1)²
    squared: N  # Σ m²
    max: N = largest()
    min: N = smallest()


@dataclass(frozen=True)
class WeightSums(Generic[N]):
    """Weights of all valid tokens; a sequence's counts once for each token."""

    raw: WeightMoments[N]  # before their bounds, with the extremes of log w
    bounded: WeightMoments[N]  # within their bounds
    mean: MeanWeightSums[N]
    outside: SideCounts[N]  # tokens whose weight was outside of its bounds
    mean_outside: SideCounts[N]  # sequences whose mean raw weight is outside of the bounds
    sequences_outside: N  # sequences with a weight outside of its bounds
    # [1 or 2, bins] cumulative counts of log m, the log of the mean bounded weight of a sequence's tokens: row 0 counts
    # sequences, row 1 tokens (sequence-level weights only).
    histograms: Any


@dataclass(frozen=True)
class StatisticSums(Generic[N]):
    """A criterion's statistic over each sequence, and the number x that it tests."""

    tested: TestedSums[N]
    total: N  # Σ of the statistic over tokens
    statistic: N  # Σ of the statistic over sequences
    squared: N  # Σ of its square over sequences
    outside: SideCounts[N]  # sequences whose statistic is outside of the bounds
    max: N = largest()
    min: N = smallest()


@dataclass(frozen=True)
class CriterionSums(Generic[N]):
    """A criterion, or the veto, by itself."""

    rejected: N  # valid tokens that it rejects
    sequences_rejected: N  # sequences with such a token
    statistic: StatisticSums[N] | None  # None if it is not measured


@dataclass(frozen=True)
class DataSums(Generic[N]):
    """What is checked of the data and the configuration: sums, so that all ranks find the same errors."""

    out_of_range: Any  # [6] sequences or tokens whose value was out of range, in the order of inputs.PER_SEQUENCE
    bad_tokens: N  # tokens of the response mask without two usable log-probs
    ranks_without_ids: N  # ranks whose sequences have no ids
    zero_log_probs: N  # sequences whose rollout log-probs sum to exactly 0
    shift: Any  # [5, cells], how the two policies' tokens lie against each other
    config_max: N = largest()  # the largest fingerprint of a rank's configuration
    config_min: N = smallest()  # the smallest fingerprint
    first_bad_key: N = smallest()  # the smallest key of a bad token; +inf without one


@dataclass(frozen=True)
class Breakdowns:
    """Valid tokens, rejected tokens and (by staleness and by turn) Σ log ρ, in fixed buckets."""

    by_length: Any  # [octaves of length, 2]
    by_reward: Any  # [signs of the reward, 2]
    by_staleness: Any  # [max_staleness + 1, 3]
    by_turn: Any  # [8, 3], the last row for all later turns; zeros if turns were not given


@dataclass(frozen=True)
class BatchHeader(Generic[N]):
    """All numbers that are known of a whole batch."""

    denominators: Denominators[N]  # the loss is divided by them
    data: DataSums[N]
    policy: PolicySums[N]
    tokens: TokenSums[N]
    weights: WeightSums[N] | None  # None without weights
    veto: CriterionSums[N] | None  # None without a veto
    criteria: dict[str, CriterionSums[N]]  # by name
    breakdowns: Breakdowns  # valid and rejected tokens by length, reward, staleness and turn
    bins: Any  # [bins] cumulative counts of log ρ
