"""docs/doctor.md: its tables are those of the code, and its commands run."""

import re
import shlex

import pytest

from megatron_rc.doctor.__main__ import main
from megatron_rc.doctor.ranges import RANGES
from megatron_rc.doctor.report import GRADES, HEALTHY, TOO_LITTLE, UNUSABLE, WRONG, in_words
from megatron_rc.doctor.rules import BY_NAME, RULES
from megatron_rc.doctor.signs import K3
from megatron_rc.measures.data import MIN_PAIRS
from tests.doctor.test_inputs import metrics_of, write_lines
from tests.doctor.test_report import report_of
from tests.settings.test_documents import rows
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")


def test_the_tables_are_those_of_the_code():
    table = rows("docs/doctor.md", "rule | what is wrong | kind | it holds if | sources")
    found = [[name.strip("`"), *others] for name, *others, _, _ in table]
    assert found == [[rule.name, rule.title, rule.kind] for rule in RULES]
    assert [cells[-1] for cells in table] == [rule.sources for rule in RULES]
    assert f"over at least {MIN_PAIRS} pairs" in table[1][3]
    assert all(f"k3 > {K3:g}" in cells[3] for cells in table if cells[0] in ("`staleness`", "`tails`", "`precision`"))
    ranges = rows("docs/doctor.md", "number | recommended | by | here")
    assert [cells[:3] for cells in ranges] == [[f"`{one.fact}`", one.words(), one.source] for one in RANGES]
    for limit, words in GRADES[:-1]:
        assert f"| {limit:g} | {words} |" in PAGE
    codes = dict(re.findall(r"^\| (\d) \| (.*) \|$", PAGE, flags=re.MULTILINE))
    assert set(codes) == {str(code) for code in (HEALTHY, WRONG, UNUSABLE, TOO_LITTLE)}
    # A rule stands below those that explain the same numbers better.
    order = list(BY_NAME)
    for rule in RULES:
        assert all(order.index(name) < order.index(rule.name) for name in rule.unless)


def test_the_example_is_what_is_said():
    """Its numbers aside, which may differ in the last digit from machine to machine."""
    example = re.search(r"^## What it says\n\n```text\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)[1]
    text = in_words(report_of("temperature 0.7"))
    assert re.sub(r"[-\d. ]+", "", example) == re.sub(r"[-\d. ]+", "", text + "\n")


@pytest.mark.parametrize("document", ["docs/doctor.md", "README.md"])
def test_the_commands_run_as_they_are_written(tmp_path, monkeypatch, capsys, document):
    text = (ROOT / document).read_text(encoding="utf-8")
    commands = re.findall(r"(?:^|`)python -m megatron_rc\.doctor ([^`\n]*?)(?:`| +#.*|$)", text, flags=re.MULTILINE)
    assert commands
    monkeypatch.chdir(tmp_path)
    for words in map(shlex.split, commands):
        (path,) = (tmp_path / word for word in words if not word.startswith("-"))
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".csv":
            path.write_text("Step,run - rollout_corr/k3_kl\n1,0.0001\n")
        else:
            path = path if path.suffix else path / "metrics.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_lines(path, [{"step": 1, **metrics_of(None)}])
        assert main(words) == 0, words
    assert "nothing wrong" in capsys.readouterr().out
