"""The dry run of 16,384 ranks that benchmarks/SCALING.md shows, run as it stands there."""

import re
import subprocess

from tests.support.paths import ROOT
from tests.support.runs import as_in_a_shell


def test_the_page_shows_what_the_dry_run_prints():
    page = (ROOT / "benchmarks" / "SCALING.md").read_text(encoding="utf-8")
    command, shown = re.search(
        r"^```sh\n(.*?)^```\n\n```text\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL
    ).groups()
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=ROOT, env=as_in_a_shell())
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(shown)
