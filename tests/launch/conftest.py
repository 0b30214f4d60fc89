import logging

import pytest


@pytest.fixture(autouse=True)
def whole_log():
    """The launcher's command quiets the package for the ranks that it starts; here the next test comes after it."""
    yield
    logging.getLogger("megatron_rc").setLevel(logging.NOTSET)
