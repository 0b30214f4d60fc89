"""Locks on the folders of a run: a second run would mix its steps and checkpoints with the first run's.

A POSIX lock on a file in the folder. The system releases it when the process ends in any way, and a forked process,
which may write a checkpoint, does not hold it. On file systems without locks no second run is found.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from megatron_rc.launch.errors import RunError
from megatron_rc.launch.run_config import RunConfig

IN_USE_FILE = ".in-use"


@contextlib.contextmanager
def in_use(config: RunConfig) -> Iterator[None]:
    """Lock this run's folder and its ``--save`` inside the block; for rank 0.

    Raises:
        RunError: another run has one of the locks.
    """
    folder = Path(config.launch.runs_dir) / config.launch.run_name
    save = config.checkpoints.save
    with contextlib.ExitStack() as stack:
        if save:
            lock(f"--save {save}", Path(save), stack)
        lock(f"--runs-dir {config.launch.runs_dir}, --run-name {config.launch.run_name}", folder, stack)
        yield


def lock(name: str, folder: Path, stack: contextlib.ExitStack) -> None:
    """Lock a folder until a stack ends.

    Args:
        name: the flags that name the folder, for the error.
        folder: the folder; made if it is not there.
        stack: the end of this stack releases the lock.

    Raises:
        RunError: another run has the lock.
    """
    with contextlib.suppress(OSError):  # the first write to the folder reports the error
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        if is_new:
            stack.callback(_remove_if_empty, folder)
        path = folder / IN_USE_FILE
        # What a link leads to would be written over: it is not followed, and the folder is not locked.
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        file = stack.enter_context(os.fdopen(opened, "a+", encoding="utf-8"))
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise RunError(
                f"{name}: {_owner(file)} writes there: wait until it has ended, or choose another folder (if it has "
                f"ended, remove {path})"
            ) from None
        stack.callback(path.unlink, missing_ok=True)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()


def _remove_if_empty(folder: Path) -> None:
    """Remove the empty folder of a refused run."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def _owner(file: TextIO) -> str:
    """Describe the run that has the lock."""
    file.seek(0)
    return f"another run ({file.read(200).strip() or 'it begins at this moment'})"
