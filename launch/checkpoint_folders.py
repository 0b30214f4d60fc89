"""A folder of checkpoints: Megatron's names, the tracker file with the newest one's number, and removal of old ones.

A checkpoint is written under another name and renamed when it is whole. So no killed run, full disk or second attempt
leaves half a checkpoint behind, or harms an older one.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
_PARTIAL = ".partial"
_REMOVED = ".removed"
_REPLACED = ".replaced"


def iteration_folder(folder: str | Path, iteration: int) -> Path:
    """Return Megatron's path of one checkpoint."""
    return Path(folder) / f"iter_{iteration:07d}"


def partial_folder(folder: str | Path, iteration: int) -> Path:
    """Return the path of a checkpoint that is not whole yet."""
    return iteration_folder(folder, iteration).with_suffix(_PARTIAL)


def latest_iteration(folder: str | Path) -> int | None:
    """Return the number of the newest checkpoint, or None.

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


def existing_iteration(folder: str | Path, flag: str) -> int:
    """Return the number of the newest checkpoint.

    Args:
        folder: folder of checkpoints.
        flag: flag that named it; the same flag with the suffix ``-hf`` takes Hugging Face directories.

    Raises:
        ValueError: as in :func:`latest_iteration`, or the folder holds no checkpoint.
    """
    number = latest_iteration(folder)
    if number is not None:
        return number
    remedy = "name another one"
    if (Path(folder) / "config.json").is_file():
        remedy = f"give a Hugging Face directory as {flag}-hf {folder}"
    raise ValueError(f"the folder holds no checkpoint: {remedy}")


def iterations(folder: str | Path) -> list[int]:
    """Return the numbers of all checkpoints, whole or not, the oldest first."""
    names = (re.fullmatch(r"iter_(\d{7,9})", path.name) for path in Path(folder).glob("iter_*") if path.is_dir())
    return sorted(int(match[1]) for match in names if match)


def restore(folder: str | Path) -> None:
    """Bring back a checkpoint whose replacement never got its name."""
    for older in Path(folder).glob(f"iter_*{_REPLACED}"):
        if not older.with_suffix("").exists():
            older.rename(older.with_suffix(""))


def begin(folder: str | Path, iteration: int) -> None:
    """Make an empty folder for a new checkpoint; remove the remains of killed runs, after :func:`restore`."""
    restore(folder)
    for suffix in (_PARTIAL, _REMOVED, _REPLACED):
        for left in Path(folder).glob(f"iter_*{suffix}"):
            shutil.rmtree(left, ignore_errors=True)
    partial_folder(folder, iteration).mkdir(parents=True)


def discard(folder: str | Path, iteration: int) -> None:
    """Remove a checkpoint that could not be written."""
    shutil.rmtree(partial_folder(folder, iteration), ignore_errors=True)


def complete(folder: str | Path, iteration: int) -> None:
    """Give a checkpoint its name and write its number to the tracker file; both have then reached the disk."""
    final = iteration_folder(folder, iteration)
    older = final.with_suffix(_REPLACED)
    put_in_place(partial_folder(folder, iteration), final, older)
    _sync_folder(Path(folder))
    write_durably(Path(folder) / TRACKER, str(iteration))
    shutil.rmtree(older, ignore_errors=True)


def put_in_place(partial: Path, final: Path, older: Path) -> None:
    """Rename ``partial`` to ``final``; a folder of that name moves to ``older``, and back if the renaming fails."""
    if final.exists():
        final.rename(older)
    try:
        partial.rename(final)
    except OSError:
        if older.exists():
            older.rename(final)
        raise


def prune(folder: str | Path, newest: int, keep_last: int, keep_every: int | None) -> None:
    """Remove all checkpoints up to ``newest`` except the last ``keep_last`` and the multiples of ``keep_every``.

    Later checkpoints, of an earlier run that went further, stay.
    """
    past = [number for number in iterations(folder) if number <= newest]
    for number in past[:-keep_last]:
        if keep_every is None or number % keep_every:
            # Renamed first, so that a killed run leaves no half checkpoint under a known name.
            gone = iteration_folder(folder, number).with_suffix(_REMOVED)
            iteration_folder(folder, number).rename(gone)
            shutil.rmtree(gone)


def write_durably(path: Path, text: str) -> None:
    """Write a file so that after a crash either the new or the old file is whole."""
    written = path.with_name(f"{path.name}.partial")
    with written.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    written.replace(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Write new names in the folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
