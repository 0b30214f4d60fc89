"""Tables of test cases, written as text."""

import math
import re

import pytest
import yaml

UNTRUNCATED = math.exp(20)


def table(columns, text):
    """Run a test once for each row of a table; indented lines continue a row, and ``-`` is an empty cell.

    Args:
        columns: names of the test's arguments. A cell of a ``{name}`` is a mapping, written as YAML without its braces;
            a ``*name`` takes all cells that are left.
        text: the rows, whose cells are separated by `` | ``.
    """
    names = columns.split()
    lines = [line for line in re.sub(r"\n +", " ", text.strip()).splitlines() if not line.startswith("#")]
    values = [pytest.param(*_values(names, line.split(" | ")), id=line) for line in lines]
    return pytest.mark.parametrize([name.strip("{}*") for name in names], values)


def _values(names, cells):
    cells = ["" if cell == "-" else cell for cell in cells]
    remaining = [cells[len(names) - 1 :]] if names[-1].startswith("*") else []
    values = cells[: len(names) - len(remaining)]
    pairs = zip(names[: len(names) - len(remaining)], values, strict=True)
    return [_mapping(cell) if name.startswith("{") else cell for name, cell in pairs] + remaining


def _mapping(cell):
    return yaml.safe_load(f"{{{cell}}}".replace("UNTRUNCATED", repr(UNTRUNCATED)))
