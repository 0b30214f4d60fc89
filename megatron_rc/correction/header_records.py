"""What a batch's header says when it is on the host: records, whose fields say how each number comes about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from megatron_rc.correction.histogram import Histogram


class Source(Enum):
    """How the fields of a record come about; those of one source stand together in the vector."""

    SEQUENCES = "a sum over whole sequences"
    FLAGS = "how many whole sequences are so"
    TOKENS = "a sum over single tokens"
    DATA = "a count of what cannot be right"
    SEQUENCE_MAXIMA = "the largest of whole sequences"
    TOKEN_MAXIMA = "the largest of single tokens"
    KEY = "the largest key of a bad token"


def _from(source: Source, sign: int = 1) -> Any:
    return field(metadata={"source": source, "sign": sign})


def _smallest(source: Source) -> Any:
    """The vector has the largest negative."""
    return _from(source, -1)


@dataclass(frozen=True)
class PolicySums:
    """How far the two policies are apart. Sums over sequences; what is of single tokens says so."""

    valid: float = _from(Source.SEQUENCES)
    log_ratio: float = _from(Source.SEQUENCES)
    excess: float = _from(Source.SEQUENCES)  # ρ - 1 of tokens
    train_log_ppl: float = _from(Source.SEQUENCES)
    rollout_log_ppl: float = _from(Source.SEQUENCES)
    log_ppl_diff: float = _from(Source.SEQUENCES)
    train_ppl: float = _from(Source.SEQUENCES)
    rollout_ppl: float = _from(Source.SEQUENCES)
    ppl_ratio: float = _from(Source.SEQUENCES)
    log_ppl_abs_diff: float = _from(Source.SEQUENCES)
    sequence_excess: float = _from(Source.SEQUENCES)  # (Π ρ) - 1
    sequence_excess_squared: float = _from(Source.SEQUENCES)
    accepted: float = _from(Source.SEQUENCES)  # tokens
    sequences: float = _from(Source.FLAGS)
    sequences_with_rejected: float = _from(Source.FLAGS)
    excess_squared: float = _from(Source.TOKENS)
    log_ppl_diff_max: float = _from(Source.SEQUENCE_MAXIMA)
    log_ppl_diff_min: float = _smallest(Source.SEQUENCE_MAXIMA)
    log_ratio_max: float = _from(Source.TOKEN_MAXIMA)
    log_ratio_min: float = _smallest(Source.TOKEN_MAXIMA)


@dataclass(frozen=True)
class WeightSums:
    """Weights of any level. ``per_sequence`` is the mean bounded weight of a sequence over its tokens."""

    weight: float = _from(Source.SEQUENCES)  # bounded, each token's
    normalize_weight: float = _from(Source.SEQUENCES)
    per_sequence_excess: float = _from(Source.SEQUENCES)
    per_sequence_excess_squared: float = _from(Source.SEQUENCES)
    per_sequence_high: float = _from(Source.FLAGS)
    per_sequence_low: float = _from(Source.FLAGS)
    per_sequence_max: float = _from(Source.SEQUENCE_MAXIMA)
    per_sequence_min: float = _smallest(Source.SEQUENCE_MAXIMA)


@dataclass(frozen=True)
class TokenWeights(WeightSums):
    """Sums of weights where each token has one of its own."""

    normalize_count: float = _from(Source.SEQUENCES)  # tokens
    weight_excess_squared: float = _from(Source.TOKENS)
    above: float = _from(Source.TOKENS)
    below: float = _from(Source.TOKENS)


@dataclass(frozen=True)
class SharedWeights(WeightSums):
    """Sums of weights that the tokens of a sequence share; each token counts once where nothing else is said."""

    normalize_count: float = _from(Source.FLAGS)  # sequences
    raw: float = _from(Source.SEQUENCES)
    raw_squared: float = _from(Source.SEQUENCES)
    raw_excess_squared: float = _from(Source.SEQUENCES)
    weight_squared: float = _from(Source.SEQUENCES)
    weight_excess_squared: float = _from(Source.SEQUENCES)
    tokens_above: float = _from(Source.SEQUENCES)
    tokens_below: float = _from(Source.SEQUENCES)
    above: float = _from(Source.FLAGS)  # sequences
    below: float = _from(Source.FLAGS)
    log_weight_max: float = _from(Source.SEQUENCE_MAXIMA)
    log_weight_min: float = _smallest(Source.SEQUENCE_MAXIMA)


@dataclass(frozen=True)
class MaskedWeights:
    """What the mode ``mask`` adds."""

    sequences: float = _from(Source.FLAGS)  # with a weight of 0


@dataclass(frozen=True)
class TokenExtremes:
    """Extremes of bounded token weights; needed with bounds by staleness, and with the mode ``mask``."""

    weight_max: float = _from(Source.TOKEN_MAXIMA)
    weight_min: float = _smallest(Source.TOKEN_MAXIMA)


@dataclass(frozen=True)
class SequenceExtremes:
    """Extremes of bounded sequence weights, needed in the same cases."""

    weight_max: float = _from(Source.SEQUENCE_MAXIMA)
    weight_min: float = _smallest(Source.SEQUENCE_MAXIMA)


@dataclass(frozen=True)
class CriterionSums:
    """What a criterion rejects by itself."""

    rejected: float = _from(Source.SEQUENCES)  # tokens
    sequences_rejected: float = _from(Source.FLAGS)


@dataclass(frozen=True)
class MeasuredCriterion(CriterionSums):
    """The statistic x of whole sequences too; ``total`` counts it once for each token."""

    total: float = _from(Source.SEQUENCES)
    statistic: float = _from(Source.SEQUENCES)
    statistic_squared: float = _from(Source.SEQUENCES)
    statistic_high: float = _from(Source.FLAGS)
    statistic_low: float = _from(Source.FLAGS)
    statistic_max: float = _from(Source.SEQUENCE_MAXIMA)
    statistic_min: float = _smallest(Source.SEQUENCE_MAXIMA)


@dataclass(frozen=True)
class SequenceTest(MeasuredCriterion):
    """A test of whole sequences."""

    clamped: float = _from(Source.SEQUENCES)
    clamped_squared: float = _from(Source.SEQUENCES)


@dataclass(frozen=True)
class TokenTest(MeasuredCriterion):
    """A test of single tokens, whose x is log ρ."""

    high: float = _from(Source.TOKENS)
    clamped: float = _from(Source.TOKENS)
    clamped_squared: float = _from(Source.TOKENS)


@dataclass(frozen=True)
class OwnTokenTest(TokenTest):
    """A test of single tokens, whose x is another number."""

    tested_max: float = _from(Source.TOKEN_MAXIMA)
    tested_min: float = _smallest(Source.TOKEN_MAXIMA)


@dataclass(frozen=True)
class VetoSums:
    """What a veto rejects."""

    catastrophic: float = _from(Source.SEQUENCES)  # tokens
    vetoed: float = _from(Source.FLAGS)


@dataclass(frozen=True)
class DataSums:
    """What cannot be right: sequences with a side input out of its range (tokens, where these have their own)."""

    sequence_ids: float = _from(Source.DATA)
    mini_batch_ids: float = _from(Source.DATA)
    group_ids: float = _from(Source.DATA)
    policy_versions: float = _from(Source.DATA)
    advantages: float = _from(Source.DATA)
    rewards: float = _from(Source.DATA)
    bad_tokens: float = _from(Source.DATA)  # with an unusable log-prob
    default_ids: float = _from(Source.DATA)  # ranks whose sequences have no ids
    zero_log_probs: float = _from(Source.DATA)  # sequences whose rollout log-probs sum to exactly 0
    first_bad_key: float = _smallest(Source.KEY)


@dataclass(frozen=True, kw_only=True)
class BatchHeader:
    """A batch's vector on the host; a record that the config has no use for is None.

    Attributes:
        policy: of the two policies.
        data: what cannot be right.
        weights: with weights.
        masked: with the mode ``mask``.
        extremes: of bounded weights, where they were measured.
        veto: with a veto.
        criteria: by the criterion's name.
        bins: histogram of log ρ.
        weight_bins: histograms of the log of each sequence's weight: one that counts every sequence once and, where the
            tokens of a sequence share its weight, one that counts every token; none without weights.
        by_length: [buckets][2], valid and rejected tokens.
        by_reward: likewise.
        by_staleness: [buckets][3], with the sum of log ρ.
        mini_batches: [mini-batches][4], tokens and sequences under m, then under m'.
        shift: [5][cells], how the two policies' tokens lie against each other; see
            :func:`megatron_rc.correction.checks.shift.shift_sums`.
    """

    policy: PolicySums
    data: DataSums
    weights: TokenWeights | SharedWeights | None = None
    masked: MaskedWeights | None = None
    extremes: TokenExtremes | SequenceExtremes | None = None
    veto: VetoSums | None = None
    criteria: Mapping[str, CriterionSums]
    bins: Histogram
    weight_bins: list[Histogram]
    by_length: list[list[float]]
    by_reward: list[list[float]]
    by_staleness: list[list[float]]
    mini_batches: list[list[float]]
    shift: list[list[float]]
