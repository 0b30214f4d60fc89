"""The tables of docs/study.md, from the outcomes: a line for each kind of run, by the columns of its block."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.study.comparison import Comparison, comparison_key, comparisons, measures_of
from benchmarks.study.design import MARGIN, Block, Correction, Kind, Mismatch
from benchmarks.study.results import Outcome, apart, reference_of, verdict
from benchmarks.study.settings import family_of

END = "<!-- end of the table -->"
_VERDICTS = ("collapsed", "degraded", "sound")
# Titles of measures.
_TITLES = {
    "kl": "KL",
    "k3": "k3",
    "ess": "ESS",
    "rejected": "rejected",
    "grad_norm": "gradient norm",
    "batch_time": "simulated time of a batch",
    "inclusion": "inclusion",
    "inclusion_longest": "of the longest quarter",
    "inclusion_shortest": "of the shortest quarter",
    "expected_longest": "expected",
    "expected_shortest": "expected",
    "prompts_without": "share of prompts that train no response",
    "inclusion_prompt_std": "SD of inclusion over prompts",
    "age": "age in steps",
}
_RANGES_MEANS = ("kl", "k3", "ess", "rejected", "grad_norm")
# Content of a column for a kind of run, from the kind and the outcomes of its seeds.
Cell = Callable[[Kind, Sequence[Outcome]], str]
Column = tuple[str, Cell]


def begin_of(block: Block) -> str:
    """The line before the table of a block."""
    return f"<!-- the table of {block.name}: python -m benchmarks.study writes it -->"


def put_table(outcomes: Iterable[Outcome], page: Path, block: Block) -> None:
    """Write the table of a block into a page, in place of the old one.

    Raises:
        ValueError: the page has no place for it.
    """
    text = page.read_text(encoding="utf-8")
    text_before, begin_line, text_from_table = text.partition(f"{begin_of(block)}\n")
    _, end_line, text_after = text_from_table.partition(END)
    if not begin_line or not end_line:
        raise ValueError(f"{page} lacks the lines {begin_of(block)} and {END} around the table: add them")
    page.write_text(f"{text_before}{begin_line}\n{table(outcomes, block)}\n{end_line}{text_after}", encoding="utf-8")


def table(outcomes: Iterable[Outcome], block: Block) -> str:
    """The table of a block in Markdown, and sentences about its runs."""
    by_key = {outcome.key: outcome for outcome in outcomes}
    of_block = [by_key[run.key] for run in block.runs if run.key in by_key]
    compared_kinds: dict[tuple[str, ...], Comparison] = {}
    if block.table == "tests":
        compared_kinds = comparisons(by_key.values(), family_of(block))
        columns = _tests_columns(block, compared_kinds)
    elif block.table == "evaluations":
        columns = _evaluations_columns(of_block)
    else:
        columns = _ranges_columns(block, of_block)

    lines = [f"| {' | '.join(title for title, _ in columns)} |", "|---" * len(columns) + "|"]
    for kind in block.kinds:
        of_kind = seeds_of(of_block, *kind)
        if of_kind:
            lines.append(f"| {' | '.join(cell(kind, of_kind) for _, cell in columns)} |")
    if block.pairs and compared_kinds:
        lines += ["", *_pairs_table(block, compared_kinds)]
    sentences = [_count(of_block, block)]
    if block.table == "tests" and of_block:
        sentences += _of_tests(of_block, block, compared_kinds)
    return "\n".join([*lines, "", " ".join(sentences), ""])


def seeds_of(outcomes: Iterable[Outcome], mismatch: Mismatch, correction: Correction) -> list[Outcome]:
    """The outcomes of a kind of run."""
    return [outcome for outcome in outcomes if outcome.key[1:3] == (mismatch.name, correction.name)]


def _count(of_block: Sequence[Outcome], block: Block) -> str:
    """The number of runs, their time and their code, and the runs that are missing."""
    seconds = sum(outcome.seconds for outcome in of_block)
    of_one_run = f", {seconds / len(of_block):.0f} a run" if of_block else ""
    commits = sorted({outcome.commit for outcome in of_block if outcome.commit})
    made_by = f" Made by {'commit' if len(commits) == 1 else 'commits'} {', '.join(commits)}." if commits else ""
    times = f"{seconds:.0f} seconds of processor time in all{of_one_run}"
    text = f"{len(of_block)} of {len(block.runs)} runs, {times}.{made_by}"
    if not of_block:
        return f"{text} The others are not made yet."
    made = {outcome.key for outcome in of_block}
    missing: dict[int, list[str]] = {}
    for run in block.runs:
        if run.key not in made:
            missing.setdefault(run.seed, []).append(f"`{run.mismatch.name}-{run.correction.name}`")
    if not missing:
        return text
    of_seeds = []
    for seed, names in missing.items():
        of_seeds.append(f"seed {seed}: {'all' if len(names) == len(block.kinds) else ', '.join(names)}")
    return f"{text} Not made yet: {'; '.join(of_seeds)}."


def _of_tests(
    of_block: Sequence[Outcome], block: Block, compared_kinds: dict[tuple[str, ...], Comparison]
) -> list[str]:
    """Sentences about the runs that ended by an error, and about the verdicts, if it is time for them."""
    sentences = []
    for outcome in of_block:
        if outcome.error is not None:
            name = f"`{outcome.mismatch}-{outcome.correction}` with seed {outcome.seed}"
            sentences.append(f"An error ended {name} after step {outcome.policy[-1][0]}.")
    if not compared_kinds:
        num_runs = sum(len(block_of_family.runs) for block_of_family in family_of(block))
        return [*sentences, f"No verdict before all {num_runs} runs of `docs/{block.data}` are made."]
    verdicts = []
    for pair in block.compared_pairs:
        for measure in measures_of(block):
            verdicts.append(compared_kinds[comparison_key(block, *pair, measure)].verdict)
    counts = ", ".join(f"{verdicts.count(word)} {word}" for word in ("better", "worse", "undecided"))
    return [*sentences, f"Of the {len(verdicts)} comparisons in this table: {counts}."]


# The columns of each sort of table.

_MISMATCH: Column = ("mismatch", lambda kind, of_kind: kind[0].title)
_CORRECTION: Column = ("correction", lambda kind, of_kind: kind[1].title)


def _of_seeds(title: str, measure: Callable[[Outcome], float]) -> Column:
    """The mean, the smallest and the largest value of the seeds."""
    return title, lambda kind, of_kind: _spread([measure(outcome) for outcome in of_kind])


def _mean_of(measure: str) -> Column:
    """The mean of a measure over the whole run."""
    return _of_seeds(_TITLES[measure], lambda outcome: outcome.mean(measure))


def _num_skipped(outcome: Outcome) -> float:
    return math.nan if outcome.skipped_steps is None else outcome.skipped_steps


_SKIPPED = _of_seeds("skipped steps", _num_skipped)


def _ranges_columns(block: Block, of_block: Sequence[Outcome]) -> list[Column]:
    """Verdicts on each run, and comparisons by the ranges of the seeds."""
    reference = reference_of(of_block)

    def verdicts(kind: Kind, of_kind: Sequence[Outcome]) -> str:
        counts = Counter(verdict(outcome, reference) for outcome in of_kind)
        return ", ".join(f"{counts[word]} {word}" for word in _VERDICTS if counts[word])

    return [
        _MISMATCH,
        _CORRECTION,
        _of_seeds("reward of the last weights", lambda outcome: outcome.final),
        ("", verdicts),
        _of_seeds("over the run", lambda outcome: outcome.over_the_run),
        ("compared", lambda kind, of_kind: compared_by_ranges(of_block, block, kind)),
        *(_mean_of(measure) for measure in _RANGES_MEANS),
        _of_seeds("entropy", lambda outcome: outcome.at_the_end("entropy")),
    ]


def compared_by_ranges(of_block: Sequence[Outcome], block: Block, kind: Kind) -> str:
    """How a kind of run ended and how fast it learned, beside the kind that it is compared with.

    Empty for a block of one seed, with fewer runs than seeds, and if it is compared with nothing in the block.
    """
    other_kind = block.compared_with(*kind)
    if other_kind is None or len(block.seeds) == 1:
        return ""
    of_kind = seeds_of(of_block, *kind)
    of_other_kind = seeds_of(of_block, *other_kind)
    if not len(of_kind) == len(of_other_kind) == len(block.seeds):
        return ""
    at_end = apart([outcome.final for outcome in of_kind], [outcome.final for outcome in of_other_kind])
    on_way = apart([outcome.over_the_run for outcome in of_kind], [outcome.over_the_run for outcome in of_other_kind])
    verdicts = [("", "better", "worse")[at_end], ("", "faster", "slower")[on_way]]
    if not any(verdicts):
        return "undecided"
    return f"{', '.join(filter(None, verdicts))} than {other_kind[1].title}"


def _tests_columns(block: Block, compared_kinds: dict[tuple[str, ...], Comparison]) -> list[Column]:
    """Each measure's mean, its difference from the kind that it is compared with, and the verdict of the test.

    Without differences and verdicts if the block has pairs, whose table has them.
    """

    def of_comparison(measure: str, words: Callable[[Comparison], str]) -> Cell:
        def cell(kind: Kind, of_kind: Sequence[Outcome]) -> str:
            other_kind = block.compared_with(*kind)
            if other_kind is None or not compared_kinds:
                return ""
            return words(compared_kinds[comparison_key(block, kind, other_kind, measure)])

        return cell

    columns = [_MISMATCH, _CORRECTION]
    for name, measure in measures_of(block).items():
        columns.append(_of_seeds(name, measure))
        if not block.pairs:
            columns.append(("difference (95 %)", of_comparison(name, _difference)))
            columns.append(("verdict", of_comparison(name, _verdict)))
    for name in block.means:
        columns.append(_SKIPPED if name == "skipped_steps" else _mean_of(name))
    return columns


def _pairs_table(block: Block, compared_kinds: dict[tuple[str, ...], Comparison]) -> list[str]:
    """The lines of a table of comparisons: a line for each pair of kinds, with all measures."""
    titles = ["", "compared with"]
    for name in measures_of(block):
        titles += [f"{name}: difference (95 %)", "verdict"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for kind, other_kind in block.compared_pairs:
        cells = [f"{mismatch.title}, {correction.title}" for mismatch, correction in (kind, other_kind)]
        for name in measures_of(block):
            comparison = compared_kinds[comparison_key(block, kind, other_kind, name)]
            verdict_cell = _verdict(comparison)
            if block.shows_margin and comparison.is_above_margin:
                verdict_cell += f"; above −{MARGIN}"
            cells += [_difference(comparison), verdict_cell]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _difference(comparison: Comparison) -> str:
    difference = comparison.difference
    interval = f"{difference.low:+.2f} to {difference.high:+.2f}"
    if math.isnan(difference.low):
        interval = "no spread"
    return f"{difference.mean:+.2f} ({interval})".replace("-", "−")


def _verdict(comparison: Comparison) -> str:
    return f"{comparison.verdict}, p {comparison.p:.2g}"


def _evaluations_columns(of_block: Sequence[Outcome]) -> list[Column]:
    """All evaluations of a run; each kind has one seed."""

    def right_at(step: int) -> Cell:
        def cell(kind: Kind, of_kind: Sequence[Outcome]) -> str:
            # A run that an error ended has fewer evaluations.
            reward = dict(of_kind[0].policy).get(step)
            return "" if reward is None else f"{reward:.1%}"

        return cell

    def largest_kl(kind: Kind, of_kind: Sequence[Outcome]) -> str:
        largest = of_kind[0].largest_kl
        return f"{math.nan if largest is None else largest:.3f}"

    steps = sorted({step for outcome in of_block for step, _ in outcome.policy})
    return [
        _CORRECTION,
        *((f"right at step {step}", right_at(step)) for step in steps),
        ("KL: mean", lambda kind, of_kind: f"{of_kind[0].mean('kl'):.3f}"),
        ("largest", largest_kl),
        ("gradient norm", lambda kind, of_kind: f"{of_kind[0].mean('grad_norm'):.2f}"),
        ("seconds", lambda kind, of_kind: f"{of_kind[0].seconds:.0f}"),
    ]


def _spread(values: Sequence[float]) -> str:
    """Mean, smallest and largest of the values that are numbers; empty if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    if len(finite) == 1:
        return _shown(finite[0])
    return f"{_shown(fmean(finite))} ({_shown(min(finite))} to {_shown(max(finite))})"


def _shown(value: float) -> str:
    digits = 2
    if abs(value) >= 10:
        digits = 0
    elif 0.0005 <= abs(value) < 0.1:
        digits = 3
    shown = f"{value:.{digits}f}"
    return "0.00" if shown == "-0.00" else shown.replace("-", "−")
