"""Comparison of results of the same sums in another order or shape, which processors round differently."""

import pytest


def assert_equal_but_rounding(got, want, rel):
    """Assert that nested lists and dictionaries are equal, and floats within ``rel``, relative or absolute."""
    assert type(got) is type(want)
    if isinstance(want, dict):
        assert got.keys() == want.keys()
        for key, value in want.items():
            assert_equal_but_rounding(got[key], value, rel)
    elif isinstance(want, list):
        assert len(got) == len(want)
        for entry, expected in zip(got, want, strict=True):
            assert_equal_but_rounding(entry, expected, rel)
    else:
        assert got == (pytest.approx(want, rel=rel, abs=rel) if isinstance(want, float) else want)
