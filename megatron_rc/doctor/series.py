"""Facts of a run, from the metrics of its steps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from statistics import median

from megatron_rc.doctor.facts import Facts

WINDOW = 10  # steps that speak for the present
GROWING = ("response_length", "chi2_seq")  # whose growth over the run is looked at
KEPT = (*GROWING, "entropy")  # what is looked at over the whole run
MIN_STEPS = 9  # steps below which nothing grows
_STALENESS = re.compile(r"staleness_(\d+)_kl")


def facts_of_series(rows: Sequence[Mapping[str, float]], settings: Mapping[str, str] | None = None) -> Facts:
    """The medians of the last steps, and what has grown since the first ones.

    Args:
        rows: one a step, under the names of ``docs/metrics.md`` without a prefix; at least one.
        settings: the run's flags without the dashes in front, where they are known.
    """
    last: dict[str, list[float]] = {}
    for row in rows[-WINDOW:]:
        for name, value in row.items():
            last.setdefault(name, []).append(value)
    facts = Facts({name: median(values) for name, values in last.items()})
    for name in GROWING:
        values = [row[name] for row in rows if name in row]
        third = len(values) // 3
        if len(values) >= MIN_STEPS and sum(values[:third]) > 0:
            facts[f"{name}_growth"] = sum(values[-third:]) / sum(values[:third])
    facts |= _staleness(facts) | _entropy([row["entropy"] for row in rows if "entropy" in row])
    if settings is not None:
        facts["gspo"] = float(settings.get("policy-loss") == "gspo")
        applied = settings.get("rollout-is-apply", "true") == "true"
        facts["sequence_weights"] = float(settings.get("rollout-is") == "sequence" and applied)
        facts["token_weights"] = float(settings.get("rollout-is") == "token" and applied)
        with suppress(KeyError, ValueError):
            facts["entropy_bonus"] = float(settings["grpo-entropy-term-weight"])
    return facts


def _entropy(values: Sequence[float]) -> dict[str, float]:
    """The median of the last steps against the lowest median of as many steps before them."""
    if len(values) < 3 * WINDOW:
        return {}
    *before, last = [median(values[end - WINDOW : end]) for end in range(WINDOW, len(values) + 1)]
    lowest = min(before[: 1 - WINDOW])
    return {"entropy_rise": last / lowest} if lowest > 0 else {}


def _staleness(facts: Facts) -> dict[str, float]:
    """KL of the stalest tokens against that of the freshest."""
    by_age = {int(match[1]): facts[name] for name in facts if (match := _STALENESS.fullmatch(name))}
    if len(by_age) < 2:
        return {}
    fresh, stale = by_age[min(by_age)], by_age[max(by_age)]
    return {"staleness_kl_growth": abs(stale) / max(abs(fresh), 1e-5)}
