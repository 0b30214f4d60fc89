import gc
import importlib.util
import os
import signal
from collections import Counter

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from tests.support.fixtures import ranks

__all__ = ["ranks"]


def pytest_configure():
    """Take Ctrl-C, which commands that a shell starts with ``&`` ignore: launchers under test would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
    """Tests that take the pool of ranks, and all of ``tests/long``, are marked by themselves.

    Tests of reasoning-gym's tasks are skipped if it is not installed: it alone has to be built from source.

    Files that start other Pythons come first, then those with many tests on ranks, and at last those with many others,
    a hundred of which take as long as two on ranks: begun last, a long file would keep one worker busy when the others
    have nothing left.
    """
    has_reasoning_gym = importlib.util.find_spec("reasoning_gym") is not None
    for item in items:
        if item.get_closest_marker("reasoning_gym") and not has_reasoning_gym:
            item.add_marker(pytest.mark.skip(reason="the extra reasoning-gym is not installed"))
        if item.nodeid.startswith("tests/long/"):
            item.add_marker(pytest.mark.long)
            item.add_marker(pytest.mark.timeout(3600), append=False)
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ranks)
    numbers = Counter(item.path for item in items)
    on_ranks = Counter(item.path for item in items if item.get_closest_marker("ranks"))
    starting = {item.path for item in items if item.get_closest_marker("processes")}
    items.sort(key=lambda item: (item.path not in starting, -on_ranks[item.path], -numbers[item.path], item.path))
