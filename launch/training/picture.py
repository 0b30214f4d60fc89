"""One picture of a run: reward, distance of the two policies, effective samples and rejected tokens, weights."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_rc.launch.training.metrics_file import read_rows
from megatron_rc.launch.training.shown import usual_names

Row = dict[str, float]
_CORRECTION = "rollout_corr/"
_RAW = f"{_CORRECTION}rollout_is_raw_"
_QUANTILE = f"{_CORRECTION}log_ratio_p"
_PURPLE = "tab:purple"
# Fewer points than this are marked: a line of one point would not be seen.
_FEW = 20


def draw_run(metrics: Path, picture: Path, name: str, prefix: str = _CORRECTION) -> None:
    """Draw ``metrics.jsonl`` into a PNG file.

    Args:
        metrics: the file.
        picture: the PNG.
        name: of the run.
        prefix: of the correction's metrics.
    """
    wanted = {"reward/mean", *_KL, *_SHARES, *_WEIGHTS, *_RATIOS, "step"}
    usual = (usual_names(row, prefix) for row in read_rows(metrics))
    rows = [{key: value for key, value in row.items() if key in wanted or key.startswith(_EVAL)} for row in usual]
    figure_of(rows, name).savefig(picture, dpi=110)


_KL = {f"{_CORRECTION}kl": "KL(rollout ‖ trainer)", f"{_CORRECTION}k3_kl": "its k3 estimate"}
_EVAL, _PASS = "eval/", "eval/pass@"
_SHARES = {
    f"{_CORRECTION}rollout_is_eff_sample_size": "effective sample size",
    f"{_CORRECTION}rollout_rs_masked_fraction": "rejected tokens",
}
_WEIGHTS = [f"{_RAW}{name}" for name in ("min", "max", "mean", "std")]
_RATIOS = [f"{_QUANTILE}{percent}" for percent in ("01", "25", "50", "75", "99")]


def figure_of(rows: list[Row], name: str) -> Any:
    """The picture as matplotlib's Figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.6), layout="constrained")
    # A name may hold a $, which would begin a formula.
    figure.suptitle(name, parse_math=False, fontweight="bold")
    reward, kl, shares, weights = figure.subplots(2, 2).flat
    _draw_rewards(reward, rows)
    _draw_curves(kl, rows, _KL, "rollout against trainer, nats a token")
    _draw_curves(shares, rows, _SHARES, "shares of the batch")
    shares.set_ylim(-0.02, 1.02)
    _draw_weights(weights, rows)
    for axis in (reward, kl, shares, weights):
        axis.set_xlabel("step")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[1]:
            # All or nothing is what shares are most of the time: there is room in between.
            axis.legend(fontsize=8, loc="center right" if axis is shares else "best")
        else:
            axis.text(0.5, 0.5, "nothing measured", transform=axis.transAxes, ha="center", color="gray")
    return figure


def reward_limits(values: Iterable[float]) -> tuple[float, float]:
    """From 0 to 1 where rewards reach far into that range and do not leave it; else round the data."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    if low >= 0 and high <= 1 and high >= 0.5:
        return -0.02, 1.02
    margin = 0.05 * (high - low) or 0.1 * abs(high) or 0.5
    # A range that begins near 0 begins at 0: growth is seen for what it is.
    is_near = 0 <= low < 0.5 * high
    return (0.0 if is_near else low) - margin, high + margin


def _draw_rewards(axis: Any, rows: list[Row]) -> None:
    names = {"reward/mean": "mean reward", "eval/exact_match": "right answers, held out"}
    most = max((int(name.removeprefix(_PASS)) for row in rows for name in row if name.startswith(_PASS)), default=1)
    if most > 1:
        names[f"{_PASS}{most}"] = f"right in {most} tries, held out"
    if not all(_rewards_right_alone(row) for row in rows if "eval/reward" in row):
        names["eval/reward"] = "reward, held out"
    _draw_curves(axis, rows, names, "reward")
    axis.set_ylim(reward_limits(row[name] for row in rows for name in names if name in row))


def _rewards_right_alone(row: Row) -> bool:
    """Whether this evaluation's mean reward is its share of right answers, whose curve would hide the other."""
    return math.isclose(row["eval/reward"], row.get("eval/exact_match", math.nan), abs_tol=1e-9)


def _draw_curves(axis: Any, rows: list[Row], names: dict[str, str], title: str) -> None:
    axis.set_title(title)
    for name, label in names.items():
        steps, values = _points(rows, [name])
        if steps:
            axis.plot(steps, values[0], label=label, linewidth=1.2, marker="o" if len(steps) < _FEW else None, ms=3)


def _draw_weights(axis: Any, rows: list[Row]) -> None:
    """The weights' spread; where there are none, that of the ratios they would be made of."""
    steps, found = _points(rows, _WEIGHTS)
    if steps:
        axis.set_title("importance weights before truncation")
        least, most, mean, std = found
        below = [centre - width for centre, width in zip(mean, std, strict=True)]
        above = [centre + width for centre, width in zip(mean, std, strict=True)]
        bands = [(least, most, 0.2, "smallest to largest"), (below, above, 0.4, "mean ± std")]
    else:
        steps, logs = _points(rows, _RATIOS)
        axis.set_title("ratios ρ = π_trainer / π_rollout of tokens")
        least, below, mean, above, most = ([math.exp(min(value, 20)) for value in row] for row in logs or [[]] * 5)
        bands = [(least, most, 0.2, "1 % to 99 %"), (below, above, 0.4, "25 % to 75 %")]
    if steps:
        for low, high, alpha, label in bands:
            axis.fill_between(steps, low, high, alpha=alpha, color=_PURPLE, label=label)
        axis.plot(steps, mean, color=_PURPLE, linewidth=1, marker="o" if len(steps) < _FEW else None, ms=3)


def _points(rows: list[Row], names: list[str]) -> tuple[list[float], list[list[float]]]:
    """The steps of the rows that have all of these metrics, finite, and the values of each."""
    whole = [row for row in rows if all(math.isfinite(row.get(name, math.nan)) for name in names)]
    return [row["step"] for row in whole], [[row[name] for row in whole] for name in names] if whole else []
