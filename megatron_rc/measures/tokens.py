"""The measures of tokens alone: what metrics need of each token, and the record of its sums and extremes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor

from megatron_rc.correction.denominators import N
from megatron_rc.correction.sequences import MeasuredTokens, TokenSums
from megatron_rc.correction.tokens import TokenDecisions
from megatron_rc.numerics import EXP_LIMIT, exp_sample
from megatron_rc.parallel.collectives import largest, smallest
from megatron_rc.settings.config import RolloutCorrectionConfig


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
    totals: dict[str, N]  # sums over valid tokens, by the names of :func:`token_totals`
    bins: Any  # [bins] histogram of log ρ, which has the tokens that are not valid in the bin of 0
    distances: Any  # [4] the test for shifted log-probs: :func:`megatron_rc.measures.shift.distances`
    first_bad_keys: Any = smallest()  # [2] the keys of the first unusable token: :mod:`megatron_rc.measures.data`


def measure_tokens(
    sums: TokenSums, *, bins: Tensor, distances: Tensor, first_bad_keys: Tensor
) -> TokenMeasures[Tensor]:
    """Return the measures of all local tokens, from their sums; the other arguments are fields of the result."""
    totals = dict(zip(sums.names, sums.sums.sum(1), strict=True))
    extremes = dict(zip(sums.extreme_names, zip(sums.largest, sums.smallest, strict=True), strict=True))
    moments = {}
    for name, squared in zip(sums.names[-len(sums.squares) :], sums.squares, strict=True):
        moments[name] = Moments(totals["valid"], totals[name], squared, *extremes.get(name, (None, None)))
    return TokenMeasures(
        moments=moments,
        totals={name: totals[name] for name in sums.total_names},
        bins=bins,
        distances=distances,
        first_bad_keys=first_bad_keys,
    )


def measured_tokens(decisions: TokenDecisions, config: RolloutCorrectionConfig) -> MeasuredTokens:
    """Return the numbers of each token of a block that only metrics need."""
    quantities = token_quantities(decisions, config)
    columns = measured_columns(decisions, config)
    if decisions.weights is not None:
        # Also of whole sequences: their mean weight is held against the bounds.
        raw_excess = raw_excess_name(config)
        columns[raw_excess] = quantities[raw_excess]
    return MeasuredTokens(
        columns=columns,
        totals=token_totals(decisions, config, quantities["ratio_excess"]),
        quantities=quantities,
        extremes=token_extremes(decisions),
    )


def raw_excess_name(config: RolloutCorrectionConfig) -> str:
    """Return the name of the quantity w - 1 of unbounded token-level weights w: that of ρ - 1 if w is ρ."""
    return "ratio_excess" if config.weighs_single_tokens else "raw_weight_excess"


def measured_columns(decisions: TokenDecisions, config: RolloutCorrectionConfig) -> dict[str, Tensor]:
    """Return the values of each token whose sums over whole sequences only metrics use, by name; 0 if invalid.

    (Decisions use the sums of :func:`~megatron_rc.correction.tokens.token_columns`.)

    - ``above``, ``below``: True if the unbounded weight is outside of its bounds (only with token-level weights);
    - ``accepted_<criterion>``: True if the criterion accepts the token;
    - ``turn_<criterion>``: the criterion's statistic of the token's turn.
    """
    columns: dict[str, Tensor] = {}
    weights = decisions.weights
    if weights is not None:
        lower, upper = config.is_log_bounds
        # A staleness scale multiplies the bounds of each token; here it divides the weight instead.
        scaled = weights.log if decisions.bound_scale is None else weights.log / decisions.bound_scale
        above = scaled > upper
        below = scaled < lower
        if not lower <= 0 <= upper:
            # An invalid token has the log weight 0, which is outside of these bounds, but it must not be counted.
            above = decisions.valid & above
            below = decisions.valid & below
        columns |= {"above": above, "below": below}
    for name, test in decisions.tests.items():
        columns[f"accepted_{name}"] = test.accepted
    for criterion in config.criteria:
        if criterion.unit == "turn":
            columns[f"turn_{criterion.name}"] = decisions.tests[criterion.name].tested
    return columns


def token_totals(decisions: TokenDecisions, config: RolloutCorrectionConfig, ratio_excess: Tensor) -> dict[str, Tensor]:
    """Return the numbers of each token that are only added up over all tokens, by name; 0 where they do not count.

    ``bad``: in the response mask, without two usable log-probs; ``k3``; ``<criterion>_above``: above the criterion's
    bound. ``ratio_excess`` is ρ - 1 of each token.
    """
    totals = {
        "bad": decisions.bad,
        # Both terms clamped, as in numerics.k3, and log ρ - 1 to 6e-8 in float32, as measured for the ratios' spread.
        "k3": ratio_excess - decisions.log_ratio.clamp(max=EXP_LIMIT),
    }
    for criterion in config.criteria:
        if criterion.of_tokens:
            tested = decisions.tests[criterion.name].tested
            scaled = tested if decisions.bound_scale is None else tested / decisions.bound_scale
            totals[f"{criterion.name}_above"] = decisions.valid & (scaled > criterion.upper)
    return totals


def token_quantities(decisions: TokenDecisions, config: RolloutCorrectionConfig) -> dict[str, Tensor]:
    """Return the quantities of each token whose sum and sum of squares are measured, by name; 0 if invalid.

    - ``ratio_excess``: ρ - 1;
    - with token-level weights: ``weight``, bounded, and ``raw_weight``, unbounded; ``sampled_weight``: the latter, but
      up to exp(300) for weights of several tokens; each ``…_excess``: less 1. A small variance is computed from the
      excess, because it must not be the difference of two large numbers; an effective sample size from the weights,
      because a tiny weight less 1 is rounded to -1;
    - of each criterion on tokens or turns, by its name: the number that it tests, clamped to the bounds.
    """
    quantities = {"ratio_excess": decisions.ratio - 1}
    weights = decisions.weights
    valid = decisions.valid
    zero = decisions.zero
    if weights is not None:
        quantities["weight"] = weights.bounded
        quantities["weight_excess"] = torch.where(valid, weights.bounded - 1, zero)
        quantities["raw_weight"] = weights.raw
        if not config.weighs_single_tokens:
            quantities["raw_weight_excess"] = torch.where(valid, weights.raw - 1, zero)
            quantities["sampled_weight"] = torch.where(valid, exp_sample(weights.log), zero)
    for criterion in config.criteria:
        if criterion.of_tokens:
            tested = decisions.tests[criterion.name].tested
            if decisions.bound_scale is None:
                clamped = tested.clamp(criterion.least, criterion.upper)
            else:
                scaled = tested / decisions.bound_scale
                clamped = scaled.clamp(criterion.least, criterion.upper) * decisions.bound_scale
            if not criterion.least <= 0 <= criterion.upper:
                # The bounds have moved the zeros of invalid tokens.
                clamped = torch.where(valid, clamped, zero)
            quantities[criterion.name] = clamped
    return quantities


def token_extremes(decisions: TokenDecisions) -> dict[str, Tensor]:
    """Return the quantities of each token whose extremes are measured, by name: weights, and what is tested."""
    values = {name: test.tested for name, test in decisions.tests.items()}
    if decisions.weights is not None:
        values |= {"weight": decisions.weights.bounded, "raw_weight": decisions.weights.raw}
    return values
