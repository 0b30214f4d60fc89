"""The page of a replay in Chromium, where one is installed: it draws everything, and nothing fails on the way."""

import html
import json
import re
import shutil
import subprocess

import pytest

from megatron_rc.records.rollout import save_rollouts
from megatron_rc.replay.__main__ import main
from tests.replay.batches import scored_batch

# Clicks and moves as a reader makes them, and what the page shows after each.
ACTIONS = """<script>
const found = {}, all = query => [...document.querySelectorAll(query)];
const column = (table, index) => all(`#${table} tbody tr`).map(row => row.cells[index].textContent);
const title = (table, index) => all(`#${table} th`)[index];
title("summary", 7).click(); found.descending = column("summary", 7);
title("summary", 7).click(); found.ascending = column("summary", 7);
found.sort = title("summary", 7).getAttribute("aria-sort");
found.hollow = [all("#sequences circle[fill=none]").length];
all("#summary tbody tr").find(row => row.cells[0].textContent === "disabled").click();
found.hollow.push(all("#sequences circle[fill=none]").length);
found.pressed = all("#chips button[aria-pressed=true]").map(one => one.textContent);
all("#chips button")[0].click();
const mouse = { bubbles: true, clientX: 300, clientY: 300 };
const move = (target, kind) => target.dispatchEvent(new MouseEvent(kind, mouse));
const dot = all("#sequences circle")[0];
move(dot, "mousemove"); found.dot = [tip.style.display, tip.textContent];
move(all("#sequences svg")[0], "mouseleave"); found.left = tip.style.display;
document.body.dataset.found = JSON.stringify(found);
</script>"""
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")


def shown(folder, name):
    """What a browser makes of a page."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
    done = subprocess.run(
        [*command, f"--user-data-dir={folder}/profile", f"file://{folder}/{name}"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert 'data-ready="1"' in done.stdout, done.stderr
    return done.stdout


def test_the_page_draws_itself(tmp_path, capsys):
    batch = scored_batch(rows=40, length=60)
    save_rollouts(batch, tmp_path / "a.safetensors")
    words = ["--preset=decoupled_seq_is_rs", "--preset=disabled", f"--html={tmp_path}/page.html"]
    assert main([str(tmp_path / "a.safetensors"), *words]) == 0
    capsys.readouterr()
    text = shown(tmp_path, "page.html")
    page = text.partition('<script type="application/json"')
    # Two token plots and the sequences; each has a point for every one of them.
    tokens, sequences = int(batch.response_mask.sum()), len(batch.rewards)
    assert page[0].count("<circle") == 2 * tokens + sequences
    assert page[0].count("<svg") == 4
    assert page[0].count("<polygon") == 2
    assert "NaN" not in page[0]
    assert page[0].count('aria-pressed="true"') == 1
    assert re.search(r"40 sequences, \d+ sampled tokens, 1 batch\.", page[0])


def test_the_page_answers_clicks_and_the_mouse(tmp_path, capsys):
    save_rollouts(scored_batch(rows=40, length=60), tmp_path / "a.safetensors")
    words = ["--preset=decoupled_seq_is_rs", "--preset=disabled", "--preset=decoupled_token_is", "--json"]
    assert main([str(tmp_path / "a.safetensors"), *words, f"--html={tmp_path}/page.html"]) == 0
    report = json.loads(capsys.readouterr().out)["corrections"]
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    (tmp_path / "acted.html").write_text(page.replace("</body>", f"{ACTIONS}</body>"), encoding="utf-8")
    found = re.search(r'data-found="([^"]*)"', shown(tmp_path, "acted.html"))
    assert found, "an action failed"
    found = json.loads(html.unescape(found[1]))
    shares = sorted(f"{one['weights']['effective_share']:.3f}" for one in report)
    assert (found["ascending"], found["descending"], found["sort"]) == (shares, shares[::-1], "ascending")
    assert found["hollow"] == [report[0]["total"]["rejected_sequences"], 0]
    assert found["hollow"][0] > 0
    assert found["pressed"] == ["disabled"]
    assert found["dot"][0] == "block"
    assert found["dot"][1].startswith("sample 100 of a.safetensors\n")
    assert found["left"] == "none"
