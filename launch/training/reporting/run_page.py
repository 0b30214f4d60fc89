"""``report.html`` and ``summary.png``: a run as one page and as one picture, drawn from the files in its folder."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_rc.doctor.inputs import read_settings
from megatron_rc.doctor.programs import OWN
from megatron_rc.doctor.report import GRADES, SHOWN
from megatron_rc.doctor.tables import object_of
from megatron_rc.drawing import page
from megatron_rc.drawing.charts import picture_of
from megatron_rc.launch.rollouts.evaluation import FOLDER as ANSWERS_FOLDER
from megatron_rc.launch.training.reporting.config_yaml import SETTINGS_FILE
from megatron_rc.launch.training.reporting.history import RunHistory, read_history
from megatron_rc.launch.training.reporting.metrics_file import METRICS_FILE
from megatron_rc.launch.training.reporting.panels import page_charts, picture_charts
from megatron_rc.launch.training.reporting.terminal import TABLE_HEADER, table_rows

PAGE = "report.html"
PICTURE = "summary.png"
_RC = "rollout_corr/"
_MOST_ANSWERS = 40
_LONGEST_TEXT = 2000
# The words of an older page about the end of its run, and the number of steps that they are about.
_ENDING = re.compile(r"<p>After step (\d+): (.*)</p>")


def history_of(folder: Path) -> tuple[RunHistory, Mapping[str, str]]:
    """Return the history and the flags of the run in a folder; settings that cannot be read are left out."""
    try:
        settings = read_settings(folder)
    except (OSError, UnicodeDecodeError):
        settings = {}
    return read_history(folder / METRICS_FILE, settings, settings.get("metric-prefix", _RC)), settings


def draw_run(folder: Path, history: RunHistory, settings: Mapping[str, str], ending: str | None = None) -> None:
    """Write the page and the picture of a run into its folder; a run without steps has no picture.

    Args:
        folder: the run's folder.
        history: the run's history.
        settings: the run's flags without leading dashes.
        ending: how the run ended; None: as an older page of the same number of steps says.

    Raises:
        ImportError: matplotlib is missing.
        OSError: a file cannot be written.
    """
    name = settings.get("run-name") or folder.resolve().name
    if ending is None:
        ending = _known_ending(folder / PAGE, history.num_steps)
    page.write_page(folder / PAGE, page.page_of(name, _parts(folder, history, settings, ending)))
    if history.series:
        (folder / PICTURE).write_bytes(picture_of(name, picture_charts(history.series)))


def _parts(folder: Path, history: RunHistory, settings: Mapping[str, str], ending: str) -> Iterator[str]:
    if ending:
        yield page.paragraph(f"After step {history.num_steps}: {ending}")
    total = settings.get("train-iters")
    steps = f"{history.num_steps} of {total}" if total else str(history.num_steps)
    numbers = page.table(TABLE_HEADER, table_rows(history.series))
    yield page.section("The run in numbers", page.paragraph(f"Optimizer steps: {steps}."), numbers)
    if history.facts:
        yield page.section("Engine and trainer: what the doctor says", *_doctors_words(history))
    if history.thinning > 1:
        note = (
            f"The file has many rows: of {METRICS_FILE} each row of {history.thinning} is drawn, and all evaluations."
        )
        yield page.paragraph(note, is_note=True)
    yield page.charts(page_charts(history.series))
    yield from _answers(folder)
    text = _settings_text(folder)
    if text:
        yield page.section("Settings", page.lines_of(text))


def _doctors_words(history: RunHistory) -> Iterator[str]:
    """Yield a sentence about the distance at the end, all verdicts with their steps, and the doctor's numbers."""
    facts = history.facts
    grade = next((sentence for limit, sentence in GRADES if facts["k3_kl"] <= limit), None)
    yield page.paragraph(f"At the end: {grade or 'the distance of the policies is not known'}.")
    if history.findings:
        rows = []
        for finding in history.findings:
            rule = finding.verdict.rule
            until = "the end" if finding.until is None else f"step {finding.until}"
            rows.append((f"step {finding.since}", until, rule.title, finding.verdict.words, rule.advice_in(OWN)))
        yield page.table(("came at", "held until", "verdict", "numbers when it last held", "do"), rows)
    else:
        yield page.paragraph("No fault was found at any step.")
    numbers = [(label, form.format(facts[name])) for name, label, form in SHOWN if name in facts]
    yield page.table(("median of the last steps", ""), numbers)


def _answers(folder: Path) -> Iterator[str]:
    """Yield a table of graded answers of the newest evaluation that has any."""
    for file in sorted((folder / ANSWERS_FOLDER).glob("step-*.jsonl"), reverse=True):
        answers = _read_answers(file)
        if answers:
            columns = ("prompt", "response", "label", "reward", "error")
            rows = [[_shown(answer.get(column)) for column in columns] for answer in answers]
            note = page.paragraph(f"The first {len(rows)} of {ANSWERS_FOLDER}/{file.name}.", is_note=True)
            yield page.section("Graded answers", note, page.table(columns, rows))
            return


def _read_answers(file: Path) -> list[Mapping[str, Any]]:
    """Return the first answers of a file; none if it cannot be read."""
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            objects = [object_of(line) for line in islice(lines, _MOST_ANSWERS)]
    except OSError:
        return []
    return [answer for answer in objects if answer]


def _shown(value: Any) -> str:
    """A value of a graded answer as text; a conversation has one line for each message."""
    if isinstance(value, list):
        messages = (f"{part.get('role')}: {part.get('content')}" if isinstance(part, dict) else part for part in value)
        value = "\n".join(map(str, messages))
    if isinstance(value, float) and math.isfinite(value):
        value = f"{value:.5g}"
    text = "" if value is None else str(value)
    num_more = len(text) - _LONGEST_TEXT
    return text if num_more <= 0 else f"{text[:_LONGEST_TEXT]} … {num_more} more characters"


def _settings_text(folder: Path) -> str:
    try:
        return (folder / SETTINGS_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _known_ending(path: Path, steps: int) -> str:
    """Return the ending that an older page of the same number of steps names; empty if there is none."""
    try:
        match = _ENDING.search(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""
    return html.unescape(match[2]) if match and int(match[1]) == steps else ""
