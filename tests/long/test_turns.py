"""The game of several turns is learned by each of three seeds, with the figures of docs/rollouts.md."""

import re
import shlex

import pytest

from tests.support.paths import ROOT
from tests.support.runs import finish, read, start

PAGE = (ROOT / "docs" / "rollouts.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## Several turns")[2].partition("\n## ")[0]
COMMAND = shlex.split(re.search(r"^python (.*)$", SECTION, flags=re.MULTILINE).group(1))


def figures(arguments):
    """The figures of the three seeds in front of some words of the page."""
    three = r"(0\.\d\d),\s+(0\.\d\d)\s+and\s+(0\.\d\d)\s+in\s+the\s+"
    return [float(text) for text in re.search(three + arguments, SECTION).groups()]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_share_of_numbers_that_are_found_rises(tmp_path, seed):
    code, _, errors = finish(start([*COMMAND, "--cpu", f"--runs-dir={tmp_path}", f"--seed={seed}"]), timeout=900)
    assert code == 0, errors
    right = [row["reward/right"] for row in read(tmp_path / "guessing_game")]
    assert sum(right[:5]) / 5 == pytest.approx(figures(r"first\s+5\s")[seed - 1], abs=0.05)
    assert sum(right[-20:]) / 20 == pytest.approx(figures(r"last\s+20\s")[seed - 1], abs=0.15)
