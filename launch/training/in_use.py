"""Folders that one run alone may write to: a second one would mix its steps and checkpoints with the first one's.

The lock is one of POSIX, on a file in the folder. The system gives it up when the process ends in whatever way, and a
process that was forked, as to write a checkpoint, does not hold it. Where files cannot be locked, nothing is found out.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from megatron_rc.launch.run_config import RunConfig

IN_USE_FILE = ".in-use"


@contextlib.contextmanager
def in_use(config: RunConfig) -> Iterator[str | None]:
    """Keep other runs out of this one's folder and of its ``--save``, inside this block; for rank 0.

    Yields:
        Why they cannot be used, if another run does.
    """
    folder = Path(config.launch.runs_dir) / config.launch.run_name
    save = config.checkpoints.save
    folders = {f"--save {save}": Path(save)} if save else {}
    folders[f"--runs-dir {config.launch.runs_dir}, --run-name {config.launch.run_name}"] = folder
    with contextlib.ExitStack() as stack:
        yield next(filter(None, (_taken(name, place, stack) for name, place in folders.items())), None)


def _taken(name: str, folder: Path, stack: contextlib.ExitStack) -> str | None:
    """Lock a folder until the stack ends; the sentence for one that another run has."""
    with contextlib.suppress(OSError):  # a folder that cannot be written to is told of by what writes there
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        if is_new:
            stack.callback(_remove_if_empty, folder)
        path = folder / IN_USE_FILE
        if path.is_symlink():
            return f"{name}: {path} is a link, and what it leads to would be written over: remove it"
        # A link that was put there a moment ago is an error.
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        file = stack.enter_context(os.fdopen(opened, "a+", encoding="utf-8"))
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return (
                f"{name}: {_owner(file)} writes there: wait until it has ended, or choose another folder (if it has "
                f"ended, remove {path})"
            )
        stack.callback(path.unlink, missing_ok=True)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
    return None


def _remove_if_empty(folder: Path) -> None:
    """A run that is refused leaves no folder."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def _owner(file: TextIO) -> str:
    """The run that has the lock, in words."""
    file.seek(0)
    return f"another run ({file.read(200).strip() or 'it begins at this moment'})"
