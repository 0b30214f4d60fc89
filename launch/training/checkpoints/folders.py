"""A folder of checkpoints: Megatron's names, the tracker file that says which one is the newest, and what is kept.

A checkpoint is written under a name of its own and renamed when it is whole, so that no killed run, full disk or second
attempt leaves half of one behind, or harms one that is there.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
_PARTIAL, _REMOVED, _REPLACED = ".partial", ".removed", ".replaced"


def iteration_folder(folder: str | Path, iteration: int) -> Path:
    """Megatron's name of one checkpoint."""
    return Path(folder) / f"iter_{iteration:07d}"


def partial_folder(folder: str | Path, iteration: int) -> Path:
    """Where a checkpoint is written before it is whole."""
    return iteration_folder(folder, iteration).with_suffix(_PARTIAL)


def latest_iteration(folder: str | Path) -> int | None:
    """The newest checkpoint in the folder, or None.

    Raises:
        ValueError: the tracker file holds no number, or names a checkpoint that is not there.
    """
    tracker = Path(folder) / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    # ``isdigit`` knows digits that ``int`` refuses.
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ValueError(f"{tracker} holds {text[:40]!r}: expected the number of a checkpoint")
    if not (iteration_folder(folder, int(text)) / "metadata.json").is_file():
        raise ValueError(f"{tracker} names checkpoint {text}, which is not complete: write the number of another one")
    return int(text)


def iterations(folder: str | Path) -> list[int]:
    """Every checkpoint in the folder, whole or not, the oldest first."""
    names = (re.fullmatch(r"iter_(\d{7,9})", path.name) for path in Path(folder).glob("iter_*") if path.is_dir())
    return sorted(int(match[1]) for match in names if match)


def restore(folder: str | Path) -> None:
    """Bring back a checkpoint that was to be replaced by another one, which never got its name."""
    for older in Path(folder).glob(f"iter_*{_REPLACED}"):
        if not older.with_suffix("").exists():
            older.rename(older.with_suffix(""))


def begin(folder: str | Path, iteration: int) -> None:
    """An empty place for a new checkpoint; what killed runs left behind goes.

    But for what :func:`restore` brings back.
    """
    restore(folder)
    for suffix in (_PARTIAL, _REMOVED, _REPLACED):
        for left in Path(folder).glob(f"iter_*{suffix}"):
            shutil.rmtree(left, ignore_errors=True)
    partial_folder(folder, iteration).mkdir(parents=True)


def discard(folder: str | Path, iteration: int) -> None:
    """Give up a checkpoint that could not be written."""
    shutil.rmtree(partial_folder(folder, iteration), ignore_errors=True)


def complete(folder: str | Path, iteration: int) -> None:
    """Give a checkpoint its name, and point the tracker file at it; both have reached the disk afterwards."""
    final = iteration_folder(folder, iteration)
    older = final.with_suffix(_REPLACED)
    if final.exists():
        final.rename(older)
    try:
        partial_folder(folder, iteration).rename(final)
    except OSError:
        if older.exists():
            older.rename(final)
        raise
    _sync_folder(Path(folder))
    write_durably(Path(folder) / TRACKER, str(iteration))
    shutil.rmtree(older, ignore_errors=True)


def prune(folder: str | Path, newest: int, keep_last: int, keep_every: int | None) -> None:
    """Remove all checkpoints up to ``newest`` but the ``keep_last`` last and those at multiples of ``keep_every``.

    Later ones, of an earlier run that went further, are left alone.
    """
    past = [number for number in iterations(folder) if number <= newest]
    for number in past[:-keep_last]:
        if keep_every is None or number % keep_every:
            # A name that no reader looks for, so that a killed run leaves no half of a checkpoint.
            gone = iteration_folder(folder, number).with_suffix(_REMOVED)
            iteration_folder(folder, number).rename(gone)
            shutil.rmtree(gone)


def write_durably(path: Path, text: str) -> None:
    """The whole file or, if the machine stops, the one before."""
    written = path.with_name(f"{path.name}.partial")
    with written.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    written.replace(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Let new names in the folder reach the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
