"""The numbers that are known of a whole batch, as records: sums and extremes that merge over ranks and micro-batches.

Records are written on the device, with N a tensor, and read on the host, with N a float. Tables are tensors on the
device and lists on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

from megatron_rc.correction.verdicts import Denominators, N
from megatron_rc.measures.token_measures import TestedSums, TokenSums
from megatron_rc.parallel.collectives import largest, smallest


@dataclass(frozen=True)
class PolicySums(Generic[N]):
    """How far the two policies are apart, over sequences with a valid token, in tokens or sequences."""

    valid: N  # valid tokens
    sequences: N  # sequences with a valid token
    log_ratio: N  # Σ log ρ over tokens
    excess: N  # Σ (ρ - 1) over tokens
    training_log_ppl: N  # Σ over sequences of the mean of -log π_train
    rollout_log_ppl: N  # Σ over sequences of the mean of -log π_rollout
    log_ppl_diff: N  # Σ over sequences of their difference
    training_ppl: N  # Σ over sequences of exp of the mean of -log π_train
    rollout_ppl: N  # Σ over sequences of exp of the mean of -log π_rollout
    ppl_ratio: N  # Σ over sequences of exp of the difference
    log_ppl_abs_diff: N  # Σ over sequences of the absolute difference
    sequence_excess: N  # Σ (Π ρ - 1)
    sequence_excess_squared: N  # Σ (Π ρ - 1)²
    sequences_with_rejected: N  # sequences with a valid token that is rejected
    log_ppl_diff_max: N = largest()
    log_ppl_diff_min: N = smallest()


@dataclass(frozen=True)
class WeightSums(Generic[N]):
    """Weights w of all valid tokens, raw (before their bounds) and bounded; a sequence's counts once for each token.

    m is the mean bounded weight of the tokens of a sequence.
    """

    raw: N  # Σ raw w
    raw_squared: N | None  # Σ (raw w)²; None for token-level weights: it follows from the others
    raw_excess_squared: N  # Σ (raw w - 1)²
    bounded: N  # Σ w
    bounded_squared: N | None  # Σ w²; None for token-level weights
    bounded_excess_squared: N  # Σ (w - 1)²
    above: N  # tokens whose weight was above its bounds
    below: N  # tokens whose weight was below its bounds
    outside: N  # sequences with a weight outside of its bounds
    mean_excess: N  # Σ (m - 1) over sequences
    mean_excess_squared: N  # Σ (m - 1)² over sequences
    mean_above: N  # sequences whose mean raw weight is above the bounds
    mean_below: N  # sequences whose mean raw weight is below the bounds
    # [1 or 2, bins] cumulative counts of log m: row 0 counts sequences, row 1 tokens (sequence-level weights only).
    histograms: Any
    log_raw_max: N = largest()
    log_raw_min: N = smallest()
    bounded_max: N = largest()
    bounded_min: N = smallest()
    mean_max: N = largest()
    mean_min: N = smallest()


@dataclass(frozen=True)
class StatisticSums(Generic[N]):
    """A criterion's statistic over each sequence, and the number x that it tests."""

    tested: TestedSums[N]
    total: N  # Σ of the statistic over tokens
    statistic: N  # Σ of the statistic over sequences
    squared: N  # Σ of its square over sequences
    high: N  # sequences whose statistic is above the upper bound
    low: N  # sequences whose statistic is below the lower bound
    max: N = largest()
    min: N = smallest()


@dataclass(frozen=True)
class CriterionSums(Generic[N]):
    """A criterion by itself."""

    rejected: N  # valid tokens that it rejects
    sequences_rejected: N  # sequences with such a token
    statistic: StatisticSums[N] | None  # None if it is not measured


@dataclass(frozen=True)
class VetoSums(Generic[N]):
    """The veto."""

    catastrophic: N  # valid tokens below its threshold
    vetoed: N  # sequences with such a token


@dataclass(frozen=True)
class DataSums(Generic[N]):
    """Counts of impossible data."""

    out_of_range: Any  # [6, by PER_SEQUENCE] sequences or tokens whose value was out of range
    bad_tokens: N  # tokens of the response mask without two usable log-probs
    default_ids: N  # ranks whose sequences have no ids
    zero_log_probs: N  # sequences whose rollout log-probs sum to exactly 0
    shift: Any  # [5, cells], how the two policies' tokens lie against each other
    config_max: N = largest()  # the largest fingerprint of a rank's configuration
    config_min: N = smallest()  # the smallest fingerprint
    first_bad_key: N = smallest()  # the smallest key of a bad token; +inf without one


@dataclass(frozen=True)
class Breakdowns:
    """Valid tokens, rejected tokens and (by staleness) Σ log ρ, in fixed buckets."""

    by_length: Any  # [octaves of length, 2]
    by_reward: Any  # [signs of the reward, 2]
    by_staleness: Any  # [max_staleness + 1, 3]


@dataclass(frozen=True)
class BatchHeader(Generic[N]):
    """All numbers that are known of a whole batch."""

    denominators: Denominators[N]  # the loss is divided by them
    data: DataSums[N]
    policy: PolicySums[N]
    tokens: TokenSums[N]
    weights: WeightSums[N] | None  # None without weights
    veto: VetoSums[N] | None  # None without a veto
    criteria: dict[str, CriterionSums[N]]  # by name
    breakdowns: Breakdowns  # rejected tokens by length, reward and staleness
    bins: Any  # [bins] cumulative counts of log ρ
