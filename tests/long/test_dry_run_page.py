"""The dry run of 16,384 ranks that docs/scaling.md shows, run as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT


@pytest.mark.long
def test_the_page_shows_what_the_dry_run_prints():
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    command, shown = re.search(
        r"^```sh\n(.*?)^```\n\n```text\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL
    ).groups()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PATH": path}, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(shown)
