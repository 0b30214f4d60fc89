"""The figures of docs/study.md.

Curves: a line is the mean over the seeds, and its band goes from the smallest to the largest. Differences: a mark is
the difference of two means of seeds, and its bar is the 95 % interval.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.study.comparison import Comparison, comparison_key, comparisons, measures_of
from benchmarks.study.design import WINDOW, Block, Correction
from benchmarks.study.document import seeds_of
from benchmarks.study.results import Outcome
from benchmarks.study.settings import (
    BONUS,
    BYPASS,
    COUNT_ON,
    COUNT_UP,
    GEO_RS,
    MAIN,
    NONE,
    SEQ_TIS,
    SEQ_TIS_WEIGHTED,
    STRONG,
    TOKEN_TIS,
    UNCORRECTED,
)

# The lines of the README's picture, and of the measures.
_COLOURS: Mapping[Correction, str] = {
    UNCORRECTED: "tab:red",
    TOKEN_TIS: "tab:blue",
    GEO_RS: "tab:purple",
    SEQ_TIS: "tab:green",
    SEQ_TIS_WEIGHTED: "tab:olive",
    BYPASS: "tab:orange",
}
# Title and scale of an axis.
_ROWS = {
    "sampled": ("reward of the samples", "linear"),
    "kl": ("KL(rollout ‖ trainer), nats a token", "symlog"),
    "ess": ("effective sample size", "linear"),
    "grad_norm": ("gradient norm", "log"),
    "entropy": ("entropy of the trainer's policy, nats", "linear"),
}
# Label and colour of each task in the picture of differences.
_TASKS = {COUNT_UP.name: ("responses of 10 tokens", "tab:blue"), COUNT_ON.name: ("of 128 tokens", "tab:orange")}
Points = Mapping[int, float]


def draw_all(outcomes: Sequence[Outcome], folder: Path) -> None:
    """Draw the figures of the strong mismatches, without an entropy bonus and with it."""
    names = {MAIN.setting.name: "study", BONUS.name: "study_bonus"}
    for setting, name in names.items():
        of_setting = [outcome for outcome in outcomes if outcome.setting == setting]
        draw_rewards(of_setting, folder / f"{name}.png")
        draw_measures(of_setting, folder / f"{name}_measures.png")


def draw_rewards(outcomes: Sequence[Outcome], picture: Path) -> None:
    """Draw the rewards of the trainer's policy, with an axis for each strong mismatch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.9), layout="constrained")
    axes = figure.subplots(1, len(STRONG), sharey=True)
    reference = [dict(outcome.policy) for outcome in seeds_of(outcomes, NONE, UNCORRECTED)]
    for axis, kind in zip(axes, STRONG, strict=True):
        _draw(axis, reference, "0.6", NONE.title, linestyle="--")
        for correction, colour in _COLOURS.items():
            _draw(
                axis,
                [dict(outcome.policy) for outcome in seeds_of(outcomes, kind, correction)],
                colour,
                correction.title,
            )
        axis.set_title(kind.title)
        axis.set_ylim(-0.02, 1.02)
    axes[0].set_ylabel("reward of the trainer's policy")
    _finish(figure, list(axes), picture)


def draw_measures(outcomes: Sequence[Outcome], picture: Path) -> None:
    """Draw reward of the samples, KL, ESS, gradient norm and entropy: a row each, with a column for each mismatch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 13.5), layout="constrained")
    grid = figure.subplots(len(_ROWS), len(STRONG), sharey="row")
    for (measure, (title, scale)), axes in zip(_ROWS.items(), grid, strict=True):
        for axis, kind in zip(axes, STRONG, strict=True):
            for correction, colour in _COLOURS.items():
                curves = [_points(outcome.curves[measure]) for outcome in seeds_of(outcomes, kind, correction)]
                _draw(axis, curves, colour, correction.title)
            axis.set_yscale(scale, **({"linthresh": 0.1} if scale == "symlog" else {}))
        axes[0].set_ylabel(title)
    for axis, kind in zip(grid[0], STRONG, strict=True):
        axis.set_title(kind.title)
    _finish(figure, list(grid.flat), picture)


def draw_differences(outcomes: Sequence[Outcome], blocks: Sequence[Block], picture: Path) -> None:
    """Draw each correction's difference from no correction: a row for each measure, a column for each mismatch.

    The blocks have the same mismatches, and their corrections are in the same order. The measures are those of the
    last block. Nothing is drawn before all blocks are whole, because there is no verdict then.
    """
    from matplotlib.figure import Figure

    compared = comparisons(outcomes, blocks)
    if not compared:
        return
    measures = list(measures_of(blocks[-1]))
    mismatches = list(dict.fromkeys(mismatch for (mismatch, _), _ in blocks[0].compared_pairs))
    corrections = list(dict.fromkeys(correction.title for (_, correction), _ in blocks[0].compared_pairs))
    figure = Figure(figsize=(11, 2.9 * len(measures)), layout="constrained")
    grid = figure.subplots(len(measures), len(mismatches), sharex="row", sharey=True, squeeze=False)

    for measure, axes in zip(measures, grid, strict=True):
        for mismatch, axis in zip(mismatches, axes, strict=True):
            axis.axvline(0, color="0.4", lw=1)
            for number, block in enumerate(blocks):
                # The marks of the blocks stand one below the other around the correction's line.
                shift = (number - (len(blocks) - 1) / 2) * 0.36
                pairs = [pair for pair in block.compared_pairs if pair[0][0] == mismatch]
                of_mismatch = [compared[comparison_key(block, *pair, measure)] for pair in pairs]
                _draw_differences(axis, of_mismatch, shift, *_TASKS[block.setting.name])
            axis.set_xlabel(f"difference, {measure}", fontsize=8)
            axis.tick_params(labelsize=8)
            axis.grid(alpha=0.3)

    for mismatch, axis in zip(mismatches, grid[0], strict=True):
        axis.set_title(textwrap.fill(mismatch.title, width=28), fontsize=9)
    first_axis = grid[0][0]
    first_axis.set_yticks(range(len(corrections)), corrections)
    first_axis.invert_yaxis()
    _save(figure, first_axis, picture)


def _draw_differences(axis: Any, of_mismatch: Sequence[Comparison], shift: float, label: str, colour: str) -> None:
    """Draw a mark for each correction, full if its difference is decided, on a bar of its interval."""
    for number, comparison in enumerate(of_mismatch):
        difference = comparison.difference
        height = number + shift
        axis.plot([difference.low, difference.high], [height, height], color=colour, lw=1.5)
        axis.plot(
            [difference.mean],
            [height],
            color=colour,
            marker="o",
            markersize=5,
            markerfacecolor="white" if comparison.verdict == "undecided" else colour,
            linestyle="none",
            label=label if number == 0 else None,
        )


def _finish(figure: Any, axes: list[Any], picture: Path) -> None:
    for axis in axes:
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    _save(figure, axes[0], picture)


def _save(figure: Any, axis_of_legend: Any, picture: Path) -> None:
    """Add a legend with the labels of one axis, and write the figure."""
    from PIL import Image

    handles, labels = axis_of_legend.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=7, fontsize=8)
    drawn = BytesIO()
    figure.savefig(drawn, dpi=90)
    # Few colours make the file a third as large.
    Image.open(drawn).convert("RGB").quantize(128).save(picture, optimize=True)


def _points(values: Sequence[float | None]) -> Points:
    """Values by the last step of each window."""
    return {(number + 1) * WINDOW: value for number, value in enumerate(values) if value is not None}


def _draw(axis: Any, curves: Sequence[Points], colour: str, label: str, linestyle: str = "-") -> None:
    if not curves:
        return
    steps = sorted({step for curve in curves for step in curve})
    values_at = [[curve[step] for curve in curves if step in curve] for step in steps]
    marker = "o" if len(steps) < WINDOW else None
    means = [fmean(values) for values in values_at]
    axis.plot(steps, means, color=colour, label=label, linestyle=linestyle, marker=marker, ms=3)
    smallest = [min(values) for values in values_at]
    largest = [max(values) for values in values_at]
    axis.fill_between(steps, smallest, largest, color=colour, alpha=0.15, lw=0)
