"""Facts of a run from its metrics: the present level, changes over the run, and single batches beyond a limit.

All facts have one value for each rollout batch. A program that makes several optimizer steps of a batch writes a row
for each, which repeats the batch's rewards.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import fmean, median

from megatron_rc.attribution.verdict import attribution_of
from megatron_rc.doctor.facts import Facts, level_of, of_tokens

WINDOW = 10  # the last batches, whose medians are the present
GROWING = ("response_length", "chi2_seq")  # numbers whose growth is a fact
MIN_BATCHES = 9  # the fewest batches for a growth
# Numbers whose course over the run is a fact.
OVER_THE_RUN = (*GROWING, "entropy", "k3_kl", "rollout_is_eff_sample_size", "grad_norm", "reward", "nonzero_advantages")
LEAST_K3 = 1e-6  # nats; a smaller k3 counts as this, so that growth from 0 is no drift
BEGUN = 2.0  # a drift begins when k3 stays above its lowest level times this
K3 = 2e-3  # nats; a smaller distance is rounding to bfloat16
MOST_STEPS = 16  # rows of one batch that are kept of the last batches
_ROWS_OF_ONE_BATCH = ("reward", "response_length")  # equal in all rows of a batch
_STRETCHES = 10
_FEWEST = 3  # batches that a mean reward is taken over
_DEVIATION = 1.048  # standard deviation of normal noise over the median distance of two values: 1 / (0.6745 √2)
_STALENESS = re.compile(r"staleness_(\d+)_kl")


@dataclass(frozen=True)
class Limit:
    """Limit of a number in a single batch.

    A batch is beyond it if the number is above ``limit`` and above ``jump`` times the run's median, or above ``gross``.
    """

    limit: float
    gross: float
    jump: float = 5.0


DISTANCES = {
    "k3_kl": Limit(limit=K3, gross=0.1),
    "kl": Limit(limit=0.1, gross=1.0),
    "probs_diff_mean": Limit(limit=0.01, gross=0.2),
    "mult_prob_error": Limit(limit=1.05, gross=2.0, jump=1.05),
    "abs_log_ratio": Limit(limit=0.1, gross=1.0),
}
# Shares of tokens or sequences, which a correction rejects, gives weight 0, or bounds.
_SHARE = Limit(limit=0.5, gross=0.9, jump=2.0)
LIMITS = DISTANCES | {
    "rollout_is_veto_fraction": Limit(limit=0.1, gross=0.5),
    "rollout_rs_masked_fraction": _SHARE,
    "rollout_is_masked_fraction": _SHARE,
    "rollout_is_oob_ratio": _SHARE,
    "rollout_is_ratio_fraction_high": _SHARE,
}
_KEPT = tuple(dict.fromkeys((*OVER_THE_RUN, *LIMITS)))


class History:
    """The last rows of a run's metrics, under our names, and the numbers that the facts need of every row.

    It keeps 8 bytes for each row and each of these numbers, and whole rows for the last ``WINDOW`` batches.
    """

    def __init__(self, rows: Iterable[Mapping[str, float]] = ()) -> None:
        self.last: deque[Mapping[str, float]] = deque(maxlen=WINDOW * MOST_STEPS)
        self.steps = array("d")
        self.columns = {name: array("d") for name in _KEPT}
        self.known: set[str] = set()  # the columns with a number
        # An attribution is made in few steps of a run; the newest counts.
        self.attribution: dict[str, float] = {}
        for row in rows:
            self.add(row)

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.steps)

    def add(self, row: Mapping[str, float]) -> None:
        """Add the row of the next optimizer step."""
        row = {**of_tokens(row), **row}
        self.steps.append(row.get("step", len(self.steps) + 1))
        self.last.append(row)
        self.known |= row.keys() & self.columns.keys()
        self.attribution = attribution_of(row) or self.attribution
        for name, column in self.columns.items():
            column.append(row.get(name, math.nan))

    def batches(self) -> list[range]:
        """The rows of each rollout batch.

        A batch ends where its reward or its response length changes; if both are unknown, where k3 changes. Two
        neighbours may have equal values, so a longer run of equal rows is cut into batches of the usual number of rows.
        """
        names = [name for name in _ROWS_OF_ONE_BATCH if not all(map(math.isnan, self.columns[name]))]
        keys = zip(*(self.columns[name] for name in names or ["k3_kl"]), strict=True)
        # NaN is not equal to itself; its text is.
        run_lengths = [len(list(rows)) for _, rows in groupby(map(repr, keys))]
        usual_rows = 1
        num_usual = 1
        if len(run_lengths) > 1:
            # The last batch may be incomplete.
            ((usual_rows, num_usual),) = Counter(run_lengths[:-1]).most_common(1)
        # One long run of equal numbers is no evidence: a reward may stay where it is.
        if num_usual < 2 or 2 * num_usual < len(run_lengths) - 1 or usual_rows > MOST_STEPS:
            usual_rows = 1

        batches = []
        begin = 0
        for run_length in run_lengths:
            end = begin + run_length
            for first in range(begin, end, usual_rows):
                batches.append(range(first, min(first + usual_rows, end)))
            begin = end
        return batches


@dataclass(frozen=True)
class _Course:
    """One number over a run, in the batches that have it.

    Batches are told apart by their index: a run that is resumed from an earlier checkpoint repeats steps.
    """

    batches: list[int]  # index of each batch in the run
    steps: list[float]  # at which each batch begins
    values: list[float]  # mean over each batch's rows


def _courses(history: History, batches: Sequence[range]) -> dict[str, _Course]:
    """The course of each number; batches without it are left out."""
    courses = {}
    for name, column in history.columns.items():
        course = _Course(batches=[], steps=[], values=[])
        for index, batch in enumerate(batches if name in history.known else ()):
            numbers = [column[row] for row in batch if not math.isnan(column[row])]
            if numbers:
                course.batches.append(index)
                course.steps.append(history.steps[batch.start])
                course.values.append(fmean(numbers))
        courses[name] = course
    return courses


def facts_of_series(history: History, settings: Mapping[str, str] | None = None, level: str | None = None) -> Facts:
    """Medians of the last batches of at least one, changes over the run, and batches beyond a limit.

    ``settings`` are the run's flags without leading dashes; None if they are unknown. ``level`` is the level of the
    weights, or ``none`` without weights. Default: the level in the settings, else the one that the metrics tell.
    """
    batches = history.batches()
    courses = _courses(history, batches)
    facts = Facts(_present(history, batches) | history.attribution)
    for name in GROWING:
        values = courses[name].values
        third = len(values) // 3
        if len(values) >= MIN_BATCHES and sum(values[:third]) > 0:
            facts[f"{name}_growth"] = sum(values[-third:]) / sum(values[:third])
    facts |= _staleness(facts) | _entropy(courses["entropy"].values) | _trends(courses)
    facts |= _signal(courses["reward"], courses["nonzero_advantages"]) | _beyond(courses)
    in_metrics = filter(None, map(level_of, reversed(history.last)))
    level = level or (settings or {}).get("rollout-is") or next(in_metrics, None)
    if level is not None:
        facts["of_sequences"] = float(level == "sequence")
    if level == "sequence" and "rollout_is_raw_eff_sample_size" in facts:
        facts["sequence_eff_sample_size"] = facts["rollout_is_raw_eff_sample_size"]
    return facts if settings is None else Facts(facts | _of_settings(settings))


def _present(history: History, batches: Sequence[range]) -> dict[str, float]:
    """Median of each number over the last batches; a batch counts by the mean of its rows."""
    first_kept = history.num_rows - len(history.last)
    by_batch: dict[str, list[float]] = {}
    for batch in batches[-WINDOW:]:
        rows = [history.last[row - first_kept] for row in batch if row >= first_kept]
        for name in {name for row in rows for name in row}:
            by_batch.setdefault(name, []).append(fmean(row[name] for row in rows if name in row))
    return {name: median(values) for name, values in by_batch.items()}


def _of_settings(settings: Mapping[str, str]) -> dict[str, float]:
    """Facts that the flags of a run tell."""
    is_applied = settings.get("rollout-is-apply", "true") == "true"
    facts = {
        "gspo": float(settings.get("policy-loss") == "gspo"),
        "sequence_weights": float(settings.get("rollout-is") == "sequence" and is_applied),
        "token_weights": float(settings.get("rollout-is") == "token" and is_applied),
    }
    with suppress(KeyError, ValueError):
        facts["entropy_bonus"] = float(settings["grpo-entropy-term-weight"])
    with suppress(KeyError, ValueError):
        facts["upper_bound"] = float(settings["rollout-is-threshold"].rpartition("_")[2])
    return facts


def _beyond(courses: Mapping[str, _Course]) -> dict[str, float]:
    """Batches with a number beyond its limit: how many, of the last ones, the first and the last step, and the numbers.

    Nothing if no number with a limit is known.
    """
    number = max(len(courses[name].values) for name in LIMITS)
    if not number:
        return {}
    step_of_batch: dict[int, float] = {}  # for each batch beyond a limit
    facts: dict[str, float] = {}
    for name, limit in LIMITS.items():
        course = courses[name]
        if not course.values:
            continue
        sizes = list(map(abs, course.values))
        level = max(limit.limit, limit.jump * median(sizes))
        for batch, step, size in zip(course.batches, course.steps, sizes, strict=True):
            if size > min(level, limit.gross):
                step_of_batch[batch] = step
                facts[f"beyond_{name}"] = max(sizes)
    recent = sorted({batch for name in LIMITS for batch in courses[name].batches})[-WINDOW:]
    facts |= {
        "beyond_count": float(len(step_of_batch)),
        "beyond_share": len(step_of_batch) / number,
        "beyond_recent": float(sum(batch in step_of_batch for batch in recent)),
        "beyond_last": float(recent[-1] in step_of_batch),
    }
    if step_of_batch:
        facts["beyond_first_step"] = step_of_batch[min(step_of_batch)]
        facts["beyond_last_step"] = step_of_batch[max(step_of_batch)]
    return facts


def _entropy(values: Sequence[float]) -> dict[str, float]:
    """Median entropy of the last batches over the lowest median of earlier batches."""
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
    fresh = by_age[min(by_age)]
    stale = by_age[max(by_age)]
    return {"staleness_kl_growth": abs(stale) / max(abs(fresh), 1e-5)}


def _trends(courses: Mapping[str, _Course]) -> dict[str, float]:
    """Changes of k3, reward, effective sample size and gradient norm, each if it has three windows of batches.

    The present level is the median of the last ``WINDOW`` batches. Earlier levels are medians of up to ten equal
    stretches of the batches before. ``drift_since`` is the step from which k3 stays above twice its lowest level;
    ``reward_fall`` is in standard deviations of the reward's noise.
    """
    values_of = {name: course.values for name, course in courses.items() if len(course.values) >= 3 * WINDOW}
    now = {name: median(values[-WINDOW:]) for name, values in values_of.items()}
    levels = {name: _levels(values[:-WINDOW]) for name, values in values_of.items()}
    facts: dict[str, float] = {}
    if "k3_kl" in values_of:
        low = max(min(levels["k3_kl"]), LEAST_K3)
        since = _since(courses["k3_kl"], BEGUN * low)
        facts |= {"k3_growth": now["k3_kl"] / low, "k3_low": low, "drift_since": since}
    if "reward" in values_of:
        best = max(levels["reward"])
        facts |= {"reward_fall": (best - now["reward"]) / _noise(values_of["reward"]), "reward_best": best}
    if "rollout_is_eff_sample_size" in values_of:
        best = max(levels["rollout_is_eff_sample_size"])
        facts |= {"ess_fall": best - now["rollout_is_eff_sample_size"], "ess_best": best}
    if "grad_norm" in values_of and min(levels["grad_norm"]) > 0:
        facts["grad_norm_growth"] = now["grad_norm"] / min(levels["grad_norm"])
    return facts


def _signal(rewards: _Course, nonzero: _Course) -> dict[str, float]:
    """How many of the last batches had no advantage at all, and their reward against the best one before them.

    From the mean reward of each batch, and the share of its responses that have an advantage. The present is at most
    ``WINDOW`` batches, and half of the run. ``reward_peak`` is the highest mean of as many batches in a row before it.
    Nothing for a run of less than six such batches.
    """
    share_of_batch = dict(zip(nonzero.batches, nonzero.values, strict=True))
    values = []
    shares = []
    for batch, reward in zip(rewards.batches, rewards.values, strict=True):
        if batch in share_of_batch:
            values.append(reward)
            shares.append(share_of_batch[batch])
    width = min(WINDOW, len(values) // 2)
    if width < _FEWEST:
        return {}
    begins = range(len(values) - 2 * width + 1)
    return {
        "silent_share": fmean(share == 0 for share in shares[-width:]),
        "reward_now": fmean(values[-width:]),
        "reward_peak": max(fmean(values[begin : begin + width]) for begin in begins),
    }


def _levels(values: Sequence[float]) -> list[float]:
    number = min(_STRETCHES, len(values) // WINDOW)
    cuts = [len(values) * index // number for index in range(number + 1)]
    return [median(values[begin:end]) for begin, end in pairwise(cuts)]


def _since(course: _Course, level: float) -> float:
    """The step after the last window whose median is at most ``level``."""
    for end in range(len(course.values), WINDOW - 1, -1):
        if median(course.values[end - WINDOW : end]) <= level:
            return course.steps[min(end, len(course.steps) - 1)]
    return course.steps[0]


def _noise(values: Sequence[float]) -> float:
    """Standard deviation of the noise between batches; at least a thousandth of the range."""
    distances = median(abs(after - before) for before, after in pairwise(values))
    return max(_DEVIATION * distances, 1e-3 * (max(values) - min(values)), 1e-12)
