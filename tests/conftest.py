import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.ranks import ranks

__all__ = ["ranks"]
