"""``summary.png``: a run's rewards, distance of the policies, shares of the batch, and weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rc.launch.training.reporting.metrics_file import METRICS_FILE, read_rows
from megatron_rc.launch.training.reporting.run_page.panels import PANELS, WANTED, labels_of
from megatron_rc.launch.training.reporting.series import Series, collect, usual_names

PICTURE = "summary.png"
_RC = "rollout_corr/"
_WEIGHTS = [f"{_RC}rollout_is_raw_{name}" for name in ("mean", "std", "min", "max")]
_STYLE = {"color": "tab:purple"}
# Series with fewer points have markers, because a line of one point is invisible.
_FEW = 20


def draw_run(folder: Path, name: str, prefix: str = _RC) -> None:
    """Draw the metrics in a run's folder into its picture; the correction's metrics begin with ``prefix``."""
    rows = (usual_names(row, prefix) for row in read_rows(folder / METRICS_FILE))
    figure_of(rows, name).savefig(folder / PICTURE, dpi=110)


def figure_of(rows: Iterable[Mapping[str, float]], name: str) -> Any:
    """Matplotlib's figure of a run's rows. The last part has the ratios of tokens if the run has no weights."""
    from matplotlib.figure import Figure

    series = collect(rows, (*WANTED, *_WEIGHTS))
    figure = Figure(figsize=(11, 6.6), layout="constrained")
    # parse_math=False, because a $ in the name would start a formula.
    figure.suptitle(name, parse_math=False, fontweight="bold")
    rewards, _, shares, weights = axes = list(figure.subplots(2, 2).flat)
    has_weights = _WEIGHTS[0] in series
    for axis, panel in zip(axes, PANELS[: 3 if has_weights else 4], strict=False):
        axis.set_title(panel.title)
        for metric, label in labels_of(panel, series).items():
            _draw_line(axis, series[metric], label=label)
    if has_weights:
        _draw_weights(weights, series)
    _fit_rewards(rewards)
    shares.set_ylim(-0.02, 1.02)
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


def _fit_rewards(axis: Any) -> None:
    """Show 0 to 1 if all rewards lie there and some reach 0.5; else begin at 0 if that is near the data."""
    low, high = axis.dataLim.intervaly  # infinite without rewards
    if low >= 0 and 0.5 <= high <= 1:
        axis.set_ylim(-0.02, 1.02)
    elif 0 <= low < 0.5 * high:
        axis.set_ylim(bottom=-0.05 * high)  # growth is not exaggerated


def _draw_weights(axis: Any, series: Mapping[str, Series]) -> None:
    """Spread of the weights."""
    axis.set_title("importance weights before truncation")
    steps = series[_WEIGHTS[0]].steps
    middle, std, least, most = (np.array(series[name].values) for name in _WEIGHTS)
    axis.fill_between(steps, least, most, alpha=0.2, label="smallest to largest", **_STYLE)
    axis.fill_between(steps, middle - std, middle + std, alpha=0.4, label="mean ± std", **_STYLE)
    _draw_line(axis, series[_WEIGHTS[0]], **_STYLE)


def _draw_line(axis: Any, series: Series, **style: Any) -> None:
    marker = "o" if len(series.steps) < _FEW else None
    axis.plot(series.steps, series.values, linewidth=1.2, marker=marker, ms=3, **style)
