import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.support.ranks import ranks

__all__ = ["ranks"]
