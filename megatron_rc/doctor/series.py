"""Facts of a run from its metrics."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from statistics import median

from megatron_rc.doctor.facts import Facts
from megatron_rc.doctor.trends import Track, signal, trends

WINDOW = 10  # the last steps, whose medians are the present
GROWING = ("response_length", "chi2_seq")  # numbers whose growth is a fact
MIN_STEPS = 9  # the fewest steps for a growth
# Numbers that are kept for every step of the run.
OVER_THE_RUN = (*GROWING, "entropy", "k3_kl", "rollout_is_eff_sample_size", "grad_norm", "reward", "nonzero_advantages")
_STALENESS = re.compile(r"staleness_(\d+)_kl")


class History:
    """Metrics of a run: the last rows whole, and a few numbers of every step.

    Args:
        rows: one row for each step, under the names of ``docs/metrics.md`` without a prefix.

    Attributes:
        last: the last ``WINDOW`` rows.
        tracks: the numbers of ``OVER_THE_RUN`` by name; 16 bytes for each number and step.
        num_rows: number of rows.
    """

    def __init__(self, rows: Iterable[Mapping[str, float]] = ()) -> None:
        self.last: deque[Mapping[str, float]] = deque(maxlen=WINDOW)
        self.tracks = {name: Track() for name in OVER_THE_RUN}
        self.num_rows = 0
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[str, float]) -> None:
        """Add the row of the next step."""
        self.num_rows += 1
        self.last.append(row)
        for name, track in self.tracks.items():
            if name in row:
                track.steps.append(row.get("step", self.num_rows))
                track.values.append(row[name])


def facts_of_series(history: History, settings: Mapping[str, str] | None = None) -> Facts:
    """Medians of the last steps, and changes over the run.

    Args:
        history: the run's metrics; at least one row.
        settings: the run's flags without leading dashes; None if unknown.
    """
    last: dict[str, list[float]] = {}
    for row in history.last:
        for name, value in row.items():
            last.setdefault(name, []).append(value)
    facts = Facts({name: median(values) for name, values in last.items()})
    for name in GROWING:
        values = history.tracks[name].values
        third = len(values) // 3
        if len(values) >= MIN_STEPS and sum(values[:third]) > 0:
            facts[f"{name}_growth"] = sum(values[-third:]) / sum(values[:third])
    facts |= _staleness(facts) | _entropy(history.tracks["entropy"].values) | trends(history.tracks, WINDOW)
    facts |= signal(history.tracks["reward"], history.tracks["nonzero_advantages"], WINDOW)
    if settings is not None:
        facts["gspo"] = float(settings.get("policy-loss") == "gspo")
        applied = settings.get("rollout-is-apply", "true") == "true"
        facts["sequence_weights"] = float(settings.get("rollout-is") == "sequence" and applied)
        facts["token_weights"] = float(settings.get("rollout-is") == "token" and applied)
        with suppress(KeyError, ValueError):
            facts["entropy_bonus"] = float(settings["grpo-entropy-term-weight"])
    return facts


def _entropy(values: Sequence[float]) -> dict[str, float]:
    """Median entropy of the last steps over the lowest median of earlier steps."""
    if len(values) < 3 * WINDOW:
        return {}
    ends = range(WINDOW, len(values) - WINDOW + 1)
    lowest = min(median(values[end - WINDOW : end]) for end in ends)
    return {"entropy_rise": median(values[-WINDOW:]) / lowest} if lowest > 0 else {}


def _staleness(facts: Facts) -> dict[str, float]:
    """KL of the stalest tokens over KL of the freshest tokens."""
    by_age = {int(match[1]): facts[name] for name in facts if (match := _STALENESS.fullmatch(name))}
    if len(by_age) < 2:
        return {}
    fresh, stale = by_age[min(by_age)], by_age[max(by_age)]
    return {"staleness_kl_growth": abs(stale) / max(abs(fresh), 1e-5)}
