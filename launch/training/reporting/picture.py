"""``summary.png``: a run's rewards, distance of the policies, shares of the batch, and weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_rc.launch.training.reporting.metrics_file import read_rows
from megatron_rc.launch.training.reporting.run_page.panels import PANELS, WANTED, labels_of
from megatron_rc.launch.training.reporting.series import Series, collect, usual_names

_RC = "rollout_corr/"
_WEIGHTS = [f"{_RC}rollout_is_raw_{name}" for name in ("min", "max", "mean", "std")]
_RATIOS = [f"{_RC}log_ratio_p{percent}" for percent in ("01", "25", "50", "75", "99")]
_STYLE = {"color": "tab:purple"}
# Series with fewer points have markers, because a line of one point is invisible.
_FEW = 20


def draw_run(metrics: Path, picture: Path, name: str, prefix: str = _RC) -> None:
    """Draw ``metrics.jsonl`` into a PNG file with the run's name; the correction's metrics begin with ``prefix``."""
    figure_of((usual_names(row, prefix) for row in read_rows(metrics)), name).savefig(picture, dpi=110)


def figure_of(rows: Iterable[Mapping[str, float]], name: str) -> Any:
    """Matplotlib's figure of a run's rows."""
    from matplotlib.figure import Figure

    series = collect(rows, (*WANTED, *_WEIGHTS))
    figure = Figure(figsize=(11, 6.6), layout="constrained")
    # parse_math=False, because a $ in the name would start a formula.
    figure.suptitle(name, parse_math=False, fontweight="bold")
    rewards, _, shares, weights = axes = list(figure.subplots(2, 2).flat)
    for axis, panel in zip(axes, PANELS[:3], strict=False):
        axis.set_title(panel.title)
        for metric, label in labels_of(panel, series).items():
            _draw_line(axis, *_points(series, [metric]), label=label)
    rewards.set_ylim(reward_limits(value for metric in labels_of(PANELS[0], series) for value in series[metric].values))
    shares.set_ylim(-0.02, 1.02)
    _draw_weights(weights, series)
    for axis in axes:
        axis.set_xlabel("step")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[1]:
            # Shares are mostly near 0 or 1, so the middle is free.
            axis.legend(fontsize=8, loc="center right" if axis is shares else "best")
        else:
            axis.text(0.5, 0.5, "nothing measured", transform=axis.transAxes, ha="center", color="gray")
    return figure


def reward_limits(values: Iterable[float]) -> tuple[float, float]:
    """Limits of the reward axis: 0 to 1 if all rewards lie there and some reach 0.5; else close to the data."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    if low >= 0 and high <= 1 and high >= 0.5:
        return -0.02, 1.02
    margin = 0.05 * (high - low) or 0.1 * abs(high) or 0.5
    # An axis that could begin near 0 begins at 0, so that growth is not exaggerated.
    is_near = 0 <= low < 0.5 * high
    return (0.0 if is_near else low) - margin, high + margin


def _draw_weights(axis: Any, series: Mapping[str, Series]) -> None:
    """Spread of the weights; for runs without weights, spread of the ratios."""
    steps, found = _points(series, _WEIGHTS)
    if steps:
        axis.set_title("importance weights before truncation")
        least, most, middle, std = found
        below = [centre - width for centre, width in zip(middle, std, strict=True)]
        above = [centre + width for centre, width in zip(middle, std, strict=True)]
        bands = ((least, most, 0.2, "smallest to largest"), (below, above, 0.4, "mean ± std"))
    else:
        steps, logs = _points(series, _RATIOS)
        axis.set_title("ratios ρ = π_trainer / π_rollout of tokens")
        least, below, middle, above, most = ([math.exp(min(value, 20)) for value in row] for row in logs or [[]] * 5)
        bands = ((least, most, 0.2, "1 % to 99 %"), (below, above, 0.4, "25 % to 75 %"))
    if steps:
        for low, high, alpha, label in bands:
            axis.fill_between(steps, low, high, alpha=alpha, label=label, **_STYLE)
        _draw_line(axis, steps, [middle], **_STYLE)


def _draw_line(axis: Any, steps: list[int], values: list[list[float]], **style: Any) -> None:
    if steps:
        axis.plot(steps, values[0], linewidth=1.2, marker="o" if len(steps) < _FEW else None, ms=3, **style)


def _points(series: Mapping[str, Series], names: list[str]) -> tuple[list[int], list[list[float]]]:
    """Steps at which all of these metrics are finite, and the values of each."""
    known = [dict(series[name].finite()) if name in series else {} for name in names]
    steps = sorted(set.intersection(*map(set, known)))
    return steps, [[values[step] for step in steps] for values in known]
