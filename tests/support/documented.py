"""The names in docs/metrics.md, below its section on the policy and the run."""

import re
from collections.abc import Iterable

from tests.support.paths import ROOT

_SECTION = "\n## The policy and the run\n"


def undocumented(names: Iterable[str]) -> list[str]:
    """A run's metrics, except the correction's, that are in the first cell of no row of the table."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").partition(_SECTION)[2]
    cells = re.findall(r"^\| (`.+?) \|", text, flags=re.MULTILINE)
    patterns = [re.sub(r"<\w+>", r".+", name) for cell in cells for name in _whole(re.findall(r"`([^`]+)`", cell))]
    return [
        name
        for name in names
        if name != "step"
        and not name.startswith("rollout_corr/")
        and not any(re.fullmatch(pattern, name) for pattern in patterns)
    ]


def _whole(names: list[str]) -> Iterable[str]:
    """The names of one cell: ``_min`` replaces the last word of the name before, ``std`` its part after the slash."""
    before = ""
    for name in names:
        if name.startswith("_"):
            name = before.rpartition("_")[0] + name
        elif "/" not in name and "/" in before:
            name = before.rpartition("/")[0] + "/" + name
        yield name
        before = name
