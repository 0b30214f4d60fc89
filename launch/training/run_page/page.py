"""The page of a run, written from what lies in its folder."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from megatron_rc.doctor.series import WINDOW
from megatron_rc.launch.training.metrics_file import METRICS_FILE, read_rows
from megatron_rc.launch.training.run_page.left import answers_of, notes_of
from megatron_rc.launch.training.run_page.panels import WANTED, histograms_of, panels_of
from megatron_rc.launch.training.run_page.series import collect
from megatron_rc.launch.training.run_page.settings import as_data, settings_of
from megatron_rc.launch.training.run_page.verdict import FULL_NAMES, doctor_of, tiles_of
from megatron_rc.launch.training.shown import usual_names
from megatron_rc.replay.template import filled

PAGE = "report.html"
_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def write_page(folder: Path, ending: str | None = None) -> Path:
    """Write ``report.html`` into a run's folder; where it is.

    Args:
        folder: of the run. What is missing in it, or cannot be read, is left out of the page.
        ending: how the run ended; None: as the page that is there says, if it is of as many steps.

    Raises:
        OSError: ``metrics.jsonl`` cannot be read, or the page not be written.
    """
    path = folder / PAGE
    template = files("megatron_rc.launch.training.run_page").joinpath("page.html").read_text(encoding="utf-8")
    text = filled(template, page_data(folder, ending))
    partial = path.with_name(f"{PAGE}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
    return path


def page_data(folder: Path, ending: str | None = None) -> dict[str, Any]:
    """What the page shows; every number is finite, or null. The arguments are those of :func:`write_page`."""
    settings, last = settings_of(folder), _Last()  # rows pass one by one: those of a long run fill gigabytes
    prefix = settings.get("metric-prefix") or "rollout_corr/"
    series = collect(last.of_steps(_rows(folder / METRICS_FILE, prefix)), (*WANTED, *FULL_NAMES.values()))
    row: Mapping[str, Any] = last.rows[-1] if last.rows else {}
    steps = row.get("step", 0)
    return {
        "name": settings.get("run-name") or folder.resolve().name,
        "layout": settings.layout if settings.all else "",
        "steps": steps,
        "ending": ending if ending is not None else _known_ending(folder / PAGE, steps),
        "tiles": tiles_of(series, steps, settings),
        "doctor": doctor_of(series, last.rows, settings) if row else None,
        "panels": panels_of(series),
        "histograms": histograms_of(row, settings.get("rollout-is")) if row else [],
        "answers": answers_of(folder),
        "notes": notes_of(folder, settings),
        "settings": as_data(settings),
    }


class _Last:
    """Keeps the last rows of optimizer steps that go by; those of evaluations have no correction.

    Attributes:
        rows: as many as the doctor looks at.
    """

    def __init__(self) -> None:
        self.rows: deque[Mapping[str, Any]] = deque(maxlen=WINDOW)

    def of_steps(self, rows: Iterator[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """The rows as they come."""
        for row in rows:
            if "reward/mean" in row:
                self.rows.append(row)
            yield row


def _rows(path: Path, prefix: str) -> Iterator[Mapping[str, Any]]:
    """None where a run ended before its first step."""
    return (usual_names(row, prefix) for row in read_rows(path)) if path.is_file() else iter(())


def _known_ending(page: Path, steps: int) -> str:
    """What a page of the same steps says, which the run wrote when it ended."""
    try:
        match = _DATA.search(page.read_text(encoding="utf-8"))
        known = json.loads(match[1]) if match else {}
        if known.get("steps") == steps and isinstance(known.get("ending"), str):
            return str(known["ending"])
    except (OSError, ValueError):
        pass
    return ""
