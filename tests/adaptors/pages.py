"""The code blocks of docs/adaptors.md, run as written."""

import re

from tests.support.paths import ROOT


def blocks(program, language="python"):
    """The code blocks of a program's section."""
    text = (ROOT / "docs" / "adaptors.md").read_text(encoding="utf-8")
    (section,) = re.findall(rf"^## {program}\n(.*?)(?=^## |\Z)", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(rf"^```{language}\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)


def documented(program, **names):
    """The names that the section's only block defines; it has at most ten lines for the user to write."""
    (block,) = blocks(program)
    assert len([line for line in block.splitlines() if line.strip()]) <= 10
    exec(compile(block, f"docs/adaptors.md, {program}", "exec"), names)
    return names
