"""Results of the same sums in another order, or over another shape: processors round those differently."""

import pytest


def assert_equal_but_rounding(got, want, rel):
    """Nested lists and dictionaries are equal; floats within ``rel``, which is also the absolute tolerance."""
    assert type(got) is type(want)
    if isinstance(want, dict):
        assert got.keys() == want.keys()
        for key, value in want.items():
            assert_equal_but_rounding(got[key], value, rel)
    elif isinstance(want, list):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            assert_equal_but_rounding(one, other, rel)
    else:
        assert got == (pytest.approx(want, rel=rel, abs=rel) if isinstance(want, float) else want)
