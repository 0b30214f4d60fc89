"""Writes ``report.html``, the page of a run, from the files in its folder."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from megatron_rc.doctor.series import WINDOW
from megatron_rc.launch.training.reporting.config_yaml import settings_of
from megatron_rc.launch.training.reporting.metrics_file import METRICS_FILE, read_rows
from megatron_rc.launch.training.reporting.run_page.notes import answers_of, notes_of
from megatron_rc.launch.training.reporting.run_page.panels import WANTED, histograms_of, panels_of
from megatron_rc.launch.training.reporting.run_page.verdict import FULL_NAMES, doctor_of, tiles_of
from megatron_rc.launch.training.reporting.series import collect, usual_names
from megatron_rc.replay.page import filled

PAGE = "report.html"
_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def write_page(folder: Path, ending: str | None = None) -> Path:
    """Write ``report.html`` into a run's folder, and return its path; missing or damaged files are left out.

    ``ending`` says how the run ended; None: as an older page of the same number of steps says.
    """
    path = folder / PAGE
    template = files("megatron_rc.launch.training.reporting.run_page").joinpath("page.html").read_text(encoding="utf-8")
    text = filled(template, page_data(folder, ending))
    partial = path.with_name(f"{PAGE}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
    return path


def page_data(folder: Path, ending: str | None = None) -> dict[str, Any]:
    """Data of the page, for the arguments of :func:`write_page`; numbers are finite or None."""
    settings = settings_of(folder)
    last: deque[Mapping[str, Any]] = deque(maxlen=WINDOW)
    rows = _rows(folder / METRICS_FILE, settings.get("metric-prefix") or "rollout_corr/", last)
    series = collect(rows, (*WANTED, *FULL_NAMES.values()))
    newest: Mapping[str, Any] = last[-1] if last else {}
    steps = newest.get("step", 0)
    return {
        "name": settings.get("run-name") or folder.resolve().name,
        "layout": settings.layout if settings.all else "",
        "steps": steps,
        "ending": ending if ending is not None else _known_ending(folder / PAGE, steps),
        "tiles": tiles_of(series, steps, settings),
        "doctor": doctor_of(series, last, settings) if last else None,
        "panels": panels_of(series),
        "histograms": histograms_of(newest, settings.get("rollout-is")) if last else [],
        "answers": answers_of(folder),
        "notes": notes_of(folder, settings),
        "settings": {"given": settings.given, "made_with": settings.made_with, "correction": settings.correction},
    }


def _rows(path: Path, prefix: str, last: deque[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """All rows, one by one because they may fill gigabytes; ``last`` keeps those of the last steps."""
    for row in read_rows(path):
        row = usual_names(row, prefix)
        if "reward/mean" in row:  # an evaluation has none
            last.append(row)
        yield row


def _known_ending(page: Path, steps: int) -> str:
    """The ending that an older page of the same number of steps names; empty if there is none."""
    try:
        match = _DATA.search(page.read_text(encoding="utf-8"))
        known = json.loads(match[1]) if match else {}
        if known.get("steps") == steps and isinstance(known.get("ending"), str):
            return str(known["ending"])
    except (OSError, ValueError):
        pass
    return ""
