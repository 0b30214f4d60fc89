"""docs/metrics.md has the metrics of the code."""

import importlib.util

from tests.support.paths import ROOT

SPEC = importlib.util.spec_from_file_location("metric_tables", ROOT / "docs" / "metric_tables.py")
metric_tables = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(metric_tables)


def test_the_page_has_the_tables_of_the_code():
    text = metric_tables.PAGE.read_text(encoding="utf-8")
    assert metric_tables.completed(text) == text, "run python docs/metric_tables.py"
    assert all(f"<!-- metrics: {name} -->" in text for name in metric_tables.TABLES)
