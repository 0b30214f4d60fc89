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
    """tests/correction/test_scaling.py holds docs/scaling.md against the traces."""
    formulas = scaling.read_formulas((ROOT / "docs" / "scaling.md").read_text(encoding="utf-8"))
    assert collectives_of_the_page(column) == formulas[name]


def test_the_pictures_are_small_and_can_be_drawn_again():
    assert pictures.groups().axes
    for name in ("sharding_tokens.png", "sharding_groups.png"):
        assert (ROOT / "docs" / name).stat().st_size < 60_000


def test_the_picture_of_tokens_shows_each_position_on_its_rank():
    upper, lower = pictures.tokens().axes
    for axes, shards in (
        (upper, ["0 1 2 3 12 13 14 15", "4 5 6 7 8 9 10 11"]),
        (lower, ["0 1 6 7 0 1 2 9 10 11", "2 3 4 5 3 4 5 6 7 8"]),
    ):
        cells = [text for text in axes.texts if text.get_text().isdigit()]
        for rank, expected in enumerate(shards):
            row = sorted(
                (c for c in cells if round(c.get_position()[1] - 0.45) == -1 - rank), key=lambda c: c.get_position()
            )
            assert " ".join(c.get_text() for c in row) == expected
