import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from tests.support.ranks import ranks

__all__ = ["ranks"]


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items):
    """Tests that take the pool of ranks are marked by themselves; ``make test-fast`` leaves them out.

    Groups are for pytest-xdist, which runs each on one worker: what keeps several processes busy comes one after the
    other, and the rest by file, so that what a file sets up is set up once.
    """
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ranks)
        is_busy = item.get_closest_marker("ranks") or item.get_closest_marker("processes")
        item.add_marker(pytest.mark.xdist_group("ranks" if is_busy else item.path.name))
