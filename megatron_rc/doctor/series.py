"""Facts of a run from its metrics: the present level, changes over the run, and the first step of a drift."""

from __future__ import annotations

import re
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median

from megatron_rc.attribution.verdict import attribution_of
from megatron_rc.doctor.facts import Facts, level_of, of_tokens

WINDOW = 10  # the last steps, whose medians are the present
GROWING = ("response_length", "chi2_seq")  # numbers whose growth is a fact
MIN_STEPS = 9  # the fewest steps for a growth
# Numbers that are kept for every step of the run.
OVER_THE_RUN = (*GROWING, "entropy", "k3_kl", "rollout_is_eff_sample_size", "grad_norm", "reward", "nonzero_advantages")
_STALENESS = re.compile(r"staleness_(\d+)_kl")
LEAST_K3 = 1e-6  # nats; a smaller k3 counts as this, so that growth from 0 is no drift
BEGUN = 2.0  # a drift begins when k3 stays above its lowest level times this
_STRETCHES = 10
_FEWEST = 3  # steps that a mean reward is taken over
_DEVIATION = 1.048  # standard deviation of normal noise over the median distance of two values: 1 / (0.6745 √2)


@dataclass
class Track:
    """One number over a run: its steps in order, and its value at each; 16 bytes a step."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))


class History:
    """The last ``WINDOW`` rows of a run's metrics, under our names, and ``OVER_THE_RUN`` of every step."""

    def __init__(self, rows: Iterable[Mapping[str, float]] = ()) -> None:
        self.last: deque[Mapping[str, float]] = deque(maxlen=WINDOW)
        self.tracks = {name: Track() for name in OVER_THE_RUN}
        # An attribution is made in few steps of a run; the newest counts.
        self.attribution: dict[str, float] = {}
        self.num_rows = 0
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[str, float]) -> None:
        """Add the row of the next step."""
        row = {**of_tokens(row), **row}
        self.num_rows += 1
        self.last.append(row)
        self.attribution = attribution_of(row) or self.attribution
        for name, track in self.tracks.items():
            if name in row:
                track.steps.append(row.get("step", self.num_rows))
                track.values.append(row[name])


def facts_of_series(history: History, settings: Mapping[str, str] | None = None, level: str | None = None) -> Facts:
    """Medians of the last steps of at least one, and changes over the run.

    ``settings`` are the run's flags without leading dashes; None if they are unknown. ``level`` is the level of the
    weights, or ``none`` without weights. Default: the level in the settings, else the one that the metrics tell.
    """
    last: dict[str, list[float]] = {}
    for row in history.last:
        for name, value in row.items():
            last.setdefault(name, []).append(value)
    facts = Facts({name: median(values) for name, values in last.items()})
    facts |= history.attribution
    for name in GROWING:
        values = history.tracks[name].values
        third = len(values) // 3
        if len(values) >= MIN_STEPS and sum(values[:third]) > 0:
            facts[f"{name}_growth"] = sum(values[-third:]) / sum(values[:third])
    facts |= _staleness(facts) | _entropy(history.tracks["entropy"].values) | _trends(history.tracks)
    facts |= _signal(history.tracks["reward"], history.tracks["nonzero_advantages"])
    in_metrics = filter(None, map(level_of, reversed(history.last)))
    level = level or (settings or {}).get("rollout-is") or next(in_metrics, None)
    facts |= _of_level(facts, level)
    if settings is not None:
        facts["gspo"] = float(settings.get("policy-loss") == "gspo")
        applied = settings.get("rollout-is-apply", "true") == "true"
        facts["sequence_weights"] = float(settings.get("rollout-is") == "sequence" and applied)
        facts["token_weights"] = float(settings.get("rollout-is") == "token" and applied)
        with suppress(KeyError, ValueError):
            facts["entropy_bonus"] = float(settings["grpo-entropy-term-weight"])
    return facts


def _of_level(facts: Facts, level: str | None) -> dict[str, float]:
    """Facts that logged weights of this level give."""
    found = {} if level is None else {"of_sequences": float(level == "sequence")}
    if level == "sequence" and "rollout_is_raw_eff_sample_size" in facts:
        found["sequence_eff_sample_size"] = facts["rollout_is_raw_eff_sample_size"]
    # Programs that log a mean weight without a deviation mean the one of tokens.
    if level in (None, "token") and "rollout_is_raw_mean" in facts and "rollout_is_raw_std" not in facts:
        found["ratio_mean"] = facts["rollout_is_raw_mean"]
    return found


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


def _trends(tracks: Mapping[str, Track]) -> dict[str, float]:
    """Changes of k3, reward, effective sample size and gradient norm, each if it has three windows of steps.

    The present level is the median of the last ``WINDOW`` steps. Earlier levels are medians of up to ten equal
    stretches of the steps before. ``drift_since`` is the step from which k3 stays above twice its lowest level;
    ``reward_fall`` is in standard deviations of the reward's noise.
    """
    known = {name: track.values for name, track in tracks.items() if len(track.values) >= 3 * WINDOW}
    now = {name: median(values[-WINDOW:]) for name, values in known.items()}
    levels = {name: _levels(values[:-WINDOW]) for name, values in known.items()}
    found: dict[str, float] = {}
    if "k3_kl" in known:
        low = max(min(levels["k3_kl"]), LEAST_K3)
        since = _since(tracks["k3_kl"], BEGUN * low)
        found |= {"k3_growth": now["k3_kl"] / low, "k3_low": low, "drift_since": since}
    if "reward" in known:
        best = max(levels["reward"])
        found |= {"reward_fall": (best - now["reward"]) / _noise(known["reward"]), "reward_best": best}
    if "rollout_is_eff_sample_size" in known:
        best = max(levels["rollout_is_eff_sample_size"])
        found |= {"ess_fall": best - now["rollout_is_eff_sample_size"], "ess_best": best}
    if "grad_norm" in known and min(levels["grad_norm"]) > 0:
        found["grad_norm_growth"] = now["grad_norm"] / min(levels["grad_norm"])
    return found


def _signal(rewards: Track, nonzero: Track) -> dict[str, float]:
    """How many of the last steps had no advantage at all, and their reward against the best one before them.

    From the mean reward of each step, and the share of its responses that have an advantage. The present is at most
    ``WINDOW`` steps, and half of the run. ``reward_peak`` is the highest mean of as many steps in a row before it.
    Nothing for a run of less than six such steps.
    """
    shares = dict(zip(nonzero.steps, nonzero.values, strict=True))
    steps = [(reward, shares[at]) for at, reward in zip(rewards.steps, rewards.values, strict=True) if at in shares]
    width = min(WINDOW, len(steps) // 2)
    if width < _FEWEST:
        return {}
    values = [reward for reward, _ in steps]
    begins = range(len(values) - 2 * width + 1)
    return {
        "silent_share": fmean(share == 0 for _, share in steps[-width:]),
        "reward_now": fmean(values[-width:]),
        "reward_peak": max(fmean(values[begin : begin + width]) for begin in begins),
    }


def _levels(values: Sequence[float]) -> list[float]:
    number = min(_STRETCHES, len(values) // WINDOW)
    cuts = [len(values) * index // number for index in range(number + 1)]
    return [median(values[begin:end]) for begin, end in pairwise(cuts)]


def _since(track: Track, level: float) -> float:
    """The step after the last window whose median is at most ``level``."""
    for end in range(len(track.values), WINDOW - 1, -1):
        if median(track.values[end - WINDOW : end]) <= level:
            return track.steps[min(end, len(track.steps) - 1)]
    return track.steps[0]


def _noise(values: Sequence[float]) -> float:
    """Standard deviation of the noise between steps; at least a thousandth of the range."""
    distances = median(abs(after - before) for before, after in pairwise(values))
    return max(_DEVIATION * distances, 1e-3 * (max(values) - min(values)), 1e-12)
