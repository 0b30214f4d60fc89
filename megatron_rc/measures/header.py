"""The numbers that are known of a whole batch, as records: sums and extremes that merge over ranks and micro-batches.

Records are written on the device, with N a tensor, and read on the host, with N a float. Tables are tensors on the
device and lists on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

from megatron_rc.correction.denominators import Denominators, N
from megatron_rc.parallel.collectives import largest, smallest


@dataclass(frozen=True)
class PolicySums(Generic[N]):
    """How far the two policies are apart. Sums over sequences with a valid token, except if a field says tokens.

    Attributes:
        valid: valid tokens.
        sequences: sequences with a valid token.
        log_ratio: Σ log ρ over tokens.
        excess: Σ (ρ - 1) over tokens.
        excess_squared: Σ (ρ - 1)² over tokens.
        k3: Σ k3 over tokens.
        train_log_ppl: Σ of the mean of -log π_train; ``rollout_log_ppl`` and ``log_ppl_diff`` alike.
        train_ppl: Σ exp of that mean; ``rollout_ppl`` and ``ppl_ratio`` alike.
        log_ppl_abs_diff: Σ |log_ppl_diff|.
        sequence_excess: Σ (Π ρ - 1).
        sequence_excess_squared: Σ (Π ρ - 1)².
        accepted: tokens under m'.
        sequences_with_rejected: sequences with a valid token that is rejected.
        log_ppl_diff_max: the largest of a sequence.
        log_ppl_diff_min: the smallest of a sequence.
        log_ratio_max: the largest log ρ of a token.
        log_ratio_min: the smallest log ρ of a token.
    """

    valid: N
    sequences: N
    log_ratio: N
    excess: N
    excess_squared: N
    k3: N
    train_log_ppl: N
    rollout_log_ppl: N
    log_ppl_diff: N
    train_ppl: N
    rollout_ppl: N
    ppl_ratio: N
    log_ppl_abs_diff: N
    sequence_excess: N
    sequence_excess_squared: N
    accepted: N
    sequences_with_rejected: N
    log_ppl_diff_max: N = largest()
    log_ppl_diff_min: N = smallest()
    log_ratio_max: N = largest()
    log_ratio_min: N = smallest()


@dataclass(frozen=True)
class MeanWeightSums(Generic[N]):
    """The mean weight m of the tokens of each sequence, over sequences.

    Attributes:
        excess: Σ (m - 1), of bounded weights.
        excess_squared: Σ (m - 1)², of bounded weights.
        high: sequences whose m before the bounds is above the upper bound.
        low: sequences whose m before the bounds is below the lower bound.
        max: the largest m, of bounded weights.
        min: the smallest m, of bounded weights.
    """

    excess: N
    excess_squared: N
    high: N
    low: N
    max: N = largest()
    min: N = smallest()


@dataclass(frozen=True)
class WeightSums(Generic[N]):
    """Weights of all valid tokens, before and after their bounds; a sequence's weight counts once for each token.

    Attributes:
        raw: Σ w before the bounds.
        raw_squared: Σ w² before the bounds; None for token-level weights: it follows from the others.
        raw_excess_squared: Σ (w - 1)² before the bounds.
        log_raw_max: the largest log w before the bounds.
        log_raw_min: the smallest log w before the bounds.
        bounded: Σ w.
        bounded_squared: Σ w²; None for token-level weights.
        bounded_excess_squared: Σ (w - 1)².
        bounded_max: the largest w.
        bounded_min: the smallest w.
        tokens_above: tokens whose weight was above its bounds.
        tokens_below: tokens whose weight was below its bounds.
        sequences_above: sequences whose shared weight was above its bounds.
        sequences_below: sequences whose shared weight was below its bounds.
        sequences_outside: sequences with a weight outside of its bounds.
        means: of the mean weight of each sequence.
        histograms: [1 or 2, bins] cumulative counts of the log of each sequence's mean weight: histogram 0 counts
            sequences, histogram 1 tokens (sequence-level weights only).
    """

    raw: N
    raw_squared: N | None
    raw_excess_squared: N
    bounded: N
    bounded_squared: N | None
    bounded_excess_squared: N
    tokens_above: N
    tokens_below: N
    sequences_above: N
    sequences_below: N
    sequences_outside: N
    means: MeanWeightSums[N]
    histograms: Any
    log_raw_max: N = largest()
    log_raw_min: N = smallest()
    bounded_max: N = largest()
    bounded_min: N = smallest()


@dataclass(frozen=True)
class StatisticSums(Generic[N]):
    """The number x that a criterion tests, and its statistic over each sequence.

    Attributes:
        high: tests that fail above the upper bound, in tokens.
        clamped: Σ x within its bounds, over tokens (a sequence's statistic counts once for each token).
        clamped_squared: Σ x² within its bounds.
        total: Σ of the sequence's statistic over tokens.
        statistic: Σ of the statistic over sequences.
        statistic_squared: Σ of its square.
        statistic_high: sequences whose statistic is above the upper bound.
        statistic_low: sequences whose statistic is below the lower bound.
        statistic_max: the largest of a sequence.
        statistic_min: the smallest of a sequence.
        tested_max: the largest x that is tested.
        tested_min: the smallest x that is tested.
    """

    high: N
    clamped: N
    clamped_squared: N
    total: N
    statistic: N
    statistic_squared: N
    statistic_high: N
    statistic_low: N
    statistic_max: N = largest()
    statistic_min: N = smallest()
    tested_max: N = largest()
    tested_min: N = smallest()


@dataclass(frozen=True)
class CriterionSums(Generic[N]):
    """A criterion by itself.

    Attributes:
        rejected: valid tokens that it rejects.
        sequences_rejected: sequences with such a token.
        statistic: of its statistic; None if it is not measured.
    """

    rejected: N
    sequences_rejected: N
    statistic: StatisticSums[N] | None


@dataclass(frozen=True)
class VetoSums(Generic[N]):
    """The veto.

    Attributes:
        catastrophic: valid tokens below its threshold.
        vetoed: sequences with such a token.
    """

    catastrophic: N
    vetoed: N


@dataclass(frozen=True)
class DataSums(Generic[N]):
    """Counts of impossible data.

    Attributes:
        sequence_ids: sequences whose id was out of range; the next five count the input of their name.
        bad_tokens: tokens of the response mask without two usable log-probs.
        default_ids: ranks whose sequences have no ids.
        zero_log_probs: sequences whose rollout log-probs sum to exactly 0.
        shift: [5, cells], how the two policies' tokens lie against each other.
        config_max: the largest fingerprint of a rank's configuration.
        config_min: the smallest fingerprint.
        first_bad_key: the smallest key of a bad token; +inf without one.
    """

    sequence_ids: N
    mini_batch_ids: N
    group_ids: N
    policy_versions: N
    advantages: N
    rewards: N
    bad_tokens: N
    default_ids: N
    zero_log_probs: N
    shift: Any
    config_max: N = largest()
    config_min: N = smallest()
    first_bad_key: N = smallest()


@dataclass(frozen=True)
class Breakdowns:
    """Valid tokens, rejected tokens and (by staleness) Σ log ρ, in fixed buckets.

    Attributes:
        by_length: [octaves of length, 2].
        by_reward: [signs of the reward, 2].
        by_staleness: [max_staleness + 1, 3].
    """

    by_length: Any
    by_reward: Any
    by_staleness: Any


@dataclass(frozen=True)
class BatchHeader(Generic[N]):
    """All numbers that are known of a whole batch.

    Attributes:
        denominators: the loss is divided by them.
        data: counts of impossible values.
        policy: of the two policies.
        weights: of importance weights; None without them.
        veto: of the veto; None without one.
        criteria: of each criterion, by name.
        breakdowns: rejected tokens by length, reward and staleness.
        bins: [bins] cumulative counts of log ρ.
    """

    denominators: Denominators[N]
    data: DataSums[N]
    policy: PolicySums[N]
    weights: WeightSums[N] | None
    veto: VetoSums[N] | None
    criteria: dict[str, CriterionSums[N]]
    breakdowns: Breakdowns
    bins: Any
