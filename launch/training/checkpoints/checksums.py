"""Checksums of a checkpoint: ``manifest.json`` has the size and the SHA-256 of every other file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megatron_rc.launch.checkpoint_folders import write_durably

MANIFEST = "manifest.json"
_BLOCK = 1 << 20

Checksums = dict[str, dict[str, Any]]  # {"bytes": size, "sha256": hexadecimal digits} by the file's name


def checksums_of_rank(folder: Path, rank: int, on_progress: Callable[[], None]) -> Checksums:
    """Return the checksums of a rank's own tensor files, on rank 0 also of all files without tensors.

    The files have then reached the disk.
    """
    paths = sorted(folder.glob(f"__{rank}_*.distcp"))
    if rank == 0:
        paths += [path for path in sorted(folder.iterdir()) if path.suffix != ".distcp" and path.name != MANIFEST]
    checksums = {}
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
        checksums[path.name] = {"bytes": path.stat().st_size, "sha256": _sha256(path, on_progress)}
    return checksums


def write_manifest(folder: Path, checksums_of_ranks: Iterable[Checksums]) -> None:
    """Write the manifest, the last file of a checkpoint."""
    files = {name: entry for checksums in checksums_of_ranks for name, entry in checksums.items()}
    write_durably(folder / MANIFEST, json.dumps({"files": dict(sorted(files.items()))}, indent=1) + "\n")


def check_files(folder: Path, *, rank: int = 0, ranks: int = 1, checksums: bool = True) -> None:
    """Compare the sizes of all files, and the checksums of every ``ranks``-th one, with the manifest.

    Raises:
        ValueError: names a file that is missing, has another size or another content; or there is no manifest.
    """
    for number, (name, (size, sha256)) in enumerate(sorted(_read_manifest(folder / MANIFEST).items())):
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{name} is missing")
        found_size = path.stat().st_size
        if found_size != size:
            raise ValueError(f"{name} has {found_size} bytes instead of {size}")
        if checksums and number % ranks == rank and _sha256(path) != sha256:
            raise ValueError(f"{name} is not what was written: its checksum differs")


def _read_manifest(path: Path) -> dict[str, tuple[int, str]]:
    """Read size and SHA-256 of each file by its name."""
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        files = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in json.loads(text)["files"].items()}
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{path.name} is no list of files with their sizes and checksums") from error
    outside = [name for name in files if name != Path(name).name or name == ".."]
    # The JSON would still be valid without its last byte, the line end.
    if outside or not text.endswith("\n"):
        raise ValueError(f"{path.name} is no list of files with their sizes and checksums")
    return files


def _sha256(path: Path, on_progress: Callable[[], None] = lambda: None) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            on_progress()
            digest.update(block)
    return digest.hexdigest()
