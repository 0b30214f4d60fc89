"""Tiles with a run's main numbers, and the doctor's verdict, for its page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from megatron_rc.doctor.inputs import Evidence
from megatron_rc.doctor.programs import OWN
from megatron_rc.doctor.report import GRADES, HEALTHY, SHOWN, WRONG, examine
from megatron_rc.doctor.series import History, facts_of_series
from megatron_rc.doctor.tables import own_row
from megatron_rc.launch.training.reporting.config_yaml import Settings
from megatron_rc.launch.training.reporting.series import Series
from megatron_rc.launch.training.reporting.terminal import AVERAGED

_RC = "rollout_corr/"
# Full names of the metrics whose change over the run the doctor examines.
FULL_NAMES = {
    "response_length": "rollout/response_length",
    "chi2_seq": f"{_RC}chi2_seq",
    "entropy": "policy/entropy",
    "k3_kl": f"{_RC}k3_kl",
    "rollout_is_eff_sample_size": f"{_RC}rollout_is_eff_sample_size",
    "grad_norm": "grad_norm",
    "reward": "reward/mean",
    "nonzero_advantages": "reward/nonzero_advantages",
}
_LAST = f"mean of the last {AVERAGED} steps"
# Metric, label and format of tiles with a mean.
_MEANS = (
    (f"{_RC}kl", "KL, nats a token", "{:.3g}"),
    (f"{_RC}rollout_is_eff_sample_size", "effective sample size", "{:.3f}"),
    (f"{_RC}rollout_rs_masked_fraction", "rejected tokens", "{:.2%}"),
    ("policy/entropy", "entropy, nats a token", "{:.3g}"),
    ("perf/tokens_per_second", "tokens a second", "{:,.0f}"),
)


def tiles_of(series: Mapping[str, Series], steps: int, settings: Settings) -> list[dict[str, str]]:
    """Tiles for steps, rewards and means of the last steps: ``label``, ``value`` and ``note`` of each."""
    return [{"label": label, "value": value, "note": note} for label, value, note in _tiles(series, steps, settings)]


def _tiles(series: Mapping[str, Series], steps: int, settings: Settings) -> Iterator[tuple[str, str, str]]:
    total = settings.get("train-iters")
    yield "optimizer steps", f"{steps} of {total}" if total else str(steps), _not_made(series)
    rewards = series["reward/mean"].finite() if "reward/mean" in series else []
    if rewards:
        last = series["reward/mean"].mean_of_last(AVERAGED)
        best = max(rewards, key=lambda pair: pair[1])
        note = f"first step → {_LAST}; best {best[1]:.3g} at step {best[0]}"
        yield "mean reward", f"{rewards[0][1]:.3g} → {last:.3g}", note
    right = series["eval/exact_match"].finite() if "eval/exact_match" in series else []
    if right:
        note = f"first evaluation → last, after step {right[-1][0]}"
        yield "right answers, held out", f"{right[0][1]:.1%} → {right[-1][1]:.1%}", note
    for name, label, form in _MEANS:
        mean = series[name].mean_of_last(AVERAGED) if name in series else None
        if mean is not None:
            yield label, form.format(mean), _LAST


def _not_made(series: Mapping[str, Series]) -> str:
    """Note about the steps that changed no weight; empty without any."""
    found = series["skipped_steps"].finite() if "skipped_steps" in series else []
    number = int(found[-1][1]) if found else 0
    return f"{number} of them left out: they changed no weight" if number else ""


def doctor_of(series: Mapping[str, Series], last: Sequence[Mapping[str, Any]], settings: Settings) -> dict[str, Any]:
    """The doctor's report on a run: ``words``, ``is_wrong``, ``numbers``, ``verdicts`` and ``proposal``.

    ``series`` has the series of ``FULL_NAMES``; ``last`` all metrics of the last steps, under their usual names.
    """
    rows = [{name: value for name, value in own_row(row, _RC).items() if math.isfinite(value)} for row in last]
    begun = min(row["step"] for row in last)
    old: dict[int, dict[str, float]] = {}
    for name, full in FULL_NAMES.items():
        for step, value in series[full].finite() if full in series else ():
            if step < begun:
                old.setdefault(step, {"step": step})[name] = value
    earlier = [old[step] for step in sorted(old)]
    report = examine(Evidence("", facts_of_series(History(chain(earlier, rows)), settings.all)))
    facts = report.evidence.facts
    nothing = "nothing wrong" if report.code == HEALTHY else "too few numbers to judge"
    grade = next((f": {words}" for limit, words in GRADES if facts["k3_kl"] <= limit), "")
    titles = ", ".join(verdict.rule.title for verdict in report.verdicts)
    return {
        "words": f"{titles or nothing}{grade}",
        "is_wrong": report.code == WRONG,
        "numbers": [[label, form.format(facts[name])] for name, label, form in SHOWN if name in facts],
        "verdicts": [
            {"title": one.rule.title, "words": one.words, "advice": one.rule.advice_in(OWN)} for one in report.verdicts
        ],
        "proposal": f"{report.choice.flags()} ({report.choice.why})" if report.verdicts and report.choice else "",
    }
