"""The manifest of a checkpoint: size and SHA-256 of every other file, written last."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_rc.launch.checkpoint_folders import write_durably
from megatron_rc.launch.rollouts.open_rollouts import FILES
from megatron_rc.launch.training.checkpoints.pieces import reason_of

MANIFEST = "manifest.json"
_BLOCK = 1 << 20


def files_of(folder: Path) -> list[str]:
    """Return all files except the manifest, the largest first, so that dealing them out gives equal shares."""
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    return sorted(sizes.keys() - {MANIFEST}, key=lambda name: (-sizes[name], name))


def digests_of_share(folder: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Return size and SHA-256 of this rank's share of the files; they have then reached the disk."""
    found = {}
    for name in _share(names):
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())
        found[name] = _digest(folder / name)
    return found


def write_manifest(folder: Path, digests: dict[str, dict[str, Any]]) -> None:
    """Write the manifest, the last file of a checkpoint."""
    write_durably(folder / MANIFEST, json.dumps({"files": dict(sorted(digests.items()))}, indent=1) + "\n")


def damage(folder: Path, *, checksums: bool) -> str | None:
    """Return the damage of a checkpoint that this rank finds; None: no damage.

    Every rank compares names and sizes of all files, and with ``checksums`` reads its share of the files.
    """
    try:
        _check_kinds(folder)
        _check_manifest(folder, checksums=checksums)
    except (OSError, ValueError) as error:
        return reason_of(error)
    return None


def _share(names: list[str]) -> list[str]:
    """Return this rank's share of the files; all files in a process without other ranks."""
    return names[dist.get_rank() :: dist.get_world_size()] if dist.is_initialized() else names


def _check_kinds(folder: Path) -> None:
    """Refuse pipes and devices: reading one might never end."""
    for path in folder.rglob("*"):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path.name} is no file")


def _check_manifest(folder: Path, *, checksums: bool) -> None:
    files = _read_manifest(folder / MANIFEST)
    if checksums:
        _check_no_more(folder, files)
    for name, (size, _) in files.items():
        found = (folder / name).stat().st_size
        if found != size:
            raise ValueError(f"{name} has {found} bytes instead of {size}")
    if checksums:
        for name in _share(sorted(files, key=lambda name: (-files[name][0], name))):
            if _digest(folder / name)["sha256"] != files[name][1]:
                raise ValueError(f"{name} is not what was written: its checksum differs")


def _check_no_more(folder: Path, files: Collection[str]) -> None:
    """Refuse files that the manifest does not list and that would be read by name."""
    for path in sorted(folder.iterdir()):
        is_read = path.name == "common.pt" or path.suffix == ".distcp" or path.name.startswith(FILES)
        if is_read and path.name not in files:
            raise ValueError(f"{path.name} is not among the files that {MANIFEST} lists: remove it, it came later")


def _read_manifest(path: Path) -> dict[str, tuple[int, str]]:
    """Read size and SHA-256 of each file by its name, which lies inside the checkpoint's folder."""
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        files = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in json.loads(text)["files"].items()}
        # The JSON would still be valid without its last byte, the line end.
        is_good = text.endswith("\n") and all(map(_is_inside, files))
    except (AttributeError, ValueError, KeyError, OverflowError, TypeError, RecursionError):
        is_good = False
    if not is_good:
        raise ValueError(f"{path.name} is no list of files with their sizes and checksums")
    return files


def _is_inside(name: str) -> bool:
    return bool(name) and not Path(name).is_absolute() and ".." not in Path(name).parts and "\0" not in name


def _digest(path: Path) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
    return {"bytes": size, "sha256": digest.hexdigest()}
