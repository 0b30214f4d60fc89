"""Folders that belong to one process; the next process removes the folders of killed ones.

A process locks its folder. The system releases the lock when the process ends in any way, so a folder without a held
lock was left behind. On file systems without locks (NFS) nothing is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def own_folder(parent: str | Path, prefix: str, spare: str = "") -> Iterator[Path]:
    """Make a folder that is removed at the end of the block; first remove folders of killed processes.

    Args:
        parent: existing folder to make it in.
        prefix: beginning of the names of all folders of its kind, and of no others.
        spare: a name in the folder; if it exists, it and the folder stay.
    """
    remove_left_behind(parent, prefix, spare)
    folder, lock = _locked_folder(parent, prefix)
    try:
        yield folder
    finally:
        _remove(folder, spare)
        os.close(lock)


def remove_left_behind(parent: str | Path, prefix: str, spare: str = "") -> None:
    """Remove the folders of this user whose processes are gone; see :func:`own_folder`."""
    for folder in Path(parent).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # it is in use, or goes at this moment
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(folder, spare)
            finally:
                os.close(lock)


def _locked_folder(parent: str | Path, prefix: str) -> tuple[Path, int]:
    """Make a folder and lock it; make another one if a different process removed it before the lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)


def _remove(folder: Path, spare: str) -> None:
    if not spare or not (folder / spare).exists():
        shutil.rmtree(folder, ignore_errors=True)
        return
    for entry in folder.iterdir():
        if entry.name != spare:
            shutil.rmtree(entry, ignore_errors=True)
