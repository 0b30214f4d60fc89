"""Renaming of an earlier run's files that are in the way of a new run."""

from __future__ import annotations

import time
from pathlib import Path


def set_aside(path: Path) -> None:
    """Give a file or folder of an earlier run a name with the time when it was last written, which nothing else has."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(path.stat().st_mtime))
    names = (f"{path.stem}-{stamp}{suffix}{path.suffix}" for suffix in ("", *(f"-{n}" for n in range(2, 1000))))
    path.replace(next(free for free in map(path.with_name, names) if not free.exists()))
