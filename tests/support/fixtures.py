"""Fixtures for more than one folder of tests."""

import pytest


@pytest.fixture(scope="session")
def ranks():
    """The pool of ranks. Imported here: the process that shares out tests among others would load torch for nothing."""
    from tests.support.ranks import RankPool

    pool = RankPool()
    yield pool
    pool.close()
