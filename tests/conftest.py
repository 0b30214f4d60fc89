import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from tests.support.ranks import ranks

__all__ = ["ranks"]


def pytest_collection_modifyitems(items):
    """Tests that take the pool of ranks are marked by themselves; ``make test-fast`` leaves them out."""
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ranks)
