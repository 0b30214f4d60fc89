"""The tables of docs/study.md, from the outcomes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.study.comparison import MEASURED, comparisons
from benchmarks.study.results import Outcome, apart, reference_of, verdict
from benchmarks.study.settings import HARD, SEEDS, WORKING_BLOCKS, Block, Correction, Mismatch

END = "<!-- end of the table -->"
_VERDICTS = ("collapsed", "degraded", "sound")
_MEANS = {"kl": "KL", "k3": "k3", "ess": "ESS", "rejected": "rejected", "grad_norm": "gradient norm"}


def begin_of(block: Block) -> str:
    """The line before the table of a block."""
    return f"<!-- the table of {block.name}: python -m benchmarks.study writes it -->"


def put_table(outcomes: Iterable[Outcome], page: Path, block: Block) -> None:
    """Write the table of a block into a page, in place of the old one.

    Raises:
        ValueError: the page has no place for it.
    """
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(f"{begin_of(block)}\n")
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} lacks the lines {begin_of(block)} and {END} around the table: add them")
    page.write_text(f"{before}{begin}\n{table(outcomes, block)}\n{end}{after}", encoding="utf-8")


def table(outcomes: Iterable[Outcome], block: Block) -> str:
    """The table of a block in Markdown, and a sentence about its runs."""
    outcomes = list(outcomes)
    by_key = {outcome.key: outcome for outcome in outcomes}
    own = [by_key[run.key] for run in block.runs if run.key in by_key]
    if block is HARD:
        lines = _hard_lines(own, block)
    elif block in WORKING_BLOCKS:
        lines = _tested_lines(outcomes, own, block)
    else:
        lines = _lines(own, block)
    return "\n".join([*lines, "", _count(own, block), ""])


def _count(own: Sequence[Outcome], block: Block) -> str:
    """The number of runs and their time, and the runs that are missing."""
    made = {outcome.key for outcome in own}
    lacking = dict[str, list[str]]()
    for run in block.runs:
        if run.key not in made:
            lacking.setdefault(f"`{run.mismatch.name}-{run.correction.name}`", []).append(str(run.seed))
    seconds = sum(outcome.seconds for outcome in own)
    each = f", {seconds / len(own):.0f} each" if own else ""
    text = f"{len(own)} of {len(block.runs)} runs, {seconds:.0f} seconds of the processor together{each}."
    if len(own) < len(block.runs) / 2:
        return f"{text} The others are not made yet."
    names = "; ".join(f"{kind} {', '.join(seeds)}" for kind, seeds in lacking.items())
    return f"{text} Not made yet, with their seeds: {names}." if lacking else text


def _lines(own: Sequence[Outcome], block: Block) -> list[str]:
    """A line for each kind of run, with the mean, the smallest and the largest value of its seeds."""
    titles = ("mismatch", "correction", "reward of the last weights", "", "over the run", "compared", *_MEANS.values())
    reference = reference_of(own)
    lines = [f"| {' | '.join(titles)} | entropy |", "|---" * (len(titles) + 1) + "|"]
    for kind, how in block.kinds:
        found = seeds_of(own, kind, how)
        if not found:
            continue
        counts = Counter(verdict(one, reference) for one in found)
        said = ", ".join(f"{counts[word]} {word}" for word in _VERDICTS if counts[word])
        means = [_spread([one.mean(measure) for one in found]) for measure in _MEANS]
        ends = [one.final for one in found]
        runs = [one.over_the_run for one in found]
        entropy = _spread([one.at_the_end("entropy") for one in found])
        cells = [kind.title, how.title, _spread(ends), said, _spread(runs), compared(own, block, kind, how)]
        lines.append(f"| {' | '.join([*cells, *means, entropy])} |")
    return lines


def seeds_of(outcomes: Iterable[Outcome], kind: Mismatch, how: Correction) -> list[Outcome]:
    """The outcomes of a kind of run."""
    return [one for one in outcomes if (one.mismatch, one.correction) == (kind.name, how.name)]


def compared(own: Sequence[Outcome], block: Block, kind: Mismatch, how: Correction) -> str:
    """How a kind of run ended and how fast it learned, beside the kind that it is compared with.

    Empty with fewer than all seeds of the study, or if it is compared with nothing in the block.
    """
    other = next((one for at, one in block.kinds if at is kind and one.name == how.against), how)
    found = seeds_of(own, kind, how)
    others = seeds_of(own, kind, other)
    if other is how or not len(found) == len(others) == len(SEEDS):
        return ""
    at_end = apart([one.final for one in found], [one.final for one in others])
    on_way = apart([one.over_the_run for one in found], [one.over_the_run for one in others])
    words = [("", "better", "worse")[at_end], ("", "faster", "slower")[on_way]]
    return f"{', '.join(filter(None, words))} than {other.title}" if any(words) else "undecided"


def _tested_lines(outcomes: Sequence[Outcome], own: Sequence[Outcome], block: Block) -> list[str]:
    """A line for each kind of run, with each measure's mean, and its difference from no correction."""
    titles = ["mismatch", "correction"]
    for measure in MEASURED:
        titles += [measure, "difference (95 %)", "verdict"]
    titles += ["k3", "ESS"]
    compared_kinds = comparisons(outcomes, WORKING_BLOCKS)
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for mismatch, correction in block.kinds:
        of_kind = seeds_of(own, mismatch, correction)
        if not of_kind:
            continue
        cells = [mismatch.title, correction.title]
        for name, measure in MEASURED.items():
            cells.append(_spread([measure(outcome) for outcome in of_kind]))
            comparison = compared_kinds.get((block.setting.name, mismatch.name, correction.name, name))
            if comparison is None:
                cells += ["", ""]
                continue
            difference = comparison.difference
            cells.append(f"{difference.mean:+.2f} ({difference.low:+.2f} to {difference.high:+.2f})".replace("-", "−"))
            cells.append(f"{comparison.verdict}, p {comparison.p:.2g}")
        cells += [_spread([outcome.mean(measure) for outcome in of_kind]) for measure in ("k3", "ess")]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _hard_lines(own: Sequence[Outcome], block: Block) -> list[str]:
    """A line for each run of the language model, with all its evaluations."""
    steps = [step for step, _ in own[0].policy] if own else []
    heads = [f"right at step {step}" for step in steps]
    titles = ("correction", *heads, "KL: mean", "largest", "gradient norm", "seconds")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    title_of = {how.name: how.title for _, how in block.kinds}
    for one in own:
        largest = math.nan if one.largest_kl is None else one.largest_kl
        rewards = [f"{reward:.1%}" for _, reward in one.policy]
        numbers = [f"{one.mean('kl'):.3f}", f"{largest:.3f}", f"{one.mean('grad_norm'):.2f}", f"{one.seconds:.0f}"]
        lines.append(f"| {' | '.join([title_of[one.correction], *rewards, *numbers])} |")
    return lines


def _spread(values: Sequence[float]) -> str:
    """Mean, smallest and largest of the values that are numbers; empty if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    if len(finite) == 1:
        return _shown(finite[0])
    return f"{_shown(fmean(finite))} ({_shown(min(finite))} to {_shown(max(finite))})"


def _shown(value: float) -> str:
    shown = f"{value:.0f}" if abs(value) >= 10 else f"{value:.3f}" if 0.0005 <= abs(value) < 0.1 else f"{value:.2f}"
    return "0.00" if shown == "-0.00" else shown.replace("-", "−")
