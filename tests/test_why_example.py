"""Why a correction is needed: the block of docs/choosing.md runs, prints what it shows, and fails as it says."""

import re

import pytest
import torch

from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")


def numbers(text):
    """{name: three numbers} of lines such as ``wanted tensor([ 0.1, 0.2, -0.3])``."""
    lines = re.findall(r"^(\w+) tensor\(\[(.*?)\]\)$", text, flags=re.MULTILINE)
    return {name: [float(number) for number in row.split(",")] for name, row in lines}


def test_the_page_prints_what_it_shows(capsys):
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    with torch.random.fork_rng(devices=[]):  # other tests bring a device without numbers of its own
        exec(compile(block, "docs/choosing.md", "exec"), {})
    printed = numbers(capsys.readouterr().out)
    shown = numbers(PAGE)
    assert set(printed) == {"wanted", "estimated", "corrected"}
    assert {name: pytest.approx(row, abs=1e-4) for name, row in printed.items()} == shown
    # The best answer should become more likely, and the estimate makes it less likely; noise is below 0.01.
    assert shown["estimated"][0] < -0.02 < 0 < shown["wanted"][0]
    assert shown["corrected"] == pytest.approx(shown["wanted"], abs=0.01)
