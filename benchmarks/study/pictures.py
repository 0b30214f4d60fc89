"""The figures of docs/study.md: a line is the mean over the seeds, its band goes from the smallest to the largest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.study.design import WINDOW, Correction
from benchmarks.study.document import seeds_of
from benchmarks.study.results import Outcome
from benchmarks.study.settings import (
    BONUS,
    BYPASS,
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


def _finish(figure: Any, axes: list[Any], picture: Path) -> None:
    for axis in axes:
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    from PIL import Image

    handles, labels = axes[0].get_legend_handles_labels()
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
