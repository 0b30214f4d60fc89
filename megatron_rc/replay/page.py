"""The comparison as one page and as one picture: the report's tables, the weights, and tokens and sequences as points.

Of large inputs, points are drawn at random, with a fixed seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_rc.drawing import page
from megatron_rc.drawing.charts import Chart, label_plainly, picture_of
from megatron_rc.replay.outcome import Outcome, edges
from megatron_rc.replay.report import as_text
from megatron_rc.replay.tokens import Recorded

TITLE = "Replay of rollouts under other corrections"
NUM_POINTS = 2000
MOST_SEQUENCES = 1500
BAND_TOKENS = 200_000
BAND_BINS = 24
# Corrections whose sequences have a chart of their own.
MOST_CORRECTIONS = 6
_LEAST_IN_BIN = 20
_LOWEST = -16.0  # log π_rollout; less likely tokens are drawn at this edge
_LINEAR_WIDTH = 0.1  # nats; smaller log-ratios are drawn on a linear axis


def as_page(data: Recorded, outcomes: Sequence[Outcome]) -> str:
    """Return the HTML of the page. Raises ImportError without matplotlib."""
    tables = page.section("Side by side", page.lines_of(as_text(data, outcomes)))
    note = "ESS: (Σ w)² / (n Σ w²), with weight 0 for rejected tokens."
    return page.page_of(TITLE, [page.paragraph(note, is_note=True), tables, page.charts(charts_of(data, outcomes))])


def as_picture(data: Recorded, outcomes: Sequence[Outcome]) -> bytes:
    """Return the charts of the page as one PNG. Raises ImportError without matplotlib."""
    return picture_of(TITLE, charts_of(data, outcomes))


def charts_of(data: Recorded, outcomes: Sequence[Outcome]) -> list[Chart]:
    """Return charts of the weights and of single tokens, and for each of the first corrections one of the sequences."""
    generator = torch.Generator().manual_seed(0)
    tokens = _draw_tokens(data, generator)
    sequences = _draw_sequences(data, generator)
    num_sequences = int((data.lengths > 0).sum())
    num_points = min(NUM_POINTS, len(tokens.log_ratio))
    description = f"{num_points} points, and a line and a band of {len(tokens.log_ratio)} tokens: median, 5 % to 95 %."
    return [
        Chart(
            "Weights of accepted tokens",
            "Share of the sampled tokens in each bin.",
            partial(_draw_weights, outcomes=outcomes, num_tokens=int(data.lengths.sum())),
        ),
        Chart(
            "Ratio against position",
            f"ρ = π_old / π_rollout of single tokens. {description}",
            partial(_draw_over_position, tokens=tokens),
        ),
        Chart(
            "Ratio against probability",
            f"ρ of single tokens against the probability that the engine gave them. {description}",
            partial(_draw_over_probability, tokens=tokens),
        ),
        *(
            Chart(
                f"Sequences under {outcome.name}",
                f"ρ of whole sequences, the product over the tokens; {len(sequences)} of {num_sequences} sequences.",
                partial(_draw_sequences_of, data=data, rows=sequences, outcome=outcome),
            )
            for outcome in outcomes[:MOST_CORRECTIONS]
        ),
    ]


@dataclass(frozen=True)
class _Tokens:
    """Tokens in random order, [k] float64 each."""

    position: Tensor  # in the response, from 0
    log_prob: Tensor  # log π_rollout
    log_ratio: Tensor  # log π_old - log π_rollout


def _draw_tokens(data: Recorded, generator: torch.Generator) -> _Tokens:
    """Draw at most ``BAND_TOKENS`` of all tokens."""
    positions = []
    rollout = []
    old = []
    for part in data.parts:
        first = part.mask.int().argmax(dim=1, keepdim=True)
        columns = torch.arange(part.mask.shape[1]) - first
        positions.append(columns[part.mask])
        rollout.append(part.rollout[part.mask])
        old.append(part.old[part.mask])
    log_prob = torch.cat(rollout)
    chosen = _random_indices(len(log_prob), BAND_TOKENS, generator)
    log_ratio = torch.cat(old) - log_prob
    return _Tokens(torch.cat(positions)[chosen].double(), log_prob[chosen], log_ratio[chosen])


def _draw_sequences(data: Recorded, generator: torch.Generator) -> Tensor:
    """[k] int64: rows of at most ``MOST_SEQUENCES`` sequences that have a token."""
    rows = (data.lengths > 0).nonzero().flatten()
    chosen: Tensor = rows[_random_indices(len(rows), MOST_SEQUENCES, generator)]
    return chosen


def _random_indices(number: int, most: int, generator: torch.Generator) -> Tensor:
    """[k] int64: at most so many of the first ``number`` integers, each once, in random order."""
    if number > most:
        # randperm of billions of tokens would take their memory.
        chosen: Tensor = torch.randint(number, (most,), generator=generator).unique()
        return chosen[torch.randperm(len(chosen), generator=generator)]
    return torch.randperm(number, generator=generator)


def _draw_weights(axes: Any, outcomes: Sequence[Outcome], num_tokens: int) -> None:
    for outcome in outcomes:
        shares = [count / num_tokens for count in outcome.weights.histogram]
        axes.stairs(shares, edges(), label=outcome.name)
    _make_powers_of_2(axes)
    axes.set_yscale("log", nonpositive="clip")
    label_plainly(axes.yaxis, 0.5 / num_tokens, 1.0)
    axes.set_ylim(0.5 / num_tokens, 1.5)
    axes.set_xlabel("weight")
    axes.set_ylabel("share of the sampled tokens")
    axes.legend(loc="best")


def _make_powers_of_2(axes: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")


def _draw_over_position(axes: Any, tokens: _Tokens) -> None:
    _draw_tokens_over(axes, tokens, across=tokens.position + 1)
    _make_powers_of_2(axes)
    _finish_ratios(axes, "token of the response")


def _draw_over_probability(axes: Any, tokens: _Tokens) -> None:
    across = tokens.log_prob.clamp(min=_LOWEST).exp()
    _draw_tokens_over(axes, tokens, across)
    axes.set_xscale("log")
    label_plainly(axes.xaxis, float(across.min()), 1.0)
    _finish_ratios(axes, "π_rollout of the token")


def _draw_tokens_over(axes: Any, tokens: _Tokens, across: Tensor) -> None:
    """Draw points, and the quantiles of the ratios in bins of equal width on a logarithmic axis."""
    shown = slice(0, NUM_POINTS)
    axes.plot(across[shown], tokens.log_ratio[shown], ".", markersize=3, alpha=0.4)
    middle, low, median, high = quantile_bands(across.log(), tokens.log_ratio)
    middles = [math.exp(log_middle) for log_middle in middle]
    axes.fill_between(middles, low, high, color="gray", alpha=0.3, linewidth=0)
    axes.plot(middles, median, color="black", linewidth=1.2)


def _draw_sequences_of(axes: Any, data: Recorded, rows: Tensor, outcome: Outcome) -> None:
    sums = [torch.where(part.mask, part.old - part.rollout, 0).sum(dim=1, dtype=torch.float64) for part in data.parts]
    log_ratio = torch.cat(sums)[rows]
    lengths = data.lengths[rows]
    is_rejected = outcome.accepted[rows] == 0
    axes.plot(lengths[~is_rejected], log_ratio[~is_rejected], ".", markersize=4, alpha=0.5, label="accepted tokens")
    axes.plot(
        lengths[is_rejected],
        log_ratio[is_rejected],
        "o",
        markersize=4,
        markerfacecolor="none",
        color="tab:red",
        label="no token accepted",
    )
    _make_powers_of_2(axes)
    axes.legend(loc="best")
    _finish_ratios(axes, "tokens of the response")


def _finish_ratios(axes: Any, title: str) -> None:
    """Make the vertical axis linear near 0 and logarithmic far from it."""
    from matplotlib.ticker import NullLocator, SymmetricalLogLocator

    axes.set_yscale("asinh", linear_width=_LINEAR_WIDTH)
    axes.yaxis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=_LINEAR_WIDTH, subs=(1, 3)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.axhline(0.0, color="gray", linewidth=0.8, linestyle="--")
    axes.set_xlabel(title)
    axes.set_ylabel("log ρ, nats")


def quantile_bands(across: Tensor, values: Tensor) -> tuple[list[float], ...]:
    """Middles of bins of equal width, and the 5 %, 50 % and 95 % quantiles of the values in each.

    Bins with few values are left out.
    """
    bands: tuple[list[float], ...] = ([], [], [], [])
    if not len(across) or across.min() == across.max():
        return bands
    begin = float(across.min())
    width = float(across.max() - across.min()) / BAND_BINS
    bins = ((across - begin) / width).long().clamp(max=BAND_BINS - 1)
    quantiles = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)
    for number in range(BAND_BINS):
        in_bin = values[bins == number]
        if len(in_bin) >= _LEAST_IN_BIN:
            row = [begin + width * (number + 0.5), *in_bin.double().quantile(quantiles).tolist()]
            for column, value in zip(bands, row, strict=True):
                column.append(value)
    return bands
