"""The numbers that are known of a whole batch, as records that merge over ranks, micro-batches and steps.

Each field is added up, unless its default says that the largest or the smallest value counts. Denominators, metrics and
errors are all read from these records.

``N`` is the type of a number: a 0-D tensor while the records are computed on the device, a float after their copy to
the host. Tables have no ``N``: they are tensors on the device and lists on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

from megatron_rc.correction.denominators import Denominators, N
from megatron_rc.parallel.collectives import largest, smallest


@dataclass(frozen=True)
class Moments(Generic[N]):
    """Sums and extremes of a quantity x over tokens or over sequences; of nothing: 0, -inf and +inf."""

    count: N  # the number of values
    total: N  # Σ x
    squared: N  # Σ x²
    largest: N | None = largest()  # None, as the smallest: no metric has it
    smallest: N | None = smallest()


@dataclass(frozen=True)
class TokenMeasures(Generic[N]):
    """The measures of tokens alone, for which no sequence must be whole: of a block, or of all tokens of a rank."""

    # Over valid tokens, by the name of the quantity. A batch's has those that the tokens of a sequence share, too.
    moments: dict[str, Moments[N]]
    totals: dict[str, N]  # sums over valid tokens, by the names of measures.tokens.token_totals
    bins: Any  # [bins] histogram of log ρ, which has the tokens that are not valid in the bin of 0
    distances: Any  # [4] the test for shifted log-probs: :func:`megatron_rc.measures.shift.distances`
    first_bad_keys: Any = smallest()  # [2] the keys of the first unusable token: :mod:`megatron_rc.measures.data`


@dataclass(frozen=True)
class DataSums(Generic[N]):
    """Counts of impossible data, and of differences between ranks, from which every rank finds the same errors."""

    out_of_range: Any  # [6] sequences or tokens whose value was out of range, in the order of inputs.PER_SEQUENCE
    bad_tokens: N  # tokens of the response mask without two usable log-probs
    zero_log_probs: N  # sequences whose rollout log-probs sum to exactly 0
    config_max: N = largest()  # the largest fingerprint of a rank's configuration
    config_min: N = smallest()  # the smallest fingerprint
    has_default_ids: N = largest()  # 1 if the sequences of any rank have no ids, else 0


@dataclass(frozen=True)
class Breakdowns:
    """Valid tokens, rejected tokens and Σ log ρ, [buckets, 3] each."""

    by_length: Any  # by the octave of the sequence's number of valid tokens
    by_reward: Any  # by the sign of the reward; zeros if rewards were not given
    by_staleness: Any  # from 0 to max_staleness; zeros if versions were not given
    by_turn: Any  # 8 buckets, the last one for all later turns; zeros if turns were not given


@dataclass(frozen=True)
class BatchHeader(Generic[N]):
    """All numbers that are known of a whole batch."""

    denominators: Denominators[N]  # the loss is divided by them
    data: DataSums[N]
    tokens: TokenMeasures[N]
    totals: dict[str, N]  # sums over sequences, by the names of measures.measure
    sequence_moments: dict[str, Moments[N]]  # over sequences with a valid token, by the name of the quantity
    # [1 or 2, bins] histograms of log q, q: the mean bounded weight of a sequence's tokens. Row 0 counts sequences,
    # row 1 their tokens (only if these share one weight). None without weights.
    weight_bins: Any
    breakdowns: Breakdowns
