"""The game of several turns is learned by each of three seeds, with the figures of docs/rollouts.md."""

import re
import shlex

import pytest

from tests.support.paths import ROOT
from tests.support.runs import finish, read, start

PAGE = (
    (ROOT / "docs" / "rollouts.md").read_text(encoding="utf-8").partition("## Several turns")[2].partition("\n## ")[0]
)
COMMAND = shlex.split(re.search(r"^python (.*)$", PAGE, flags=re.MULTILINE).group(1))
(FIGURES,) = re.findall(r"(0\.\d\d), (0\.\d\d) and (0\.\d\d)\s+in\s+the\s+last\s+20\s+steps", PAGE)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_reward_rises(tmp_path, seed):
    code, _, errors = finish(start([*COMMAND, "--cpu", f"--runs-dir={tmp_path}", f"--seed={seed}"]), timeout=900)
    assert code == 0, errors
    right = [row["reward/right"] for row in read(tmp_path / "guessing_game")]
    assert sum(right[:5]) / 5 < 0.3
    assert sum(right[-20:]) / 20 == pytest.approx(float(FIGURES[seed - 1]), abs=0.15)
