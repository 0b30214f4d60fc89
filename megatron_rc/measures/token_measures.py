"""Measures of a block of tokens: sums and extremes over each of its sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from torch import Tensor

from megatron_rc.correction.inputs import Shards
from megatron_rc.correction.sequences import BlockSequences, SequenceSums
from megatron_rc.correction.tokens import TokenDecisions, log_bounds
from megatron_rc.correction.verdicts import N
from megatron_rc.numerics import EXP_LIMIT
from megatron_rc.parallel.collectives import Pair, largest, pack, smallest
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.criterion import Criterion


@dataclass(frozen=True)
class SequenceMeasures:
    """Sums over the valid tokens of each whole sequence, [n] float64."""

    excess: Tensor  # Σ (ρ_t - 1)
    raw_excess: Tensor | None  # Σ (w_t - 1) of the unbounded weights; None unless they are other than ρ_t
    above: Tensor | None  # tokens whose weight is above its bounds; None unless weights are token-level
    below: Tensor | None  # tokens whose weight is below its bounds; None unless weights are token-level
    accepted: dict[str, Tensor]  # for each criterion on tokens or turns, by name, the tokens that it accepts
    of_turns: dict[str, Tensor]  # for each criterion on turns, Σ over the tokens of their turn's statistic


@dataclass(frozen=True)
class TestedSums(Generic[N]):
    """The number x that a criterion tests, over valid tokens; a sequence's statistic counts once for each token."""

    high: N  # tests that fail above the upper bound
    clamped: N  # Σ x within its bounds
    clamped_squared: N  # Σ x² within its bounds
    max: N = largest()
    min: N = smallest()


@dataclass(frozen=True)
class TokenWeightSums(Generic[N]):
    """Token-level weights w, bounded, over valid tokens."""

    excess_squared: N  # Σ (w - 1)²
    max: N = largest()
    min: N = smallest()


@dataclass(frozen=True)
class RawWeightSums(Generic[N]):
    """Token-level weights w before their bounds, over valid tokens."""

    excess_squared: N  # Σ (w - 1)²
    log_max: N = largest()
    log_min: N = smallest()


@dataclass(frozen=True)
class TokenSums(Generic[N]):
    """Sums and extremes over all valid tokens: of a block's sequences [n], later of the whole batch."""

    excess_squared: N  # Σ (ρ - 1)²
    k3: N  # Σ k3
    weights: TokenWeightSums[N] | None  # None unless weights are token-level
    raw_weights: RawWeightSums[N] | None  # None unless weights are token-level and other than ρ
    tests: dict[str, TestedSums[N]]  # by the name of each criterion on tokens or turns
    log_ratio_max: N = largest()
    log_ratio_min: N = smallest()


@dataclass(frozen=True)
class LocalSums:
    """All that this rank knows of its own tokens."""

    shards: Shards  # the input
    config: RolloutCorrectionConfig
    sums: SequenceSums  # over the local parts of whole sequences: decisions
    measures: SequenceMeasures  # over the local parts of whole sequences: measures
    tokens: TokenSums[Tensor]  # over all local tokens: measures
    bins: Tensor  # [bins] float64, histogram of log ρ over the local tokens
    valid: list[Tensor]  # for each micro-batch the valid tokens, bool
    kept: list[Tensor]  # for each micro-batch the tokens that all token-level criteria accept, bool
    weights: list[Tensor] | None  # for each micro-batch the bounded weights, 0 if invalid; None unless token-level

    @property
    def pair(self) -> Pair:
        """([sums · n], [maxima · n]), to be reduced over ``cp``."""
        return pack((self.sums, self.measures))


def measure_sequences(
    decisions: TokenDecisions, sequences: BlockSequences, config: RolloutCorrectionConfig
) -> SequenceMeasures:
    """The measures of whole sequences, from one block."""
    above = below = None
    if decisions.weights is not None:
        lower, upper = log_bounds(config)
        tested = decisions.log_weight if decisions.scale is None else decisions.log_weight / decisions.scale
        above = sequences.count(decisions.valid & (tested > upper))
        below = sequences.count(decisions.valid & (tested < lower))
    accepted = {name: sequences.count(accepted) for name, accepted in decisions.accepted.items()}
    excess = sequences.sum(decisions.ratio - 1)
    raw_excess = None if decisions.raw is decisions.ratio else sequences.sum(decisions.raw - 1)
    turns = [criterion.name for criterion in config.criteria if criterion.unit == "turn"]
    of_turns = {name: sequences.exact_sum(decisions.tested[name].double()) for name in turns}
    return SequenceMeasures(excess, raw_excess, above, below, accepted, of_turns)


def measure_tokens(
    decisions: TokenDecisions, sequences: BlockSequences, config: RolloutCorrectionConfig
) -> TokenSums[Tensor]:
    """The measures of all tokens, from one block."""
    absent, log_ratio = decisions.absent, decisions.log_ratio
    excess, weights, raw = decisions.ratio - 1, None, None  # to 6e-8 in float32; expm1 would cost six exponentials
    if decisions.weights is not None:
        extremes = sequences.largest(decisions.weights, absent), sequences.smallest(decisions.weights, absent)
        weights = TokenWeightSums(sequences.sum((decisions.weights - decisions.one).square()), *extremes)
    if decisions.raw is not decisions.ratio:
        logs = decisions.log_weight
        extremes = sequences.largest(logs, absent), sequences.smallest(logs, absent)
        raw = RawWeightSums(sequences.sum((decisions.raw - 1).square()), *extremes)
    tested = [criterion for criterion in config.criteria if criterion.of_tokens]
    return TokenSums(
        excess_squared=sequences.sum(excess.square()),
        # Both terms clamped, as in k3.
        k3=sequences.sum(excess - log_ratio.clamp(max=EXP_LIMIT)),
        weights=weights,
        raw_weights=raw,
        tests={criterion.name: _measure_test(criterion, decisions, sequences) for criterion in tested},
        log_ratio_max=sequences.largest(log_ratio, absent),
        log_ratio_min=sequences.smallest(log_ratio, absent),
    )


def _measure_test(criterion: Criterion, decisions: TokenDecisions, sequences: BlockSequences) -> TestedSums[Tensor]:
    values = decisions.tested[criterion.name]
    tested = values if decisions.scale is None else values / decisions.scale
    factor = decisions.one if decisions.scale is None else decisions.one * decisions.scale
    clamped = tested.clamp(criterion.least, criterion.upper) * factor
    return TestedSums(
        high=sequences.count(decisions.valid & (tested > criterion.upper)),
        clamped=sequences.sum(clamped),
        clamped_squared=sequences.sum(clamped.square()),
        max=sequences.largest(values, decisions.absent),
        min=sequences.smallest(values, decisions.absent),
    )
