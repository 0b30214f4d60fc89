"""Changes over a run: the present level against the best earlier level, and the first step of a drift."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median

LEAST_K3 = 1e-6  # nats; a smaller k3 counts as this, so that growth from 0 is no drift
BEGUN = 2.0  # a drift begins when k3 stays above its lowest level times this
_STRETCHES = 10
_FEWEST = 3  # steps that a mean reward is taken over
_DEVIATION = 1.048  # standard deviation of normal noise over the median distance of two values: 1 / (0.6745 √2)


@dataclass
class Track:
    """One number over a run: its steps in order, and its value at each."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))


def trends(tracks: Mapping[str, Track], window: int) -> dict[str, float]:
    """Changes of k3, reward, effective sample size and gradient norm, each if it has three windows of steps.

    The present level is the median of the last ``window`` steps. Earlier levels are medians of up to ten equal
    stretches of the steps before.

    Args:
        tracks: the numbers over the run, by name.
        window: number of steps of the present.

    Returns:
        ``k3_growth``: k3 over its lowest level ``k3_low``; ``drift_since``: the step from which k3 stays above twice
        that level. ``reward_fall``: fall from the best level ``reward_best``, in standard deviations of the reward's
        noise. ``ess_fall``: fall from the best level ``ess_best``. ``grad_norm_growth``: gradient norm over its
        lowest level.
    """
    known = {name: track.values for name, track in tracks.items() if len(track.values) >= 3 * window}
    now = {name: median(values[-window:]) for name, values in known.items()}
    levels = {name: _levels(values[:-window], window) for name, values in known.items()}
    found: dict[str, float] = {}
    if "k3_kl" in known:
        low = max(min(levels["k3_kl"]), LEAST_K3)
        since = _since(tracks["k3_kl"], BEGUN * low, window)
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


def signal(rewards: Track, nonzero: Track, window: int) -> dict[str, float]:
    """How many of the last steps had no advantage at all, and their reward against the best one before them.

    Args:
        rewards: the mean reward of each step.
        nonzero: the share of its responses that have an advantage.
        window: the most steps that speak for the present; at most half of the run does.

    Returns:
        ``silent_share`` of the last steps; ``reward_now``, their mean reward, and ``reward_peak``, the highest mean of
        as many steps in a row before them. Nothing for a run of less than six such steps.
    """
    shares = dict(zip(nonzero.steps, nonzero.values, strict=True))
    steps = [(reward, shares[at]) for at, reward in zip(rewards.steps, rewards.values, strict=True) if at in shares]
    width = min(window, len(steps) // 2)
    if width < _FEWEST:
        return {}
    values = [reward for reward, _ in steps]
    begins = range(len(values) - 2 * width + 1)
    return {
        "silent_share": fmean(share == 0 for _, share in steps[-width:]),
        "reward_now": fmean(values[-width:]),
        "reward_peak": max(fmean(values[begin : begin + width]) for begin in begins),
    }


def _levels(values: Sequence[float], window: int) -> list[float]:
    number = min(_STRETCHES, len(values) // window)
    cuts = [len(values) * index // number for index in range(number + 1)]
    return [median(values[begin:end]) for begin, end in pairwise(cuts)]


def _since(track: Track, level: float, window: int) -> float:
    """The step after the last window whose median is at most ``level``."""
    for end in range(len(track.values), window - 1, -1):
        if median(track.values[end - window : end]) <= level:
            return track.steps[min(end, len(track.steps) - 1)]
    return track.steps[0]


def _noise(values: Sequence[float]) -> float:
    """Standard deviation of the noise between steps; at least a thousandth of the range."""
    distances = median(abs(after - before) for before, after in pairwise(values))
    return max(_DEVIATION * distances, 1e-3 * (max(values) - min(values)), 1e-12)
