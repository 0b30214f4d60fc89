"""Write a model's tensors as safetensors files, with one file in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 4 << 30


def write_tensors(folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int = SHARD_BYTES) -> int:
    """Write ``model.safetensors``, or several files and their index, with the names that transformers uses.

    The tensors are read one at a time; a file is closed at ``shard_bytes``. Returns the bytes of all tensors.
    """
    files: list[Path] = []
    weight_map: dict[str, int] = {}
    shard: dict[str, Tensor] = {}
    total = held = 0
    for name, tensor in tensors:
        shard[name] = tensor.detach().cpu().contiguous()
        weight_map[name] = len(files)
        total = total + shard[name].nbytes
        held = held + shard[name].nbytes
        del tensor
        if held >= shard_bytes:
            files.append(_write(folder, shard, len(files)))
            held = 0
    if shard or not files:
        files.append(_write(folder, shard, len(files)))
    _name(folder, files, weight_map, total)
    return total


def _write(folder: Path, shard: dict[str, Tensor], number: int) -> Path:
    """Write the shard to a file, and empty it."""
    from safetensors.torch import save_file

    path = folder / f"part-{number}.safetensors"
    save_file(shard, path, metadata={"format": "pt"})
    shard.clear()
    return path


def _name(folder: Path, files: list[Path], weight_map: dict[str, int], total: int) -> None:
    """Give the files their final names, which contain the number of files, and write the index."""
    if len(files) == 1:
        files[0].rename(folder / SINGLE)
        return
    names = [f"model-{number + 1:05d}-of-{len(files):05d}.safetensors" for number in range(len(files))]
    for path, name in zip(files, names, strict=True):
        path.rename(folder / name)
    index = {"metadata": {"total_size": total}, "weight_map": {name: names[at] for name, at in weight_map.items()}}
    (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
