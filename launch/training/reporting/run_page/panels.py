"""Panels: the metrics that a run's page and its picture draw together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rc.launch.rollouts.evaluation import right_by_name
from megatron_rc.launch.training.reporting.series import Series, aligned, drawn

_RC, _PASS, _HELD_OUT = "rollout_corr/", "eval/pass@", "eval/reward"
# Stands for the metric of each file of --eval-data.
_BY_NAME = "eval/<name>/exact_match"
_PERCENTS = ("01", "05", "25", "50", "75", "95", "99")
_PHASES = ("sync", "eval", "rollout", "plan", "update", "save")


@dataclass(frozen=True)
class Panel:
    """Curves in one drawing."""

    title: str  # title with the unit
    note: str  # explanation below the title
    curves: Mapping[str, str]  # label of each metric; metrics without a value are left out
    stacked: bool = False  # draw the curves on top of each other
    wide: bool = False  # use a logarithmic axis if the values differ by orders of magnitude


PANELS = (
    Panel(
        "Reward",
        "Mean over the sampled responses; for evaluations, over the answers to held-out problems.",
        {
            "reward/mean": "mean reward",
            "reward/greedy": "most likely response",
            "eval/exact_match": "right answers, held out",
            _HELD_OUT: "mean reward, held out",
            _PASS: "right in {k} tries, held out",
        },
    ),
    Panel(
        "Distance of the policies, nats a token",
        "KL from the engine to the trainer; the k3 estimate is never negative.",
        {f"{_RC}kl": "KL", f"{_RC}k3_kl": "k3"},
        wide=True,
    ),
    Panel(
        "Effective sample size and rejection, shares",
        "ESS: effective share of the batch under the weights. Rejected tokens are not trained on.",
        {
            f"{_RC}rollout_is_eff_sample_size": "ESS",
            f"{_RC}rollout_rs_masked_fraction": "rejected tokens",
            f"{_RC}rollout_rs_seq_masked_fraction": "sequences that lose a token",
        },
    ),
    Panel(
        "Ratios of tokens, log ρ",
        "log of π_trainer / π_rollout: half of the tokens lie between the quartiles, 98 % within the outer lines.",
        {f"{_RC}log_ratio_p{percent}": f"{int(percent)} %" for percent in ("01", "25", "50", "75", "99")},
    ),
    Panel(
        "Right answers by file, shares", "To the held-out problems of each file of --eval-data.", {_BY_NAME: "{name}"}
    ),
    Panel("Gradient norm", "Before clipping.", {"grad_norm": "policy", "critic/grad_norm": "critic"}, wide=True),
    Panel("Loss", "Of each optimizer step, with penalties.", {"loss/total": "policy", "loss/critic": "critic"}),
    Panel(
        "Entropy, and KL to the reference policy, nats a token",
        "Near an entropy of 0 the policy gives one answer only.",
        {"policy/entropy": "entropy", "policy/reference_kl": "KL to the reference"},
    ),
    Panel("Response length, tokens", "Mean over the sampled responses.", {"rollout/response_length": "mean length"}),
    Panel(
        "Staleness, optimizer steps",
        "Steps by which the sampling weights were older than the trained weights.",
        {"rollout/staleness_mean": "mean", "rollout/staleness_max": "largest"},
    ),
    Panel(
        "Time of a step, seconds",
        "By phase. Steps on one rollout batch share its sync, evaluation, rollout and plan.",
        {f"perf/{phase}_seconds": phase for phase in _PHASES},
        stacked=True,
    ),
    Panel(
        "Throughput, tokens a second",
        "Sampled tokens over the time from the weight sync to the end of the first update.",
        {"perf/tokens_per_second": "all ranks together"},
    ),
    Panel("Memory, GiB", "Peak over all ranks so far.", {"perf/peak_memory_gib": "peak"}),
)
WANTED = (
    *(name for panel in PANELS for name in panel.curves if name not in (_PASS, _BY_NAME)),
    *("eval/", "skipped_steps", "bad_steps", "reward/nonzero_advantages"),
)


def panels_of(series: Mapping[str, Series]) -> list[dict[str, Any]]:
    """Panels with at least one curve, as data of the page."""
    found = []
    for panel in PANELS:
        labels = labels_of(panel, series)
        held = aligned(series, list(labels)) if panel.stacked else series
        curves = [{"label": label, **drawn(held[name])} for name, label in labels.items()]
        if curves:
            lost = sum(len(series[name].values) - len(series[name].finite()) for name in labels)
            note = panel.note + f" Not drawn, because NaN or infinite: {lost}." * bool(lost)
            words = {"title": panel.title, "note": note}
            found.append(words | {"stacked": panel.stacked, "wide": panel.wide, "curves": curves})
    return found


def labels_of(panel: Panel, series: Mapping[str, Series]) -> dict[str, str]:
    """Labels of a panel's curves by metric; of pass@k only the largest k, and no second curve of equal values."""
    labels = {name: label for name, label in panel.curves.items() if name in series}
    tries = [int(name.removeprefix(_PASS)) for name in series if name.startswith(_PASS)]
    if _BY_NAME in panel.curves:
        labels |= {f"eval/{name}/exact_match": name for name in right_by_name(series)}
    if _PASS in panel.curves and max(tries, default=1) > 1:
        labels[f"{_PASS}{max(tries)}"] = panel.curves[_PASS].format(k=max(tries))
    if _HELD_OUT not in labels:
        return labels
    rewards, right = (series[name].values if name in series else () for name in (_HELD_OUT, "eval/exact_match"))
    pairs = zip(rewards, right, strict=False)
    if len(rewards) == len(right) and all(math.isclose(one, other, abs_tol=1e-9) for one, other in pairs):
        del labels[_HELD_OUT]
    return labels


def histograms_of(row: Mapping[str, float], level: str | None) -> list[dict[str, Any]]:
    """Histograms of the last step's ratios and weights, with the quantiles among its metrics as edges of the bins.

    ``level`` is the level of the weights, None without weights. A histogram has ``edges`` (logarithms) and ``shares``.
    """
    logs = [row.get(f"{_RC}log_ratio_p{percent}", math.nan) for percent in _PERCENTS]
    shares = [(int(high) - int(low)) / 100 for low, high in itertools.pairwise(_PERCENTS)]
    step = row.get("step")
    found = [_histogram(f"Ratios ρ of tokens, step {step}", "from the 1st to the 99th percentile", logs, shares)]
    if level is not None:
        of = "rollout_is_" if level == "token" else "rollout_is_seq_"
        values = [row.get(f"{_RC}{of}{name}", math.nan) for name in ("min", "p25", "p50", "p75", "max")]
        # log(0) does not exist: draw such a weight at the edge.
        logs = [math.log(max(value, 1e-6)) for value in values]
        what = "tokens" if level == "token" else "sequences"
        found.append(_histogram(f"Weights of {what} after bounds, step {step}", "by quarters", logs, [0.25] * 4))
    return [one for one in found if one is not None]


def _histogram(title: str, note: str, edges: list[float], shares: list[float]) -> dict[str, Any] | None:
    if not all(map(math.isfinite, edges)):
        return None
    # Interpolated quantiles may exceed the exact extremes by rounding.
    rising = [max(edges[: index + 1]) for index in range(len(edges))]
    return {"title": title, "note": f"{note}; the area is the share", "edges": rising, "shares": shares}
