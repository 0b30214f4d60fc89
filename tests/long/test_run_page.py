"""The page of a run in Chromium, where one is installed: every panel is drawn, and the mouse shows the numbers."""

import html
import json
import math
import re

import pytest

from megatron_rc.launch.training.reporting.run_page.page import page_data, write_page
from tests.launch.training.reporting.test_run_page import HOSTILE, made
from tests.launch.training.reporting.test_picture import run
from tests.long.test_replay_page import BROWSER, shown

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")

ACTIONS = """<script>
const svg = document.querySelector("#panels svg"), box = svg.getBoundingClientRect();
svg.dispatchEvent(new MouseEvent("mousemove", { clientX: box.left + LEFT + 1, clientY: box.top + 50 }));
document.body.dataset.found = JSON.stringify([tip.style.display, tip.textContent, document.title,
  document.documentElement.scrollWidth <= innerWidth]);
</script>"""


@pytest.mark.parametrize("steps", [60, 2000])
def test_the_page_draws_itself_and_answers_the_mouse(tmp_path, steps):
    rows = run(steps=steps, evaluations=steps // 4)
    rows[5]["rollout_corr/kl"] = math.nan
    folder = made(tmp_path, rows, name=HOSTILE.replace("\ud800", ""))
    # A lone half of a character ends Chromium itself where it writes the page out as text.
    page = write_page(folder, HOSTILE.replace("\ud800", ""))
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", f"{ACTIONS}</body>"), encoding="utf-8")
    text = shown(tmp_path, "report.html")
    found = re.search(r'data-found="([^"]*)"', text)
    assert found, "an action failed"
    display, tip, title, fits = json.loads(html.unescape(found[1]))
    data = page_data(folder)
    drawn = text.partition('<script type="application/json"')[0]
    assert drawn.count("<svg") == len(data["panels"]) + len(data["histograms"]) > 3
    assert not re.search(r'="[^"]*NaN', drawn)
    assert display == "block"
    first = "step 1\n" if steps == 60 else "steps 1 to "
    assert tip.startswith(first)
    assert "mean reward: " in tip
    assert title == re.sub(" +", " ", f"{data['name']}: report"), "as browsers show a title"
    assert fits, "nothing is wider than the window"
