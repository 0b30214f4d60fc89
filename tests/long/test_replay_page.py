"""The page of a replay in Chromium, where one is installed: it draws everything, and nothing fails on the way."""

import re
import shutil
import subprocess

import pytest

from megatron_rc.records.rollout import save_rollouts
from megatron_rc.replay.__main__ import main
from tests.replay.batches import scored_batch

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_the_page_draws_itself(tmp_path, capsys):
    batch = scored_batch(rows=40, length=60)
    save_rollouts(batch, tmp_path / "a.safetensors")
    words = ["--preset=decoupled_seq_is_rs", "--preset=disabled", f"--html={tmp_path}/page.html"]
    assert main([str(tmp_path / "a.safetensors"), *words]) == 0
    capsys.readouterr()
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
    done = subprocess.run(
        [*command, f"--user-data-dir={tmp_path}/profile", f"file://{tmp_path}/page.html"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    page = done.stdout.partition('<script type="application/json"')
    assert 'data-ready="1"' in done.stdout, done.stderr
    # Two token plots and the sequences; each has a point for every one of them.
    tokens, sequences = int(batch.response_mask.sum()), len(batch.rewards)
    assert page[0].count("<circle") == 2 * tokens + sequences
    assert page[0].count("<svg") == 4
    assert page[0].count("<polygon") == 2
    assert "NaN" not in page[0]
    assert page[0].count('aria-pressed="true"') == 1
    assert re.search(r"40 sequences, \d+ sampled tokens, 1 batch\.", page[0])
