"""``--help`` is one screen for a new user; ``--help-all`` has every flag."""

import re

import pytest

from megatron_rc.launch.__main__ import main
from megatron_rc.launch.flags.parser import build_parser, long_options
from megatron_rc.launch.flags.torchrun import torchrun_parser
from tests.support.paths import ROOT


@pytest.fixture
def shown(monkeypatch, capsys):
    """What the command prints on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    def show(*words):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 0
        return capsys.readouterr().out

    return show


def test_help_is_one_screen(shown):
    text = shown("--help")
    lines = text.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 80
    assert shown("-h") == text
    known = long_options(build_parser()) | long_options(torchrun_parser())
    names = re.findall(r"^  --(\S+)", text, re.MULTILINE)
    assert len(names) > 20
    assert set(names) <= set(known)
    for place in re.findall(r"docs/\w+\.md", text):
        assert (ROOT / place).is_file()


def test_help_all_has_every_flag_by_group(shown):
    text = shown("--help-all")
    known = long_options(build_parser()) | long_options(torchrun_parser())
    missing = [name for name in known if name and not re.search(rf"(?<![\w-])--{re.escape(name)}(?![\w-])", text)]
    # Taken apart at the end of a line.
    assert [name for name in missing if f"--{name}" not in "".join(text.split())] == []
    for title in ("torchrun", "parallelism", "rollout correction", "Megatron-Core's optimizer"):
        assert f"\n{title}" in text
