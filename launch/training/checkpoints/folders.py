"""A folder of checkpoints: Megatron's names, and the tracker file that says which one is the newest."""

from __future__ import annotations

from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"


def iteration_folder(folder: str | Path, iteration: int) -> Path:
    """Megatron's name of one checkpoint."""
    return Path(folder) / f"iter_{iteration:07d}"


def latest_iteration(folder: str | Path) -> int | None:
    """The newest checkpoint in the folder, or None.

    Raises:
        ValueError: the tracker file holds no number, or names a checkpoint that is not there.
    """
    tracker = Path(folder) / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    # ``isdigit`` knows digits that ``int`` refuses, and Megatron's names have seven.
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ValueError(f"{tracker} holds {text[:40]!r}: expected the number of a checkpoint")
    if not (iteration_folder(folder, int(text)) / "metadata.json").is_file():
        raise ValueError(f"{tracker} names checkpoint {text}, which is not complete: write the number of another one")
    return int(text)
