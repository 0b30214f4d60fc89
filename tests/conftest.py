import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from tests.support.ranks import ranks

__all__ = ["ranks"]


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What the imports and the list of tests leave in memory stays: looking through it for garbage took a tenth."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items):
    """Tests that take the pool of ranks, and all of ``tests/long``, are marked by themselves."""
    for item in items:
        if item.nodeid.startswith("tests/long/"):
            item.add_marker(pytest.mark.long)
            item.add_marker(pytest.mark.timeout(3600), append=False)
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ranks)
