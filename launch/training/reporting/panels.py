"""Charts of a run: the metrics that its page and its picture draw together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_rc.drawing.charts import Chart, Curve, draw_curves
from megatron_rc.launch.rollouts.evaluation import right_by_name
from megatron_rc.launch.training.reporting.series import Series

_RC = "rollout_corr/"
_PASS_AT = re.compile(r"eval/pass@(\d+)")


@dataclass(frozen=True)
class Panel:
    """Metrics in one chart.

    Attributes:
        title: title with the unit.
        note: explanation below the title.
        labels: label of each metric; metrics without a value are left out.
        scale: of the vertical axis, see :func:`draw_curves`.
    """

    title: str
    note: str
    labels: Mapping[str, str]
    scale: str = "linear"


REWARD = Panel(
    "Reward",
    "Mean over the sampled responses; for evaluations, over the answers to held-out problems.",
    {
        "reward/mean": "mean reward",
        "reward/greedy": "most likely response",
        "eval/exact_match": "right answers, held out",
        "eval/reward": "mean reward, held out",
    },
)
DISTANCE = Panel(
    "Distance of the policies, nats a token",
    "KL from the engine to the trainer; the k3 estimate is never negative.",
    {f"{_RC}kl": "KL", f"{_RC}k3_kl": "k3"},
    scale="wide",
)
SHARES = Panel(
    "Effective sample size and rejection, shares",
    "ESS: effective share of the batch under the weights. Rejected tokens are not trained on.",
    {
        f"{_RC}rollout_is_eff_sample_size": "ESS",
        f"{_RC}rollout_rs_masked_fraction": "rejected tokens",
        f"{_RC}rollout_rs_seq_masked_fraction": "sequences that lose a token",
    },
)
RATIOS = Panel(
    "Ratios of tokens, log ρ",
    "log of π_trainer / π_rollout: half of the tokens lie between the quartiles, 98 % within the outer lines.",
    {f"{_RC}log_ratio_p{percent}": f"{int(percent)} %" for percent in ("01", "25", "50", "75", "99")},
)
OTHERS = (
    Panel("Gradient norm", "Before clipping.", {"grad_norm": "policy", "critic/grad_norm": "critic"}, scale="wide"),
    Panel("Loss", "Of each optimizer step, with penalties.", {"loss/total": "policy", "loss/critic": "critic"}),
    Panel(
        "Entropy, and KL to the reference policy, nats a token",
        "Near an entropy of 0 the policy gives one answer only.",
        {"policy/entropy": "entropy", "policy/reference_kl": "KL to the reference"},
    ),
    Panel("Response length, tokens", "Mean over the sampled responses.", {"rollout/response_length": "mean length"}),
    Panel(
        "Inclusion rate, shares",
        "Share of the started responses that trained; far apart, the length selects.",
        {
            "selection/inclusion": "all",
            "selection/inclusion_shortest": "shortest quarter",
            "selection/inclusion_longest": "longest quarter",
        },
    ),
    Panel(
        "Staleness, optimizer steps",
        "Steps by which the sampling weights were older than the trained weights.",
        {"rollout/staleness_mean": "mean", "rollout/staleness_max": "largest"},
    ),
    Panel(
        "Time of a step, seconds",
        "By phase. Steps on one rollout batch share its sync, evaluation, rollout and plan.",
        {f"perf/{phase}_seconds": phase for phase in ("sync", "eval", "rollout", "plan", "update", "save")},
        scale="wide",
    ),
    Panel(
        "Throughput, tokens a second",
        "Sampled tokens over the time from the weight sync to the end of the first update.",
        {"perf/tokens_per_second": "all ranks together"},
    ),
    Panel("Memory, GiB", "Peak over all ranks so far.", {"perf/peak_memory_gib": "peak"}),
)


def picture_charts(series: Mapping[str, Series]) -> list[Chart]:
    """Return the four charts of a run's picture; without weights the last one has the ratios of tokens."""
    weights = _weights_chart(series) or _chart(RATIOS, series)
    return [_chart(REWARD, series), _chart(DISTANCE, series), _chart(SHARES, series), weights]


def page_charts(series: Mapping[str, Series]) -> list[Chart]:
    """Return the charts of a run's page: all that have at least one curve."""
    shares_of_files = {f"eval/{name}/exact_match": name for name in right_by_name(dict.fromkeys(series, 0.0))}
    by_file = Panel(
        "Right answers by file, shares", "To the held-out problems of each file of --eval-data.", shares_of_files
    )
    charts = [_chart(panel, series) for panel in (REWARD, by_file, DISTANCE, SHARES) if _labels(panel, series)]
    weights = _weights_chart(series)
    if weights is not None:
        charts.append(weights)
    charts += [_chart(panel, series) for panel in (RATIOS, *OTHERS) if _labels(panel, series)]
    return charts


def _chart(panel: Panel, series: Mapping[str, Series]) -> Chart:
    labels = _labels(panel, series)
    curves = [series[metric].as_curve(label) for metric, label in labels.items()]
    num_not_finite = sum(series[metric].num_not_finite for metric in labels)
    note = panel.note
    if num_not_finite:
        note += f" Not drawn, because NaN or infinite: {num_not_finite}."
    return Chart(panel.title, note, partial(_draw, curves=curves, panel=panel))


def _draw(axes: Any, curves: list[Curve], panel: Panel) -> None:
    draw_curves(axes, curves, scale=panel.scale)
    if panel is SHARES:
        axes.set_ylim(-0.02, 1.02)
        if curves:
            axes.legend(loc="center right")  # shares are mostly near 0 or 1
    if panel is REWARD:
        _fit_rewards(axes)


def _fit_rewards(axes: Any) -> None:
    """Show 0 to 1 if all rewards lie there and some reach 0.5; else begin at 0 if that is near the data."""
    low, high = axes.dataLim.intervaly  # infinite without rewards
    if low >= 0 and 0.5 <= high <= 1:
        axes.set_ylim(-0.02, 1.02)
    elif 0 <= low < 0.5 * high:
        axes.set_ylim(bottom=-0.05 * high)  # growth is not exaggerated


def _labels(panel: Panel, series: Mapping[str, Series]) -> dict[str, str]:
    """Labels of a panel's curves by metric; of pass@k the one with the largest k."""
    labels = {metric: label for metric, label in panel.labels.items() if metric in series}
    if panel is not REWARD:
        return labels
    tries = [int(match[1]) for metric in series if (match := _PASS_AT.fullmatch(metric))]
    if max(tries, default=1) > 1:
        labels[f"eval/pass@{max(tries)}"] = f"right in {max(tries)} tries, held out"
    return labels


def _weights_chart(series: Mapping[str, Series]) -> Chart | None:
    """Return a chart of the weights' mean between the smallest and the largest one; None for a run without weights."""
    names = {name: f"{_RC}rollout_is_raw_{name}" for name in ("mean", "min", "max")}
    if not series.keys() >= set(names.values()):
        return None
    mean, smallest, largest = (series[metric].as_curve(name) for name, metric in names.items())
    # Of stretches of a long run: their lowest minimum, and their highest maximum.
    lows = smallest.low or smallest.y
    highs = largest.high or largest.y
    has_band = len(lows) == len(highs) == len(mean.x)  # not if some of them are not finite
    curve = Curve(
        "mean, between the smallest and the largest",
        x=mean.x,
        y=mean.y,
        low=lows if has_band else None,
        high=highs if has_band else None,
    )
    return Chart(
        "Importance weights before truncation",
        "Mean weight of the step, between the smallest and the largest one; on a logarithmic axis.",
        partial(draw_curves, curves=[curve], scale="log"),
    )
