"""Which metrics a run's page draws together, and how."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rc.launch.training.run_page.series import Series, aligned, drawn

_RC, _PASS = "rollout_corr/", "eval/pass@"
_PERCENTS = ("01", "05", "25", "50", "75", "95", "99")
_PHASES = ("sync", "eval", "rollout", "plan", "update", "save")


@dataclass(frozen=True)
class Panel:
    """Curves in one picture.

    Attributes:
        title: of the picture, with the unit.
        note: what to know of it.
        curves: a label for each metric; one that was not measured is left out.
        stacked: draw sums of the curves.
        wide: the values may differ by orders of magnitude: the axis is logarithmic where they do.
    """

    title: str
    note: str
    curves: Mapping[str, str]
    stacked: bool = False
    wide: bool = False


PANELS = (
    Panel(
        "Reward",
        "Of the sampled responses, and of answers to held-out problems where there were evaluations.",
        {
            "reward/mean": "mean reward",
            "reward/greedy": "most likely response",
            "eval/exact_match": "right answers, held out",
            "eval/reward": "mean reward, held out",
            _PASS: "right in {k} tries, held out",
        },
    ),
    Panel(
        "Distance of the policies, nats a token",
        "KL from the engine that sampled to the trainer; k3 is the estimate that cannot be negative.",
        {f"{_RC}kl": "KL", f"{_RC}k3_kl": "k3"},
        wide=True,
    ),
    Panel(
        "Effective sample size and rejection, shares",
        "ESS: how much of the batch the weights leave. Rejected: tokens that train nothing.",
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
        "Gradient norm",
        "Before clipping.",
        {"grad_norm": "policy", "critic/grad_norm": "critic"},
        wide=True,
    ),
    Panel("Loss", "Of each optimizer step, penalties included.", {"loss/total": "policy", "loss/critic": "critic"}),
    Panel(
        "Entropy, and KL to the reference policy, nats a token",
        "Entropy near 0: the policy says one thing only.",
        {"policy/entropy": "entropy", "policy/reference_kl": "KL to the reference"},
    ),
    Panel("Response length, tokens", "Mean over the sampled responses.", {"rollout/response_length": "mean length"}),
    Panel(
        "Staleness, optimizer steps",
        "How many steps the weights that sampled were behind those that train.",
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
    Panel("Memory, GiB", "The most that any rank has needed so far.", {"perf/peak_memory_gib": "peak"}),
)
WANTED = (
    *(name for panel in PANELS for name in panel.curves if name != _PASS),
    *("eval/", "skipped_steps", "bad_steps", "reward/nonzero_advantages"),
)


def panels_of(series: Mapping[str, Series]) -> list[dict[str, Any]]:
    """The panels that have a curve, as the page draws them."""
    found = []
    for panel in PANELS:
        labels = _labels(panel, series)
        held = aligned(series, list(labels)) if panel.stacked else series
        curves = [{"label": label, **drawn(held[name])} for name, label in labels.items()]
        if curves:
            words = {"title": panel.title, "note": panel.note + _left_out(series, labels)}
            found.append(words | {"stacked": panel.stacked, "wide": panel.wide, "curves": curves})
    return found


def _labels(panel: Panel, series: Mapping[str, Series]) -> dict[str, str]:
    labels = {name: label for name, label in panel.curves.items() if name in series}
    tries = [int(name.removeprefix(_PASS)) for name in series if name.startswith(_PASS)]
    if _PASS in panel.curves and max(tries, default=1) > 1:
        labels[f"{_PASS}{max(tries)}"] = panel.curves[_PASS].format(k=max(tries))
    return labels


def _left_out(series: Mapping[str, Series], labels: Mapping[str, str]) -> str:
    lost = sum(len(series[name].values) - len(series[name].finite()) for name in labels)
    return f" Not drawn, since NaN or infinite: {lost}." if lost else ""


def histograms_of(row: Mapping[str, float], level: str | None) -> list[dict[str, Any]]:
    """The last step's ratios and weights: bins between the quantiles that its metrics have, with the share of each.

    Args:
        row: metrics of the step under their usual names.
        level: ``token``, ``sequence`` or ``geometric``; None: there are no weights.

    Returns:
        For each ``edges`` (logarithms) and ``shares``, one fewer.
    """
    logs = [row.get(f"{_RC}log_ratio_p{percent}", math.nan) for percent in _PERCENTS]
    shares = [(int(high) - int(low)) / 100 for low, high in itertools.pairwise(_PERCENTS)]
    step = row.get("step")
    found = [_histogram(f"Ratios ρ of tokens, step {step}", "from the 1st to the 99th percentile", logs, shares)]
    if level is not None:
        of = "rollout_is_" if level == "token" else "rollout_is_seq_"
        values = [row.get(f"{_RC}{of}{name}", math.nan) for name in ("min", "p25", "p50", "p75", "max")]
        # A weight of 0 has no logarithm: it stands at the edge.
        logs = [math.log(max(value, 1e-6)) for value in values]
        what = "tokens" if level == "token" else "sequences"
        found.append(_histogram(f"Weights of {what} after bounds, step {step}", "by quarters", logs, [0.25] * 4))
    return [one for one in found if one is not None]


def _histogram(title: str, note: str, edges: list[float], shares: list[float]) -> dict[str, Any] | None:
    if not all(map(math.isfinite, edges)):
        return None
    # Interpolated quantiles may lie beyond the exact extremes by their rounding.
    rising = [max(edges[: index + 1]) for index in range(len(edges))]
    return {"title": title, "note": f"{note}; the area is the share", "edges": rising, "shares": shares}
