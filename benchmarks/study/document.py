"""The table of docs/study.md, from the outcomes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.study.results import Outcome, reference_of, verdict
from benchmarks.study.settings import CORRECTIONS, MISMATCHES, NONE, UNCORRECTED, Correction, Mismatch

BEGIN, END = "<!-- the table: python -m benchmarks.study writes it -->", "<!-- end of the table -->"
_VERDICTS = ("collapsed", "degraded", "sound")


def put_table(outcomes: Sequence[Outcome], page: Path) -> None:
    """Write the table into a page, in the place of the one there.

    Raises:
        ValueError: the page has no place for it.
    """
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no lines {BEGIN} and {END} between which the table stands: add them")
    page.write_text(f"{before}{begin}\n{table(outcomes)}\n{end}{after}", encoding="utf-8")


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown: a line for each kind of run, with the smallest and the largest of its seeds."""
    head = (
        "| mismatch | correction | reward of the last weights | | reward of the samples | KL | ESS | gradient norm |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    kinds = [(NONE, UNCORRECTED), *((kind, how) for kind in MISMATCHES for how in (UNCORRECTED, *CORRECTIONS))]
    reference = reference_of(outcomes)
    lines = [_line(kind, how, outcomes, reference) for kind, how in kinds]
    seconds = sum(outcome.seconds for outcome in outcomes)
    time = (
        f"{len(outcomes)} runs, {seconds:.0f} seconds of the processor together, {seconds / len(outcomes):.0f} each: "
        f"two at a time on two cores that do nothing else, {seconds / 120:.0f} minutes."
    )
    return "\n".join([head, *lines, "", time, ""])


def _line(kind: Mismatch, how: Correction, outcomes: Sequence[Outcome], reference: float) -> str:
    own = [found for found in outcomes if (found.mismatch, found.correction) == (kind.name, how.name)]
    counts = Counter(verdict(found, reference) for found in own)
    said = ", ".join(f"{counts[word]} {word}" for word in _VERDICTS if counts[word])
    last = [math.nan if (value := found.curves["sampled"][-1]) is None else value for found in own]
    measured = [_spread([found.mean(measure) for found in own]) for measure in ("kl", "ess", "grad_norm")]
    cells = [kind.title, how.title, _spread([found.final for found in own]), said, _spread(last), *measured]
    return f"| {' | '.join(cells)} |"


def _spread(values: Sequence[float]) -> str:
    return f"{_shown(fmean(values))} ({_shown(min(values))} to {_shown(max(values))})"


def _shown(value: float) -> str:
    shown = f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}"
    return "0.00" if shown == "-0.00" else shown.replace("-", "−")
