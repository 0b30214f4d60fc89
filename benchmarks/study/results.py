"""Measurements of finished runs, small enough to keep: one line a run in ``docs/study.json``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.study.queue import StudyError, finished
from benchmarks.study.settings import COLLAPSE_SHARE, DEGRADED_BY, NONE, POLICY_FILE, Run

Row = Mapping[str, float]
# Optimizer steps of one point of a curve.
WINDOW = 10
MEASURES = ("sampled", "kl", "ess", "grad_norm", "entropy")
_NAMES = {"sampled": "reward/mean", "grad_norm": "grad_norm", "entropy": "policy/entropy"}
_DIGITS = 4


@dataclass(frozen=True)
class Outcome:
    """The measurements of one run.

    Attributes:
        mismatch: name of the engine's mismatch.
        correction: name of the trainer's correction.
        seed: the run's seed.
        seconds: processor time.
        error: the error that ended it before its last step, or None.
        policy: (step, reward of the trainer's policy), for steps that ``WINDOW`` divides or that were evaluated.
        curves: for each name of ``MEASURES`` the mean of each ``WINDOW`` steps; None without a finite value.
    """

    mismatch: str
    correction: str
    seed: int
    seconds: float
    error: str | None
    policy: list[tuple[int, float]]
    curves: dict[str, list[float | None]]

    @property
    def final(self) -> float:
        """Reward of the last weights."""
        return self.policy[-1][1]

    @property
    def best(self) -> float:
        """Largest reward of all measured weights."""
        return max(reward for _, reward in self.policy)

    def mean(self, measure: str) -> float:
        """Mean over the whole run; NaN without a finite value."""
        finite = [value for value in self.curves[measure] if value is not None]
        return fmean(finite) if finite else math.nan

    def at_the_end(self, measure: str) -> float:
        """Mean of the last window; NaN without a finite value."""
        last = self.curves[measure][-1]
        return math.nan if last is None else last


def gather(runs: Sequence[Run], folder: Path) -> list[Outcome]:
    """The outcomes of finished runs.

    Raises:
        StudyError: a run is not finished, or ended before its first step.
    """
    return [_outcome(run, folder) for run in runs]


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
    """The mean final reward of the runs without mismatch."""
    return fmean(outcome.final for outcome in outcomes if outcome.mismatch == NONE.name)


def write(outcomes: Iterable[Outcome], path: Path) -> None:
    """Write outcomes as JSON, a line a run."""
    lines = ",\n".join(json.dumps(asdict(outcome), ensure_ascii=False) for outcome in outcomes)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def read(path: Path) -> list[Outcome]:
    """The outcomes in a file of ``write``."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    return [Outcome(**row | {"policy": [(int(step), reward) for step, reward in row["policy"]]}) for row in rows]


def _outcome(run: Run, folder: Path) -> Outcome:
    done = finished(run, folder)
    if done is None:
        raise StudyError(f"{folder / run.name} is not finished: start the study again")
    rows = _rows(folder / run.name / "metrics.jsonl")
    steps = [row for row in rows if "grad_norm" in row]
    if not steps:
        raise StudyError(f"{folder / run.name} ended before its first step ({done.error}): repair that and remove it")
    return Outcome(
        run.mismatch.name,
        run.correction.name,
        run.seed,
        done.seconds,
        done.error,
        _policy(folder / run.name, rows),
        {measure: _curve(steps, measure) for measure in MEASURES},
    )


def _policy(folder: Path, rows: Iterable[Row]) -> list[tuple[int, float]]:
    """The study engine's measurements of the policy; for another engine its greedy evaluations."""
    if not (folder / POLICY_FILE).is_file():
        return [(int(row["step"]), _short(row["eval/reward"])) for row in rows if "eval/reward" in row]
    measured = ((int(row["step"]), _short(row["reward"])) for row in _rows(folder / POLICY_FILE))
    return [(step, reward) for step, reward in measured if step % WINDOW == 0]


def _rows(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _curve(rows: Sequence[Row], measure: str) -> list[float | None]:
    windows = [rows[begin : begin + WINDOW] for begin in range(0, len(rows), WINDOW)]
    finite = [[value for row in window if math.isfinite(value := _value(row, measure))] for window in windows]
    return [_short(fmean(values)) if values else None for values in finite]


def _value(row: Row, measure: str) -> float:
    if measure in _NAMES:
        return row.get(_NAMES[measure], math.nan)
    kl, k3, chi2 = (row.get(f"rollout_corr/{name}", math.nan) for name in ("kl", "k3_kl", "chi2_token"))
    if measure == "kl":
        return kl
    # (mean ρ)² / mean ρ² of the tokens, before any bound; k3 is ρ − 1 − log ρ, so the mean of ρ is 1 + k3 − kl.
    return (1 + k3 - kl) ** 2 / (1 + chi2)


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
