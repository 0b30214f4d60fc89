"""The numbers of one block of tokens, from the decisions on them: sums of each sequence, moments over all tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rc.correction.sequences import BlockSequences, SequenceSums
from megatron_rc.correction.tokens import TokenDecisions, Tokens, token_columns
from megatron_rc.measures.header import Moments
from megatron_rc.numerics import EXP_LIMIT, exp_sample
from megatron_rc.settings.config import RolloutCorrectionConfig


def sum_tokens(
    tokens: Tokens, decisions: TokenDecisions, sequences: BlockSequences, config: RolloutCorrectionConfig
) -> tuple[SequenceSums, dict[str, Tensor], dict[str, Moments[Tensor]]]:
    """Reduce one block of tokens; every addition is made in float64.

    Returns:
        The sums and extremes over the tokens of each sequence; counts, and moments of quantities, over all tokens of
        the block.
    """
    columns = token_columns(tokens, decisions, config) | measured_columns(decisions, config)
    flags = token_flags(tokens, decisions, config)
    quantities = token_quantities(decisions, config)
    only_summed = {name: row for name, row in (columns | flags).items() if name not in quantities}

    # One table of all rows, [rows, n, length] or [rows, t], is reduced at once: each operation costs a GPU's host time.
    table = torch.stack([*only_summed.values(), *quantities.values()]).double()
    sums = sequences.sum(table)
    names = [*only_summed, *quantities]
    sum_of = dict(zip(names, sums, strict=True))
    total_of = dict(zip(names, sums.sum(1), strict=True))
    squares = table[len(only_summed) :].square().flatten(1).sum(1)

    extremes = _token_extremes(decisions)
    moments = {}
    for name, squared in zip(quantities, squares, strict=True):
        largest, smallest = extremes.get(name, (None, None))
        moments[name] = Moments(total_of["valid"], total_of[name], squared, largest, smallest)
    counts = {name: total_of[name] for name in flags}

    over_sequences = [*columns]
    if decisions.weights is not None:
        over_sequences.append(raw_excess_name(config))
    maxima, minima = _need_extremes(decisions, sequences, config)
    return SequenceSums({name: sum_of[name] for name in over_sequences}, maxima, minima), counts, moments


def raw_excess_name(config: RolloutCorrectionConfig) -> str:
    """Return the name of the quantity w - 1 of unbounded token-level weights w: that of ρ - 1 if w is ρ."""
    return "ratio_excess" if config.weighs_single_tokens else "raw_weight_excess"


def measured_columns(decisions: TokenDecisions, config: RolloutCorrectionConfig) -> dict[str, Tensor]:
    """Return the numbers of each token whose sums over whole sequences are only measured, by name; 0 if invalid.

    - ``above``, ``below``: the weight is outside of its bounds (only with token-level weights);
    - ``accepted_<criterion>``: it accepts the token; ``turn_<criterion>``: the statistic of the token's turn.
    """
    columns = {}
    weights = decisions.weights
    if weights is not None:
        lower, upper = config.is_log_bounds
        scaled = weights.log if decisions.bound_scale is None else weights.log / decisions.bound_scale
        columns["above"] = decisions.valid & (scaled > upper)
        columns["below"] = decisions.valid & (scaled < lower)
    for name, test in decisions.tests.items():
        columns[f"accepted_{name}"] = test.accepted
    for criterion in config.criteria:
        if criterion.unit == "turn":
            columns[f"turn_{criterion.name}"] = decisions.tests[criterion.name].tested
    return columns


def extremes_of(rows: Tensor, left_out: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest and the smallest value of each row, [k] each; -inf and +inf of no values.

    Args:
        rows: [k, n].
        left_out: [n] bool, the columns that do not count.
    """
    if not left_out.numel():
        return rows.new_full((len(rows),), -torch.inf), rows.new_full((len(rows),), torch.inf)
    return rows.masked_fill(left_out, -torch.inf).amax(1), rows.masked_fill(left_out, torch.inf).amin(1)


def token_flags(tokens: Tokens, decisions: TokenDecisions, config: RolloutCorrectionConfig) -> dict[str, Tensor]:
    """Return flags of the tokens that are counted over the batch, by name.

    ``bad``: in the response mask, without two usable log-probs; ``<criterion>_above``: above the criterion's bound.
    """
    flags = {"bad": tokens.mask & decisions.invalid}
    for criterion in config.criteria:
        if criterion.of_tokens:
            tested = decisions.tests[criterion.name].tested
            scaled = tested if decisions.bound_scale is None else tested / decisions.bound_scale
            flags[f"{criterion.name}_above"] = decisions.valid & (scaled > criterion.upper)
    return flags


def token_quantities(decisions: TokenDecisions, config: RolloutCorrectionConfig) -> dict[str, Tensor]:
    """Return the quantities of each token whose sum and sum of squares are measured, by name; 0 if invalid.

    - ``ratio_excess``: ρ - 1; ``k3``;
    - with token-level weights: ``weight``, bounded, and ``raw_weight``, unbounded; ``sampled_weight``: the latter, but
      up to exp(300) for weights of several tokens; each ``…_excess``: less 1. A small variance is computed from the
      excess, because it must not be the difference of two large numbers; an effective sample size from the weights,
      because a tiny weight less 1 is rounded to -1;
    - of each criterion on tokens or turns, by its name: the number that it tests, clamped to the bounds.
    """
    ratio_excess = decisions.ratio - 1
    quantities = {
        "ratio_excess": ratio_excess,
        # Both terms clamped, as in numerics.k3.
        "k3": ratio_excess - decisions.log_ratio.clamp(max=EXP_LIMIT),
    }
    weights, invalid = decisions.weights, decisions.invalid
    if weights is not None:
        raw_weight = weights.raw.masked_fill(invalid, 0)
        quantities["weight"] = weights.bounded
        quantities["weight_excess"] = (weights.bounded - 1).masked_fill(invalid, 0)
        quantities["raw_weight"] = raw_weight
        if not config.weighs_single_tokens:
            quantities["raw_weight_excess"] = weights.raw - 1
            quantities["sampled_weight"] = exp_sample(weights.log).masked_fill(invalid, 0)
    for criterion in config.criteria:
        if criterion.of_tokens:
            tested = decisions.tests[criterion.name].tested
            if decisions.bound_scale is None:
                clamped = tested.clamp(criterion.least, criterion.upper)
            else:
                scaled = tested / decisions.bound_scale
                clamped = scaled.clamp(criterion.least, criterion.upper) * decisions.bound_scale
            quantities[criterion.name] = clamped.masked_fill(invalid, 0)
    return quantities


def _token_extremes(decisions: TokenDecisions) -> dict[str, tuple[Tensor, Tensor]]:
    """Return (largest, smallest) over valid tokens, 0-D each, by name: of weights, and of numbers that are tested."""
    values = {name: test.tested for name, test in decisions.tests.items()}
    if decisions.weights is not None:
        values |= {"weight": decisions.weights.bounded, "raw_weight": decisions.weights.raw}
    if not values:
        return {}
    rows = torch.stack([*values.values()]).flatten(1)
    largest, smallest = extremes_of(rows, decisions.invalid.flatten())
    return dict(zip(values, zip(largest, smallest, strict=True), strict=True))


def _need_extremes(
    decisions: TokenDecisions, sequences: BlockSequences, config: RolloutCorrectionConfig
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the largest and the smallest x of each sequence that criteria need, [n] float64, by the need's name."""
    extremes = []
    for how, fill, reduce in (("max", -torch.inf, sequences.largest), ("min", torch.inf, sequences.smallest)):
        needs = [need for need in config.needs if need.how == how]
        values: Sequence[Tensor] = ()
        if needs:
            rows = torch.stack([decisions.divergences[need.divergence.name].double() for need in needs])
            values = reduce(rows.masked_fill(decisions.invalid, fill)).unbind(0)
        extremes.append({need.name: value for need, value in zip(needs, values, strict=True)})
    return extremes[0], extremes[1]
