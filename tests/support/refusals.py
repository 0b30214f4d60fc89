"""Settings that are refused by one sentence."""

from contextlib import contextmanager

import pytest

from megatron_rc.launch.errors import ConfigurationError


@contextmanager
def refused(parts):
    """Expect a ConfigurationError inside the block: one sentence with all of these parts, separated by " | "."""
    with pytest.raises(ConfigurationError) as caught:
        yield
    sentence = str(caught.value)
    assert parts
    assert [part for part in parts.split(" | ") if part not in sentence] == [], sentence
    assert "\n" not in sentence
