"""Measurements of finished runs, small enough to keep: one line a run in ``docs/study.json``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from benchmarks.study.design import APART_BY, COLLAPSE_SHARE, DEGRADED_BY, LATE_FILE, POLICY_FILE, WINDOW, Run
from benchmarks.study.settings import NONE

Row = Mapping[str, float]
# Measures of the curves, with their names in a run's metrics; ``ess`` is computed.
METRIC_OF = {
    "sampled": "reward/mean",
    "kl": "rollout_corr/kl",
    "k3": "rollout_corr/k3_kl",
    "rejected": "rollout_corr/rollout_rs_masked_fraction",
    "length": "rollout/response_length",
    "grad_norm": "grad_norm",
    "entropy": "policy/entropy",
}
MEASURES = (*METRIC_OF, "ess")
# Further measures of runs with late responses. ``expected_…`` and ``batch_time`` are the engine's, see ``LateEngine``.
LATE_METRIC_OF = {
    "inclusion": "selection/inclusion",
    "inclusion_longest": "selection/inclusion_longest",
    "inclusion_shortest": "selection/inclusion_shortest",
    "prompts_without": "selection/prompts_without",
    "inclusion_prompt_std": "selection/inclusion_prompt_std",
    "age": "selection/staleness_mean",
    "expected_longest": "expected/longest",
    "expected_shortest": "expected/shortest",
    "batch_time": "batch_time",
}
_DIGITS = 4


@dataclass(frozen=True)
class Outcome:
    """The measurements of one run.

    Attributes:
        setting: name of its setting.
        mismatch: name of the engine's mismatch.
        correction: name of the trainer's correction.
        seed: the run's seed.
        flags: the launcher's flags.
        commit: the commit whose code made it.
        seconds: processor time, user's and system's, of the run and all its processes.
        error: the error that ended it before its last step, or None.
        policy: (step, reward of the trainer's policy), and of the last weights.
        right: (step, share of the policy's answers that are whole and right) of the same steps; empty in older runs.
        curves: for each name of ``MEASURES`` the mean of each ``WINDOW`` steps; None without a finite value. Runs of
            the first edition lack some measures; runs with late responses have those of ``LATE_METRIC_OF`` too.
        largest_kl: the largest KL of a step, or None without a finite value.
        skipped_steps: number of steps that were not made; None in older runs, where it was not counted.
    """

    setting: str
    mismatch: str
    correction: str
    seed: int
    flags: str
    commit: str
    seconds: float
    error: str | None
    policy: list[tuple[int, float]]
    curves: dict[str, list[float | None]] = field(repr=False)
    largest_kl: float | None = None
    right: list[tuple[int, float]] = field(default_factory=list)
    skipped_steps: int | None = None

    @property
    def key(self) -> tuple[str, str, str, int]:
        """The key of its run."""
        return self.setting, self.mismatch, self.correction, self.seed

    @property
    def final(self) -> float:
        """Reward of the last weights."""
        return self.policy[-1][1]

    @property
    def best(self) -> float:
        """Largest reward of all measured weights."""
        return max(reward for _, reward in self.policy)

    @property
    def right_at_the_end(self) -> float:
        """Share of whole and right answers of the last weights; NaN if it was not measured."""
        return self.right[-1][1] if self.right else math.nan

    @property
    def over_the_run(self) -> float:
        """Mean reward over the steps, on straight lines between the measurements; up to the error that ended it."""
        areas = [(to - since) * (begin + end) / 2 for (since, begin), (to, end) in pairwise(self.policy)]
        return sum(areas) / self.policy[-1][0] if areas else self.final

    def mean(self, measure: str) -> float:
        """Mean over the whole run; NaN without a finite value."""
        finite = [value for value in self.curves.get(measure, ()) if value is not None]
        return fmean(finite) if finite else math.nan

    def at_the_end(self, measure: str) -> float:
        """Mean of the last window; NaN without a finite value."""
        *_, last = self.curves.get(measure) or [None]
        return math.nan if last is None else last


def verdict(outcome: Outcome, reference: float) -> str:
    """``collapsed``, ``degraded`` or ``sound``, by the bounds of ``settings``.

    Args:
        outcome: the run's outcome.
        reference: mean final reward of the runs without mismatch.
    """
    if outcome.error is not None or outcome.final < COLLAPSE_SHARE * outcome.best:
        return "collapsed"
    return "degraded" if outcome.final < reference - DEGRADED_BY else "sound"


def reference_of(outcomes: Iterable[Outcome]) -> float:
    """The mean final reward of the runs without mismatch; NaN if there are none."""
    finals = [outcome.final for outcome in outcomes if outcome.mismatch == NONE.name]
    return fmean(finals) if finals else math.nan


def apart(values: Sequence[float], others: Sequence[float]) -> int:
    """1 if the smallest of ``values`` is above the largest of ``others`` by ``APART_BY``, -1 the other way, else 0."""
    above = min(values) - max(others)
    below = min(others) - max(values)
    return int(above >= APART_BY) - int(below >= APART_BY)


def write(outcomes: Iterable[Outcome], path: Path) -> None:
    """Write outcomes as JSON, a line a run."""
    in_order = sorted(outcomes, key=lambda outcome: outcome.key)
    lines = ",\n".join(json.dumps(asdict(outcome), ensure_ascii=False) for outcome in in_order)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def read(path: Path) -> list[Outcome]:
    """The outcomes in a file of ``write``; none if there is no file."""
    rows = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    outcomes = []
    for row in rows:
        policy = [(int(step), reward) for step, reward in row["policy"]]
        right = [(int(step), share) for step, share in row.get("right", [])]
        outcomes.append(Outcome(**row | {"policy": policy, "right": right}))
    return outcomes


def measured(run: Run, folder: Path, commit: str, seconds: float, error: str | None) -> Outcome | None:
    """The outcome of a run from the files in its folder; None if it ended before its first step."""
    rows = _rows(folder / "metrics.jsonl")
    # A step that is left out has no gradient norm. If a batch's steps are left out, its inclusion rate is 0 because
    # nothing trained, and says nothing about the choice of responses.
    steps = [row for row in rows if "grad_norm" in row]
    measurements = _policy_rows(folder, rows)
    if not steps or not measurements:
        return None
    policy = [(int(row["step"]), _short(row["reward"])) for row in measurements]
    right = [(int(row["step"]), _short(row["right"])) for row in measurements if "right" in row]
    measures: tuple[str, ...] = MEASURES
    expected = {row["step"]: row for row in _rows(folder / LATE_FILE)}
    if expected:
        measures += tuple(LATE_METRIC_OF)
        # The weights of step n sample the batch whose first step is n + 1.
        steps = [{**expected.get(row["step"] - 1, {}), **row} for row in steps]
    curves = {measure: _curve(steps, measure) for measure in measures}
    kls = [value for row in steps if math.isfinite(value := value_of(row, "kl"))]
    largest = _short(max(kls)) if kls else None
    skipped = [int(row["skipped_steps"]) for row in rows if "skipped_steps" in row]
    return Outcome(
        *run.key,
        flags=" ".join(run.flags),
        commit=commit,
        seconds=seconds,
        error=error,
        policy=policy,
        curves=curves,
        largest_kl=largest,
        right=right,
        skipped_steps=skipped[-1] if skipped else None,
    )


def _policy_rows(folder: Path, rows: Iterable[Row]) -> list[Row]:
    """The study engine's measurements of the policy, one a window; for another engine all its evaluations."""
    if not (folder / POLICY_FILE).is_file():
        return [{"step": row["step"], "reward": row["eval/reward"]} for row in rows if "eval/reward" in row]
    measurements = _rows(folder / POLICY_FILE)
    chosen: list[Row] = []
    for row in measurements:
        if chosen and row["step"] == chosen[-1]["step"]:
            continue
        is_last = row["step"] == measurements[-1]["step"]
        if not chosen or is_last or row["step"] >= chosen[-1]["step"] + WINDOW:
            chosen.append(row)
    return chosen


def _rows(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def _curve(rows: Sequence[Row], measure: str) -> list[float | None]:
    windows = [rows[begin : begin + WINDOW] for begin in range(0, len(rows), WINDOW)]
    finite = [[value for row in window if math.isfinite(value := value_of(row, measure))] for window in windows]
    return [_short(fmean(values)) if values else None for values in finite]


def value_of(row: Row, measure: str) -> float:
    """Return a measure of one step from its row of metrics; NaN if the row lacks it."""
    metric = METRIC_OF.get(measure) or LATE_METRIC_OF.get(measure)
    if metric is not None:
        return row.get(metric, math.nan)
    kl, k3, chi2 = (row.get(f"rollout_corr/{name}", math.nan) for name in ("kl", "k3_kl", "chi2_token"))
    # (mean ρ)² / mean ρ² of the tokens, before any bound; k3 is ρ − 1 − log ρ, so the mean of ρ is 1 + k3 − kl.
    return (1 + k3 - kl) ** 2 / (1 + chi2)


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
