"""docs/sharding.md: its collectives are those that were counted, and its pictures what the library's layouts give."""

import re

import pytest

from benchmarks import pictures, scaling
from benchmarks.scaling import PHASES, Formula
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "sharding.md").read_text(encoding="utf-8")


def collectives_of_the_page(column):
    """In the order of the page, from one column of the table of what crosses."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| a")]
    rows = [row for row in rows if len(row) == 4 and row[0] in PHASES]
    assert len(rows) == 8
    return [Formula.parse(row[0], item) for row in rows for item in re.findall(r"`([^`]+)`", row[column])]


@pytest.mark.parametrize(("column", "name"), [(1, "token IS"), (2, "bypass, token IS")])
def test_the_page_has_the_collectives_that_were_counted(column, name):
    """tests/correction/test_scaling.py holds benchmarks/SCALING.md against the traces."""
    formulas = scaling.read_formulas((ROOT / "benchmarks" / "SCALING.md").read_text(encoding="utf-8"))
    assert collectives_of_the_page(column) == formulas[name]


def test_the_pictures_are_small_and_can_be_drawn_again():
    for draw in (pictures.tokens, pictures.groups):
        assert draw().axes
        assert (ROOT / "docs" / f"sharding_{draw.__name__}.png").stat().st_size < 60_000
