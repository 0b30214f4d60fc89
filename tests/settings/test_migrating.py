"""docs/migrating.md: tables with every setting that a dialect reads, and examples with the results in their rows."""

import re
from dataclasses import asdict

import pytest
import yaml

from megatron_rc.launch.flags.parser import build_parser
from megatron_rc.loss.kl import KL_ESTIMATORS
from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.dialects import BY_NAME
from tests.settings.test_documents import quoted, rows, rows_of
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
HEAD = "setting | default | for example | here | what differs"


def tables():
    """The rows of each dialect's table, the first one in a section whose text before it names the dialect."""
    table_of_dialect = {}
    for section in re.split(r"^##+ ", PAGE, flags=re.MULTILINE):
        before, head, after = section.partition(f"| {HEAD} |\n")
        if head:
            name = re.search(r"[Dd]ialect `([\w-]+)`", before)[1]
            assert name not in table_of_dialect
            table_of_dialect[name] = rows_of(after)
    return table_of_dialect


TABLES = tables()
ROWS = [(dialect, cells) for dialect, table in TABLES.items() for cells in table]


def settings(cell):
    """The text between backticks, as a mapping."""
    (text,) = quoted(cell)
    return yaml.safe_load(f"{{{text}}}")


def read(settings_of_program, dialect):
    """This package's fields; none if the settings are an error."""
    try:
        return asdict(RolloutCorrectionConfig.from_dict(settings_of_program, dialect=dialect))
    except ValueError:
        return {}


def test_every_dialect_has_a_table_with_every_setting_once():
    listed = {name: sorted(key for cells in table for key in quoted(cells[0])) for name, table in TABLES.items()}
    assert listed == {name: sorted(program.defaults) for name, program in BY_NAME.items()}


@pytest.mark.parametrize(("dialect", "cells"), ROWS, ids=[f"{name}-{cells[0].strip('`')}" for name, cells in ROWS])
def test_a_row(dialect, cells):
    (name,), (default,) = quoted(cells[0]), quoted(cells[1])
    assert yaml.safe_load(default) == BY_NAME[dialect].defaults[name]
    example = settings(cells[2])
    expected = settings(cells[3])
    got = read(example, dialect)
    assert {field: got[field] for field in expected} == expected
    # This setting has the effect, or the others cannot be read without it.
    del example[name]
    without = read(example, dialect)
    assert {field: without.get(field, "an error") for field in expected} != expected


def test_settings_of_verl_without_a_dialect():
    """The page's example: both readings, and the warning."""
    section = re.search(r"^\*\*Without a dialect\*\*.*?\n\n", PAGE, flags=re.MULTILINE | re.DOTALL)[0]
    example, near = (yaml.safe_load(f"{{{text}}}") for text in quoted(section) if text.startswith("rollout_rs:"))
    with pytest.warns(UserWarning, match="rollout_rs_threshold") as caught:
        config = RolloutCorrectionConfig.from_dict(example)
    (warning,) = caught
    message = str(warning.message)
    assert "dialect='megatron_rc'" in message
    assert "dialect='verl'" in message
    for intervals in re.findall(r"\[[\d.]+, [\d.]+\]", section):
        assert intervals in message
    assert config.rollout_rs_threshold == example["rollout_rs_threshold"]
    assert RolloutCorrectionConfig.from_dict(example, dialect="megatron_rc") == config
    assert RolloutCorrectionConfig.from_dict(near).rollout_rs_threshold == near["rollout_rs_threshold"]


def test_flags_of_megatron_lm():
    flags_of_launcher = build_parser()._option_string_actions
    table = rows("docs/migrating.md", "flag | default | here")
    assert len(table) > 10
    for cells in table:
        is_here = cells[2].startswith(("the same", "short for", "bound of"))
        for flag in quoted(cells[0]):
            assert (flag in flags_of_launcher) == is_here, flag
        for flag in quoted(cells[2]):
            assert flag.split()[0] in flags_of_launcher, flag


def test_kl_penalties_are_estimators():
    estimators = [name for cells in rows("docs/migrating.md", "`kl_loss_type` | here") for name in quoted(cells[1])]
    assert sorted(estimators) == sorted(KL_ESTIMATORS)
