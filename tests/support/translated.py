"""Comparison of another program's translated settings with expected fields."""

import math

import pytest

from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.dialects import translate
from tests.golden.load import cases

LEVELS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


def reads(dialect, given, expected, *parts):
    """Assert that settings become these fields, with exactly one note for each of ``parts``, which contains it."""
    own, notes = translate(given, dialect)
    assert RolloutCorrectionConfig.from_dict(own, "megatron_rc") == RolloutCorrectionConfig(**expected)
    assert notes[0].startswith(f"read as {dialect}: rollout_is={own['rollout_is']!r}")
    assert len(notes) == 1 + len(parts), notes
    for part in parts:
        assert any(part in note for note in notes[1:]), (part, notes)
    assert all("\n" not in note for note in notes)


def golden(generation):
    return [pytest.param(case, id=case["id"]) for case in cases("rollout_correction", generation=generation)]


def expected_criteria(*pairs):
    """(name, lower on ρ, upper on ρ) as (name, log lower, log upper)."""
    return [
        (name, pytest.approx(math.log(low), abs=1e-12), pytest.approx(math.log(high), abs=1e-12))
        for name, low, high in pairs
    ]


def criteria(config):
    return [(criterion.name, criterion.lower, criterion.upper) for criterion in config.criteria]
