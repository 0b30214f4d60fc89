"""The tables of docs/presets.md: every row is run as written."""

import re

import pytest
import yaml

from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.criteria import CRITERIA
from megatron_rc.settings.presets import ALIASES, NAMES, PRESETS
from tests.support.paths import ROOT


def rows(document, head):
    """The cells of each row of the table with this head."""
    text = (ROOT / document).read_text(encoding="utf-8")
    return rows_of(text.partition(f"| {head} |\n")[2])


def rows_of(text):
    """The cells of each row of the table that the text begins with, below its head."""
    table = text.partition("\n\n")[0]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in table.splitlines()[1:]]


def quoted(cell):
    return re.findall(r"`([^`]+)`", cell)


def row_name(cells):
    return cells[0].strip("`")


TABLE = rows("docs/presets.md", "name | aliases | what it does | fields | paper")


@pytest.mark.parametrize("cells", TABLE, ids=row_name)
def test_a_preset_has_the_fields_of_its_row(cells):
    (name,), aliases, _, fields, _ = (quoted(cell) for cell in cells)
    expected = RolloutCorrectionConfig(**yaml.safe_load("\n".join(fields)))
    assert RolloutCorrectionConfig.preset(name) == expected
    assert aliases == [alias for alias, preset in ALIASES.items() if preset == name]


def of_2025_11(name):
    return RolloutCorrectionConfig.from_dict({"preset": name}, "verl-2025-11")


def test_the_tables_have_every_preset_and_criterion():
    assert sorted(name for cells in TABLE for name in quoted(cells[0])) == sorted(PRESETS)
    changed = [name for cells in rows("docs/presets.md", "names | now | 2025-11") for name in quoted(cells[0])]
    assert sorted(changed) == sorted(name for name in NAMES if of_2025_11(name) != RolloutCorrectionConfig.preset(name))
    named = [name for cells in rows("docs/presets.md", "criterion | rejects | if") for name in quoted(cells[0])]
    assert sorted(named) == sorted(CRITERIA)
