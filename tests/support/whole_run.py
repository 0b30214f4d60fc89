"""A pytest plugin that writes a row about a whole run into a table of docs/reliability.md.

``-p tests.support.whole_run --whole-run "make test-long"``: the date, the versions, and how many tests passed.
"""

import datetime
import importlib.metadata
import platform
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
PACKAGES = ("torch", "megatron-core", "verl")
OUTCOMES = ("passed", "skipped", "failed", "error")


def pytest_addoption(parser):
    group = parser.getgroup("whole run")
    group.addoption("--whole-run", metavar="COMMAND", help="the command whose row in the page is written")
    group.addoption("--whole-run-page", metavar="FILE", type=Path, default=PAGE, help="the page with the table")


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    """Write the row, unless the run was interrupted or ``-k`` chose some tests. Workers have no terminal."""
    command = config.option.whole_run
    ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    if not command or not ended or config.option.keyword:
        return
    counts = {name: len(terminalreporter.stats.get(name, [])) for name in OUTCOMES}
    row = row_of(command, datetime.date.today(), counts)
    page = config.option.whole_run_page
    page.write_text(with_row(page.read_text(encoding="utf-8"), command, row), encoding="utf-8")
    terminalreporter.write_line(f"{page}: {row}")


def row_of(command, date, counts):
    versions = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name).partition('+')[0]}")
        except importlib.metadata.PackageNotFoundError:  # an environment without verl
            continue
    told = [f"{number:,} {name}" for name, number in counts.items() if number or name in ("passed", "failed")]
    return f"| `{command}` | {date} | {', '.join(versions)} | {', '.join(told)} |"


def with_row(text, command, row):
    """The page with this row in the place of the command's older row."""
    text, number = re.subn(rf"^\| `{re.escape(command)}` \|.*$", lambda _: row, text, flags=re.MULTILINE)
    if number != 1:
        raise pytest.UsageError(f"--whole-run {command}: the page has {number} rows of this command, not 1")
    return text
