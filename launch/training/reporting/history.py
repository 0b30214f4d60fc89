"""A run's history from its ``metrics.jsonl``: series of its metrics, and the doctor's verdicts with their steps.

Of a file with many rows only every k-th row is parsed, so that 100,000 rows cost seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from megatron_rc.doctor.facts import Facts
from megatron_rc.doctor.rules import Verdict, judge
from megatron_rc.doctor.series import WINDOW, History, facts_of_series
from megatron_rc.doctor.tables import own_row
from megatron_rc.launch.training.reporting.metrics_file import read_thinned
from megatron_rc.launch.training.reporting.series import Series, usual_names

MOST_ROWS = 10_000
# The doctor judges after every tenth row of a short run; then the number of rows grows by this factor between two
# judgements, because each one looks at all rows so far.
_GROWTH = 1.1


@dataclass
class Finding:
    """A verdict of the doctor, and the steps at which it held.

    Attributes:
        verdict: the rule and its sentence, with the numbers of the last step at which it held.
        since: the first judged step at which it held without a break.
        until: the judged step at which it held no longer; None: it holds at the end.
    """

    verdict: Verdict
    since: int
    until: int | None = None


@dataclass
class RunHistory:
    """A run's metrics under their usual names.

    Attributes:
        series: series by the metric's name.
        last_rows: rows of the last optimizer steps, the newest last.
        num_steps: the newest optimizer step; 0 without any.
        thinning: only each row of so many was read.
        findings: the doctor's verdicts, in the order of their first steps.
        facts: the doctor's numbers at the end.
    """

    series: dict[str, Series] = field(default_factory=dict)
    last_rows: deque[Mapping[str, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    num_steps: int = 0
    thinning: int = 1
    findings: list[Finding] = field(default_factory=list)
    facts: Facts = field(default_factory=Facts)


def read_history(path: Path, settings: Mapping[str, str], prefix: str) -> RunHistory:
    """Read a run's history.

    Args:
        path: the run's ``metrics.jsonl``; a missing file is a run without steps.
        settings: the run's flags without leading dashes, for the doctor.
        prefix: prefix of the correction's metrics in the file.

    Raises:
        OSError: the file cannot be read.
    """
    history = RunHistory()
    doctor = _Doctor(settings)
    history.thinning, rows = read_thinned(path, MOST_ROWS, last=2 * WINDOW)  # half of them may be evaluations
    for row in rows:
        metrics = usual_names(row, prefix)
        step = int(metrics["step"])
        for name, value in metrics.items():
            history.series.setdefault(name, Series()).add(step, value)
        # Evaluations have rows of their own, without a reward of the training.
        if "reward/mean" in metrics:
            history.num_steps = step
            history.last_rows.append(metrics)
            doctor.add(step, metrics)
    doctor.judge(history.num_steps)
    history.findings = doctor.findings
    history.facts = doctor.facts
    return history


class _Doctor:
    """Judges a run while its rows are read, and remembers when each verdict came and went."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        self.settings = settings
        self.rows = History()
        self.facts = Facts()
        self.findings: list[Finding] = []
        self._next_judgement = WINDOW

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the row of a step, and judge the rows so far if it is time."""
        numbers: dict[str, float] = {"step": step}
        for name, value in metrics.items():
            doctors_name = _doctors_name(name)
            if doctors_name is not None and math.isfinite(value):
                numbers[doctors_name] = value
        self.rows.add(numbers)
        if self.rows.num_rows >= self._next_judgement:
            self.judge(step)
            self._next_judgement = max(self.rows.num_rows + WINDOW, int(self.rows.num_rows * _GROWTH))

    def judge(self, step: int) -> None:
        """Judge the rows so far, the last of which is of this step."""
        if not self.rows.num_rows:
            return
        self.facts = facts_of_series(self.rows, self.settings)
        verdicts = {verdict.rule.name: verdict for verdict in judge(self.facts)}
        for finding in self.findings:
            if finding.until is None:
                still_holds = verdicts.pop(finding.verdict.rule.name, None)
                if still_holds is None:
                    finding.until = step
                else:
                    finding.verdict = still_holds
        self.findings += [Finding(verdict, since=step) for verdict in verdicts.values()]


@cache
def _doctors_name(metric: str) -> str | None:
    """The doctor's name of a metric; None: no rule looks at it."""
    return next(iter(own_row({metric: 0.0}, "")), None)
