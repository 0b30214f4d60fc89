"""Writes the tables of docs/metrics.md from the metrics of the correction, ``megatron_rc/measures/table.py``.

    python docs/metric_tables.py

A comment ``<!-- metrics: NAME -->`` in the page stands above each table.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rc.measures import table
from megatron_rc.measures.table import Metric

PAGE = Path(__file__).with_name("metrics.md")
TABLES: dict[str, Sequence[Metric]] = {
    "policy": (*table.POLICY, table.BAD_LOG_PROBS),
    "weights": table.WEIGHTS,
    "sequence weights": table.SEQUENCE_WEIGHTS,
    "rejection": (*table.REJECTION, *table.CRITERION, *table.VETO),
    "statistics": (*table.MEASURED, *table.RATIO, *table.VERL_RATIO),
    "breakdowns": (*table.LENGTH, *table.REWARD, *table.STALENESS, *table.TURN),
}
_HEAD = "| name | what is added up | over | range | a bad value, and what to do |\n|---|---|---|---|---|\n"
_TABLE = re.compile(r"^<!-- metrics: ([\w ]+) -->\n(?:\|.*\n)*", flags=re.MULTILINE)


def completed(text: str) -> str:
    """Return the page with the tables as the code has them."""
    return _TABLE.sub(lambda match: f"{match[0].partition('>')[0]}>\n{_rows(TABLES[match[1]])}", text)


def _rows(metrics: Sequence[Metric]) -> str:
    """Return the Markdown table of some metrics; neighbours with the same description share a row."""
    rows = []
    for description, described in itertools.groupby(metrics, _description):
        names = ", ".join(f"`{metric.name}`" for metric in described)
        rows.append(f"| {names} | {description} |\n")
    return _HEAD + "".join(rows)


def _description(metric: Metric) -> str:
    """Return the cells behind a metric's name."""
    return f"{metric.formula} | {metric.over} | {metric.values} | {metric.advice}"


if __name__ == "__main__":
    PAGE.write_text(completed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
