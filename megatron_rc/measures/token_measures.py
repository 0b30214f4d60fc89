"""Measures of a block of tokens: sums for each sequence, sums over the batch, and the histogram of log ρ."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_rc.correction.tokens import Runs, TokenDecisions, Tokens
from megatron_rc.correction.weights import log_bounds
from megatron_rc.measures.histogram import codes_of
from megatron_rc.numerics import EXP_LIMIT
from megatron_rc.parallel.collectives import largest, smallest
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.criterion import Criterion


@dataclass(frozen=True)
class SequenceMeasures:
    """Sums over the valid tokens of each sequence, [n] float64.

    Attributes:
        excess: Σ (ρ_t - 1).
        above: tokens whose ρ is above the bounds of the weights; None unless weights are token-level.
        below: tokens whose ρ is below them.
        accepted: for each token-level criterion, by name, the tokens that it accepts.
    """

    excess: Tensor
    above: Tensor | None
    below: Tensor | None
    accepted: dict[str, Tensor]


@dataclass(frozen=True)
class TokenTestTotals:
    """A token-level criterion: fields as in :class:`~megatron_rc.measures.header.StatisticSums`."""

    high: Tensor
    clamped: Tensor
    clamped_squared: Tensor
    tested_max: Tensor = largest()
    tested_min: Tensor = smallest()


@dataclass(frozen=True)
class TokenTotals:
    """Sums and extremes over all valid tokens, 0-D float64.

    Attributes:
        excess_squared: Σ (ρ - 1)².
        k3: Σ k3.
        bounded_excess_squared: Σ (w - 1)²; None, like the extremes of w, unless weights are token-level.
        tests: by the name of each token-level criterion.
        log_ratio_max: the largest log ρ.
        log_ratio_min: the smallest log ρ.
        bounded_max: the largest w.
        bounded_min: the smallest w.
    """

    excess_squared: Tensor
    k3: Tensor
    bounded_excess_squared: Tensor | None
    tests: dict[str, TokenTestTotals]
    log_ratio_max: Tensor = largest()
    log_ratio_min: Tensor = smallest()
    bounded_max: Tensor | None = largest()
    bounded_min: Tensor | None = smallest()


@dataclass(frozen=True)
class TokenMeasures:
    """All measures of a block, for each of its runs.

    Attributes:
        sequences: of which the runs of a sequence add up.
        totals: of which all runs add up.
        codes: int32, of the tokens' shape: the histogram's code of each log ρ; invalid tokens have the code of 0.
    """

    sequences: SequenceMeasures
    totals: TokenTotals
    codes: Tensor


def measure_tokens(
    tokens: Tokens, decisions: TokenDecisions, runs: Runs, config: RolloutCorrectionConfig
) -> TokenMeasures:
    """Measure a block of tokens that are decided."""
    valid, absent, log_ratio, weights = decisions.valid, decisions.absent, decisions.log_ratio, decisions.weights
    excess = decisions.ratio - 1  # to 6e-8 in float32; expm1 would cost six exponentials
    above = below = bounded_excess = bounded_max = bounded_min = None
    scale = decisions.scale
    if weights is not None:
        tested = log_ratio if scale is None else log_ratio / scale
        lower, upper = log_bounds(config)
        above, below = runs.count(valid & (tested > upper)), runs.count(valid & (tested < lower))
        bounded_excess = runs.sum((weights - decisions.one).square())
        bounded_max, bounded_min = runs.largest(weights, absent), runs.smallest(weights, absent)
    sequences = SequenceMeasures(
        excess=runs.sum(excess),
        above=above,
        below=below,
        accepted={name: runs.count(accepted) for name, accepted in decisions.accepted.items()},
    )
    totals = TokenTotals(
        excess_squared=runs.sum(excess.square()),
        # Both terms clamped, as in k3.
        k3=runs.sum(excess - log_ratio.clamp(max=EXP_LIMIT)),
        bounded_excess_squared=bounded_excess,
        tests={
            criterion.name: _measure_test(criterion, decisions, runs)
            for criterion in config.criteria
            if criterion.tested is not None
        },
        log_ratio_max=runs.largest(log_ratio, absent),
        log_ratio_min=runs.smallest(log_ratio, absent),
        bounded_max=bounded_max,
        bounded_min=bounded_min,
    )
    return TokenMeasures(sequences, totals, codes_of(log_ratio))


def _measure_test(criterion: Criterion, decisions: TokenDecisions, runs: Runs) -> TokenTestTotals:
    """The number x that a token-level criterion tests."""
    valid, scale = decisions.valid, decisions.scale
    values = decisions.values[criterion.tested.name].to(decisions.log_ratio.dtype)  # type: ignore[union-attr]
    tested = values if scale is None else values / scale
    factor = decisions.one if scale is None else decisions.one * scale
    clamped = tested.clamp(criterion.least, criterion.upper) * factor
    return TokenTestTotals(
        high=runs.count(valid & (tested > criterion.upper)),
        clamped=runs.sum(clamped),
        clamped_squared=runs.sum(clamped.square()),
        tested_max=runs.largest(values, decisions.absent),
        tested_min=runs.smallest(values, decisions.absent),
    )
