"""The table of docs/study.md, from the outcomes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.study.results import Outcome, reference_of, verdict
from benchmarks.study.settings import CORRECTIONS, MISMATCHES, NONE, UNCORRECTED, WEIGHTED, Correction, Mismatch

END = "<!-- end of the table -->"
_VERDICTS = ("collapsed", "degraded", "sound")


def begin_of(name: str) -> str:
    """The line before the table of some runs."""
    return f"<!-- the table of {name}.json: python -m benchmarks.study writes it -->"


def put_table(outcomes: Sequence[Outcome], page: Path, name: str) -> None:
    """Write the table of some runs into a page, in place of the old one.

    Raises:
        ValueError: the page has no place for it.
    """
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(f"{begin_of(name)}\n")
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} lacks the lines {begin_of(name)} and {END} around the table: add them")
    page.write_text(f"{before}{begin}\n{table(outcomes)}\n{end}{after}", encoding="utf-8")


def table(outcomes: Sequence[Outcome]) -> str:
    """The table in Markdown: a line for each kind of run, with the smallest and the largest value of its seeds."""
    head = (
        "| mismatch | correction | reward of the last weights | | reward of the samples | KL | ESS | gradient norm "
        "| entropy |\n|---|---|---|---|---|---|---|---|---|"
    )
    made = {(outcome.mismatch, outcome.correction) for outcome in outcomes}
    every = itertools.product((NONE, *MISMATCHES), (UNCORRECTED, *CORRECTIONS, *WEIGHTED))
    kinds = [(kind, how) for kind, how in every if (kind.name, how.name) in made]
    reference = reference_of(outcomes)
    lines = [_line(kind, how, outcomes, reference) for kind, how in kinds]
    seconds = sum(outcome.seconds for outcome in outcomes)
    time = (
        f"{len(outcomes)} runs, {seconds:.0f} seconds of the processor together, {seconds / len(outcomes):.0f} each: "
        f"two at a time that is {seconds / 120:.0f} minutes, where nothing else runs on the two cores."
    )
    return "\n".join([head, *lines, "", time, ""])


def _line(kind: Mismatch, how: Correction, outcomes: Sequence[Outcome], reference: float) -> str:
    own = [found for found in outcomes if (found.mismatch, found.correction) == (kind.name, how.name)]
    counts = Counter(verdict(found, reference) for found in own)
    said = ", ".join(f"{counts[word]} {word}" for word in _VERDICTS if counts[word])
    means = [_spread([found.mean(measure) for found in own]) for measure in ("kl", "ess", "grad_norm")]
    sampled, entropy = (_spread([found.at_the_end(measure) for found in own]) for measure in ("sampled", "entropy"))
    cells = [kind.title, how.title, _spread([found.final for found in own]), said, sampled, *means, entropy]
    return f"| {' | '.join(cells)} |"


def _spread(values: Sequence[float]) -> str:
    if len(values) == 1:
        return _shown(values[0])
    return f"{_shown(fmean(values))} ({_shown(min(values))} to {_shown(max(values))})"


def _shown(value: float) -> str:
    shown = f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}"
    return "0.00" if shown == "-0.00" else shown.replace("-", "−")
