"""The numbers of one block of tokens, from the decisions on them: sums of each sequence, moments over all tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rc.correction.reductions import BlockReductions
from megatron_rc.correction.sequences import SequenceSums
from megatron_rc.correction.tokens import TokenDecisions, Tokens, token_columns
from megatron_rc.measures.header import Moments
from megatron_rc.numerics import EXP_LIMIT, exp_sample
from megatron_rc.settings.config import RolloutCorrectionConfig


@dataclass(frozen=True)
class BlockSums:
    """The numbers of one block, as a few tensors with a number for each name: a device has little to do for each."""

    # Of the rows of ``sums``: first bools, which are counted, then numbers; the last are the quantities.
    names: tuple[str, ...]
    total_names: tuple[str, ...]  # those of the names whose sum is needed over all tokens only
    sums: Tensor  # [names, n] float64, over the tokens of each sequence
    squares: Tensor  # [quantities] float64, Σ x² over all tokens
    extreme_names: tuple[str, ...]
    largest: Tensor  # [extreme_names] over all valid tokens
    smallest: Tensor
    maxima: dict[str, Tensor]  # [n] float64, the largest x of each sequence, by the need's name
    minima: dict[str, Tensor]  # [n] float64, the smallest x of each sequence


def sum_block(
    tokens: Tokens, decisions: TokenDecisions, reductions: BlockReductions, config: RolloutCorrectionConfig
) -> BlockSums:
    """Return the numbers of one block of tokens: sums and extremes over each sequence, and over all its tokens.

    Every addition is made in float64.

    Args:
        tokens: the tokens of the block.
        decisions: the decisions on them.
        reductions: how to reduce a block of this shape, over sequences and over all tokens.
        config: the correction; it says which sums are needed.
    """
    # Each dictionary has, by name, a tensor with one value for each token.
    columns = token_columns(tokens, decisions, config) | measured_columns(decisions, config)
    quantities = token_quantities(decisions, config)
    totals = token_totals(decisions, config, quantities["ratio_excess"])
    extremes = token_extremes(decisions)

    # Bools are counted, numbers are added up. The quantities stand last, because their squares are added up too; one
    # that is also a column, such as "weight", is added up once.
    flags: dict[str, Tensor] = {}
    numbers: dict[str, Tensor] = {}
    for name, values in (columns | totals).items():
        if values.dtype == torch.bool:
            flags[name] = values
        elif name not in quantities:
            numbers[name] = values
    numbers |= quantities

    invalid = ~decisions.valid
    largest, smallest = reductions.extremes([*extremes.values()], invalid)
    sums, squares = reductions.sums([*numbers.values()], len(quantities))
    counts = reductions.counts([*flags.values()])
    return BlockSums(
        names=(*flags, *numbers),
        total_names=tuple(totals),
        sums=torch.cat([counts, sums]),
        squares=squares,
        extreme_names=tuple(extremes),
        largest=largest,
        smallest=smallest,
        maxima=_need_extremes("max", decisions, reductions.largest, config),
        minima=_need_extremes("min", decisions, reductions.smallest, config),
    )


def join_blocks(
    blocks: Sequence[BlockSums], config: RolloutCorrectionConfig
) -> tuple[SequenceSums, dict[str, Tensor], dict[str, Moments[Tensor]]]:
    """Return the numbers of all local tokens by name, from those of their blocks.

    Returns:
        The sums and extremes over the tokens of each sequence; totals, and moments of the quantities, over all
        tokens.
    """
    first = blocks[0]
    sums = first.sums
    squares = first.squares
    largest = first.largest
    smallest = first.smallest
    maxima = first.maxima
    minima = first.minima
    if len(blocks) > 1:
        sums = torch.cat([block.sums for block in blocks], dim=1)
        squares = torch.stack([block.squares for block in blocks]).sum(0)
        largest = torch.stack([block.largest for block in blocks]).amax(0)
        smallest = torch.stack([block.smallest for block in blocks]).amin(0)
        maxima = {name: torch.cat([block.maxima[name] for block in blocks]) for name in maxima}
        minima = {name: torch.cat([block.minima[name] for block in blocks]) for name in minima}

    totals = dict(zip(first.names, sums.sum(1), strict=True))
    extremes = dict(zip(first.extreme_names, zip(largest, smallest, strict=True), strict=True))
    moments = {}
    for name, squared in zip(first.names[-len(squares) :], squares, strict=True):
        moments[name] = Moments(totals["valid"], totals[name], squared, *extremes.get(name, (None, None)))

    # Of the quantities, only the weights are also needed of whole sequences.
    only_of_tokens = {*first.total_names, *moments} - {"weight", raw_excess_name(config)}
    sum_of = {name: values for name, values in zip(first.names, sums, strict=True) if name not in only_of_tokens}
    return SequenceSums(sum_of, maxima, minima), {name: totals[name] for name in first.total_names}, moments


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


def _need_extremes(
    how: str,
    decisions: TokenDecisions,
    reduce: Callable[[Sequence[Tensor], Tensor], Tensor],
    config: RolloutCorrectionConfig,
) -> dict[str, Tensor]:
    """Return the largest ("max") or smallest ("min") x of each sequence that criteria need, [n] float64, by name."""
    needs = [need for need in config.needs if need.how == how]
    if not needs:
        return {}
    values = reduce([decisions.divergences[need.divergence.name].double() for need in needs], ~decisions.valid)
    return {need.name: value for need, value in zip(needs, values, strict=True)}
